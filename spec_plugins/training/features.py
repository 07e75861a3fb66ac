"""What the target model's layers say over one's traffic, captured once and kept in shards on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_plugins.errors import ConfigError
from spec_plugins.traffic.conversations import Conversation, Traffic

if TYPE_CHECKING:
    import torch

__all__ = ["Captured", "FeatureStore", "Shard"]

CONVERSATIONS_PER_SHARD = 64
SHARDS_AT_LEAST = 20
"""So many of few conversations too, since whole shards are held out of training."""
_MANIFEST, _VERSION = "manifest.json", 1


@dataclass(frozen=True, slots=True)
class Captured:
    """What a store was made from; another target, other data or other layers need another store."""

    target: str
    weights: str
    """A digest of the target's weights."""
    data_sha256: str
    max_length: int
    aux_layers: tuple[int, ...]
    conversations: int
    tokens: int
    answered_tokens: int
    version: int = _VERSION


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Some conversations, one after the other."""

    tokens: torch.Tensor
    """``[n]`` int32."""
    answered: torch.Tensor
    """``[n]`` bool: said by the target."""
    offsets: torch.Tensor
    """``[conversations + 1]`` int32."""
    last: torch.Tensor
    """``[n, hidden_size]`` bfloat16: what the LM head sees at each position."""
    aux: torch.Tensor
    """``[n, layers * hidden_size]`` bfloat16: the input of each auxiliary layer, side by side."""


class FeatureStore:
    """A folder of shards and a manifest. Filling it may be interrupted and goes on where it stopped.

    Takes ``2 * (layers + 1) * hidden_size`` bytes a token on disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(
        self,
        model: Any,
        traffic: Traffic,
        about: Captured,
        advance: Callable[[int], None] = lambda tokens: None,
        batch_tokens: int = 4096,
    ) -> None:
        """Run the target over all conversations, in their order.

        Args:
            model: a Hugging Face causal language model.
            traffic: what to run it over.
            about: what the manifest will say.
            advance: told the number of tokens that each step took.
            batch_tokens: most positions in one forward pass, padding included.

        Raises:
            ConfigError: the folder holds something else.
        """
        self._begin(about)
        count = len(traffic.conversations)
        size = max(1, min(CONVERSATIONS_PER_SHARD, count // SHARDS_AT_LEAST))
        for number, first in enumerate(range(0, count, size)):
            conversations = traffic.conversations[first : first + size]
            path = self.folder / f"features-{number:05d}.safetensors"
            if path.exists():
                advance(sum(len(c.tokens) for c in conversations))
            else:
                _write(path, _capture(model, conversations, about.aux_layers, batch_tokens, advance))

    def _begin(self, about: Captured) -> None:
        path = self.folder / _MANIFEST
        if path.exists():
            if (found := self.about()) != about:
                changed = [k for k, v in asdict(about).items() if asdict(found)[k] != v]
                raise ConfigError(
                    f"features: {str(self.folder)!r} was captured with other {', '.join(changed)}; choose "
                    "another folder, or delete that one"
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(f.name != "manifest.part" for f in self.folder.iterdir()):
            raise ConfigError(f"features: {str(self.folder)!r} holds something else; choose another folder")
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(about), indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    def about(self) -> Captured:
        """What it was made from; raises :class:`ConfigError` where that cannot be read."""
        try:
            fields = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            return Captured(**{**fields, "aux_layers": tuple(fields["aux_layers"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"features: {str(self.folder)!r} has no readable manifest: {error}") from error

    def paths(self) -> list[Path]:
        """Its shards, in order."""
        return sorted(self.folder.glob("features-*.safetensors"))

    @staticmethod
    def read(path: Path) -> Shard:
        """One shard, in memory."""
        from safetensors.torch import load_file

        return Shard(**load_file(path))


def _capture(
    model: Any,
    conversations: Sequence[Conversation],
    aux_layers: Sequence[int],
    batch_tokens: int,
    advance: Callable[[int], None],
) -> Shard:
    import torch

    lengths = np.array([len(c.tokens) for c in conversations])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    width, total = model.config.get_text_config().hidden_size, int(offsets[-1])
    last = torch.empty(total, width, dtype=torch.bfloat16)
    aux = torch.empty(total, width * len(aux_layers), dtype=torch.bfloat16)
    for batch in _batches(lengths, batch_tokens):
        longest = int(lengths[batch].max())
        ids = np.zeros((len(batch), longest), np.int64)
        for row, i in enumerate(batch):
            ids[row, : lengths[i]] = conversations[i].tokens
        # Padding stands behind, where causal attention does not see it.
        with torch.inference_mode():
            states = model.base_model(
                input_ids=torch.from_numpy(ids).to(model.device), output_hidden_states=True, use_cache=False
            ).hidden_states
        for row, i in enumerate(batch):
            here, n = slice(int(offsets[i]), int(offsets[i + 1])), int(lengths[i])
            last[here] = states[-1][row, :n]
            aux[here] = (
                torch.cat([states[layer][row, :n] for layer in aux_layers], -1) if aux_layers else aux[here]
            )
        advance(int(lengths[batch].sum()))
    return Shard(
        torch.from_numpy(np.concatenate([c.tokens for c in conversations])),
        torch.from_numpy(np.concatenate([c.answered for c in conversations])),
        torch.from_numpy(offsets), last, aux,
    )  # fmt: skip


def _batches(lengths: Any, batch_tokens: int) -> Iterator[Any]:
    """Indices of conversations of like length, as many as fit."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * lengths[order[end]] <= batch_tokens:
            end += 1
        yield order[start:end]
        start = end


def _write(path: Path, shard: Shard) -> None:
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".part")
    save_file({name: getattr(shard, name).contiguous() for name in Shard.__slots__}, unfinished)
    os.replace(unfinished, path)
