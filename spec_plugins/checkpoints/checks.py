"""Whether a head is whole, and whether it fits a target model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from spec_plugins.checkpoints.head import EagleConfig, Head, HeadConfig, MedusaConfig
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["INDICES", "TargetSizes", "check_fits", "check_head", "misfits", "target_ids", "tensor_shapes"]

INDICES = frozenset({"d2t", "token_map"})
"""Tensors that hold token ids; all others hold weights."""
_SHOWN = 3


class TargetSizes(Protocol):
    """What is asked of a target; ``None`` where it is not known. :class:`spec_plugins.Target` has it too."""

    @property
    def hidden_size(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int | None: ...


def tensor_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a head of this configuration has, by their canonical names, with their shapes."""
    return _medusa_shapes(config) if isinstance(config, MedusaConfig) else _eagle_shapes(config)


def _medusa_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    width, drafts = config.hidden_size, config.draft_vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (width, width)
            if config.bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (width,)
        if config.lm_head == "own":
            shapes[f"lm_heads.{head}.weight"] = (drafts, width)
    if config.lm_head == "shared":
        shapes["lm_head.weight"] = (drafts, width)
    if drafts < config.vocab_size:
        shapes["token_map"] = (drafts,)
    return shapes


def _eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    width, inner, eagle3 = config.hidden_size, config.intermediate_size, config.method == "eagle3"
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    taken = config.features * config.target_hidden_size if eagle3 else 2 * width
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, taken)}
    if config.fc_bias:
        shapes["fc.bias"] = (width,)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        source = 2 * width if eagle3 and i == 0 else width
        for name, rows, columns in (
            ("q", queries, source), ("k", keys, source), ("v", keys, source), ("o", width, queries),
        ):  # fmt: skip
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        if eagle3 or i > 0:
            shapes[f"{layer}.input_layernorm.weight"] = (width,)
        if eagle3 and i == 0:
            shapes[f"{layer}.hidden_norm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, width)
    if eagle3:
        shapes |= {"norm.weight": (width,), "lm_head.weight": (config.draft_vocab_size, width)}
        if config.draft_vocab_size < config.vocab_size:
            shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def check_head(
    head: Head,
    stored_name: Callable[[str], str] = str,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Check that a head has the tensors that its configuration calls for, and that they can be computed with.

    Reads every tensor once. ``stored_name`` says what a tensor is called where the head comes from.

    Raises:
        ConfigError: a tensor is missing, unknown, or of the wrong shape or dtype; a weight that is not
            finite; token ids out of range, not ascending or not unique.
    """
    import torch

    shapes, tensors = tensor_shapes(head.config), head.tensors
    faults = []
    if missing := [name for name in shapes if name not in tensors]:
        faults.append(f"lacks {_list(map(stored_name, missing))}")
    if unknown := [name for name in tensors if name not in shapes]:
        faults.append(f"has no place for {_list(map(stored_name, unknown))}")
    wrong = [name for name in shapes if name in tensors and tuple(tensors[name].shape) != shapes[name]]
    if wrong:
        told = (f"{stored_name(n)} is {list(tensors[n].shape)}, not {list(shapes[n])}" for n in wrong)
        faults.append(f"{_list(told)}")
    if faults:
        raise ConfigError(
            f"the weights are not those that the configuration calls for, {_sizes(head.config)}: "
            f"{'; '.join(faults)}. Wrong sizes in config.json, or weights of another head"
        )
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for name, tensor in tensors.items():
        on_tensor(name)
        if name in INDICES:
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ConfigError(
                    f"{stored_name(name)} must hold token ids as int64, and is {_dtype(tensor)}"
                )
        elif tensor.dtype not in floats:
            raise ConfigError(
                f"{stored_name(name)} is {_dtype(tensor)}; weights must be float16, bfloat16, float32 or "
                "float64, and quantized ones are not supported"
            )
        elif not _finite(tensor):
            raise ConfigError(f"{stored_name(name)} holds NaN or infinite weights; the head is broken")
    ids = target_ids(head)
    if ids is not None:
        if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size:
            wrong_id = int(ids.min() if int(ids.min()) < 0 else ids.max())
            raise ConfigError(
                f"the reduced vocabulary names token {wrong_id}, and the target has {head.config.vocab_size}"
            )
        if len(ids) > 1 and bool((ids.diff() <= 0).any()):
            raise ConfigError("the reduced vocabulary's tokens must ascend, each of them once")


def target_ids(head: Head) -> torch.Tensor | None:
    """The target's id of each token that a head drafts, ``[draft_vocab]`` int64; ``None``: it drafts all."""
    import torch

    if "token_map" in head.tensors:
        return head.tensors["token_map"].long()
    if "d2t" in head.tensors:
        offsets = head.tensors["d2t"].long()
        return offsets + torch.arange(len(offsets), device=offsets.device)
    return None


def misfits(config: HeadConfig, target: TargetSizes) -> list[str]:
    """Why a head cannot draft for a target, a sentence each; none where it can, as far as sizes say."""
    found = []
    width = config.target_hidden_size if isinstance(config, EagleConfig) else config.hidden_size
    if target.hidden_size is not None and target.hidden_size != width:
        found.append(f"it is made for a target of hidden size {width}, and this one has {target.hidden_size}")
    if target.vocab_size != config.vocab_size:
        found.append(
            f"it is made for a target of {config.vocab_size} tokens, and this one has {target.vocab_size}"
        )
    if target.num_layers is not None and isinstance(config, EagleConfig):
        layers = list(config.layers_taken(target.num_layers))
        if any(not 0 <= layer < target.num_layers for layer in layers) or layers != sorted(set(layers)):
            taken = "named in its files" if config.aux_layers else "that are taken where its files name none"
            found.append(
                f"it takes the input of the target's layers {', '.join(map(str, layers))}, {taken}, and this "
                f"one has layers 0 to {target.num_layers - 1}"
            )
    return found


def check_fits(config: HeadConfig, target: TargetSizes) -> None:
    """Raise :class:`ConfigError` where :func:`misfits` finds anything."""
    if found := misfits(config, target):
        raise ConfigError(
            f"the head does not fit the target: {'; '.join(found)}. Take the head of this target"
        )


def _finite(tensor: torch.Tensor) -> bool:
    """Without a mask as large as the tensor: a NaN is the least and the greatest of its tensor."""
    import torch

    least, greatest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) and torch.isfinite(greatest))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _list(items: Iterable[str]) -> str:
    every = list(items)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def _sizes(config: HeadConfig) -> str:
    names = ["hidden_size", "vocab_size", "draft_vocab_size", "num_layers"]
    if isinstance(config, MedusaConfig):
        names.insert(3, "num_heads")
    said: Mapping[str, object] = config.model_dump()
    return ", ".join(f"{name} {said[name]}" for name in names)
