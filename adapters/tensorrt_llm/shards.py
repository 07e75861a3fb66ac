"""A head's tensors by TensorRT-LLM's names, each rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_plugins.adapters.tensorrt_llm.base import Base
from spec_plugins.adapters.tensorrt_llm.trees import Choices, depth_of
from spec_plugins.checkpoints import EagleConfig, Head, MedusaConfig
from spec_plugins.checkpoints.streaming import Streamed, streamed
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["rank_tensors"]

_EMBEDDING, _LM_HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is written for one rank."""

    head: Head
    base: Base
    rank: int
    tensors: Mapping[str, Streamed]
    """The target's."""

    def whole(self, name: str) -> Streamed:
        """A tensor that every rank has."""
        tensor = self.head.tensors[name]
        return self._of(tuple(tensor.shape), lambda: tensor)

    def split(self, name: str, dim: int = 0) -> Streamed:
        """This rank's part of a tensor, whose side ``dim`` the ranks divide."""
        tensor = self.head.tensors[name]
        size = tensor.shape[dim] // self.base.tp_size
        shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
        return self._of(shape, lambda: tensor.narrow(dim, self.rank * size, size))

    def split_vocabulary(self, name: str) -> Streamed:
        """This rank's rows of the vocabulary, zeros past its end."""
        import torch

        tensor, rows = self.head.tensors[name], self.base.vocab_rows
        start = min(self.rank * rows, len(tensor))
        there = min(rows, len(tensor) - start)

        def make() -> torch.Tensor:
            found = tensor.narrow(0, start, there)
            return found if there == rows else torch.nn.functional.pad(found, (0, 0, 0, rows - there))

        return self._of((rows, tensor.shape[1]), make)

    def queries_keys_values(self, prefix: str) -> Streamed:
        """This rank's rows of the three, one below the other; ranks share keys where there are fewer."""
        import torch

        config = self.head.config
        assert isinstance(config, EagleConfig)
        tp, width = self.base.tp_size, config.hidden_size
        keys = max(1, config.num_key_value_heads // tp) * config.head_dim
        first = self.rank * config.num_key_value_heads // tp * config.head_dim
        queries = config.num_attention_heads // tp * config.head_dim
        parts = (
            (self.head.tensors[f"{prefix}.q_proj.weight"], self.rank * queries, queries),
            (self.head.tensors[f"{prefix}.k_proj.weight"], first, keys),
            (self.head.tensors[f"{prefix}.v_proj.weight"], first, keys),
        )
        return self._of(
            (queries + 2 * keys, width), lambda: torch.cat([t.narrow(0, at, n) for t, at, n in parts])
        )

    def zeros(self, *shape: int) -> Streamed:
        import torch

        return self._of(shape, lambda: torch.zeros(shape, dtype=self.base.dtype))

    def lm_head(self) -> Streamed:
        """This rank's rows of the target's LM head, or of the embeddings where they are both."""
        shape = (self.base.vocab_rows, self.base.target.hidden_size)
        return self._of_target(_LM_HEAD if _LM_HEAD in self.tensors else _EMBEDDING, shape)

    def embedding(self) -> Streamed:
        """The input embeddings, the head's or the target's, split as the target's are."""
        width, tp = self.base.target.hidden_size, self.base.tp_size
        parallel = self.base.config.get("use_parallel_embedding", False)
        columns = parallel and self.base.config.get("embedding_sharding_dim", 0) == 1
        own = "embed_tokens.weight" in self.head.tensors
        if columns:
            shape = (self.base.target.vocab_size, width // tp)
            return self.split("embed_tokens.weight", 1) if own else self._of_target(_EMBEDDING, shape)
        if parallel:
            shape = (self.base.vocab_rows, width)
            return self.split_vocabulary("embed_tokens.weight") if own else self._of_target(_EMBEDDING, shape)
        shape = (self.base.target.vocab_size, width)
        return self.whole("embed_tokens.weight") if own else self._of_target(_EMBEDDING, shape)

    def _of(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Streamed:
        dtype = self.base.dtype
        return streamed(dtype, shape, lambda: make().to(dtype))

    def _of_target(self, name: str, shape: tuple[int, ...]) -> Streamed:
        found = self.tensors.get(name)
        if found is None or found.shape != shape:
            there = f"is {list(found.shape)}" if found else "is not there"
            raise ConfigError(
                f"{self.base.folder}: rank{self.rank}.safetensors: {name} {there}, and config.json calls for "
                f"{list(shape)}"
            )
        return found


def _medusa_tensors(part: _Rank, config: MedusaConfig) -> Iterator[tuple[str, Streamed]]:
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            linear = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            block = f"blocks.{head}.layers.{layer}"
            yield f"{linear}.weight", part.split(f"{block}.weight")
            rows = config.hidden_size // part.base.tp_size
            # Its blocks have biases always.
            yield f"{linear}.bias", part.split(f"{block}.bias") if config.bias else part.zeros(rows)
        own = {"own": f"lm_heads.{head}.weight", "shared": "lm_head.weight"}.get(config.lm_head)
        yield f"medusa_heads.{head}.lm_head.weight", part.split_vocabulary(own) if own else part.lm_head()


def _eagle_tensors(part: _Rank, config: EagleConfig, nets: int) -> Iterator[tuple[str, Streamed]]:
    """One net for each level of the tree; all have the same weights, each its own copy."""
    for net in range(nets):
        drafter = f"eagle_nets.{net}.drafter"
        yield f"eagle_nets.{net}.lm_head.weight", part.lm_head()
        yield f"{drafter}.vocab_embedding.weight", part.embedding()
        yield f"{drafter}.fc.weight", part.split("fc.weight")
        rows = config.hidden_size // part.base.tp_size
        # Its fc has a bias always.
        yield f"{drafter}.fc.bias", part.split("fc.bias") if config.fc_bias else part.zeros(rows)
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"{drafter}.layers.{i}"
            yield f"{theirs}.attention.qkv.weight", part.queries_keys_values(f"{ours}.self_attn")
            yield f"{theirs}.attention.dense.weight", part.split(f"{ours}.self_attn.o_proj.weight", 1)
            yield f"{theirs}.mlp.fc.weight", part.split(f"{ours}.mlp.gate_proj.weight")
            yield f"{theirs}.mlp.gate.weight", part.split(f"{ours}.mlp.up_proj.weight")
            yield f"{theirs}.mlp.proj.weight", part.split(f"{ours}.mlp.down_proj.weight", 1)
            if i > 0:
                yield f"{theirs}.input_layernorm.weight", part.whole(f"{ours}.input_layernorm.weight")
            yield f"{theirs}.post_layernorm.weight", part.whole(f"{ours}.post_attention_layernorm.weight")


def rank_tensors(head: Head, base: Base, rank: int, choices: Choices) -> dict[str, Streamed]:
    """One rank's tensors, the target's and the head's; none is made yet. Raises :class:`ConfigError`."""
    tensors = base.rank(rank)
    part = _Rank(head, base, rank, tensors)
    if isinstance(head.config, MedusaConfig):
        added = dict(_medusa_tensors(part, head.config))
    else:
        added = dict(_eagle_tensors(part, head.config, depth_of(choices)))
    if twice := added.keys() & tensors.keys():
        raise ConfigError(f"{base.folder}: has a head already: {min(twice)}; take the target's without one")
    return {**tensors, **added}
