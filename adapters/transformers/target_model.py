"""The target model in the embedded engine: loading, checking, and its two kinds of forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spec_plugins.errors import ConfigError
from spec_plugins.proposer import Drafts, Target
from spec_plugins.row_model import RowModel
from spec_plugins.trees import ancestor_masks, node_depths
from spec_plugins.verification import Verdict

__all__ = ["TargetModel", "load_model"]

Lengths = npt.NDArray[np.int64]


class TargetModel(RowModel):
    """A causal language model with a cache in which every request owns a row."""

    def __init__(self, model: Any, tokenizer: Any, rows: int) -> None:
        """
        Raises:
            UnsupportedError: drafts cannot be verified with this model, with the reason.
        """
        super().__init__(model, rows, "the embedded engine")
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.gives_hidden_states = False
        """Whether outputs hold the hidden states of all layers."""

    def describe(self, **host: Any) -> Target:
        """What a proposer is told of this model; ``host`` are the fields that are the engine's to say."""
        return Target(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            model=self.model.name_or_path or None,
            device=str(self.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            hidden_size=self.config.hidden_size,
            num_layers=self.config.num_hidden_layers,
            eos_token_ids=self.eos_token_ids,
            embeddings=lambda: self.model.get_input_embeddings().weight,
            lm_head=lambda: self.model.get_output_embeddings().weight,
            **host,
        )

    def prefill(self, row: int, prompt: Sequence[int]) -> Any:
        """Run a prompt and fill a row with it; logits of its last token only, ``[1, 1, vocab]``."""
        self.cache.prefill(row, len(prompt))
        ids = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        return self.forward(ids, positions, None, last_only=True, hidden_states=self.gives_hidden_states)

    def verify(self, last_tokens: Sequence[int], lengths: Lengths, drafts: Drafts) -> Any:
        """One forward pass over the last committed token and every draft token of each request.

        Args:
            last_tokens: ``[n]``, of the first ``n`` rows.
            lengths: ``[n]``: how many tokens each row's cache holds.
            drafts: ``[n]``.

        Returns:
            The model's output; logits ``[n, 1 + longest draft, vocab]``, slot 0 after the last token.
        """
        n, width = len(drafts), int(drafts.counts.max(initial=0))
        ids = np.zeros((n, width + 1), np.int64)
        ids[:, 0] = last_tokens
        ids[:, 1:] = np.where(np.arange(width) < drafts.counts[:, None], drafts.tokens[:, :width], 0)
        extent = int(lengths.max()) + width + 1
        slot = np.arange(width + 1)
        if drafts.parents is None:
            depths = slot[None]
            mask = np.arange(extent) <= (lengths[:, None] + depths)[:, :, None]
        else:
            parents = np.ascontiguousarray(drafts.parents[:, :width])
            depths = np.pad(node_depths(parents, drafts.counts), ((0, 0), (1, 0)))
            mask = np.repeat((np.arange(extent) < lengths[:, None])[:, None], width + 1, axis=1)
            for i, tree in enumerate(ancestor_masks(parents, drafts.counts)):
                mask[i, :, lengths[i] : lengths[i] + width + 1] = tree
        self.cache.decode(self._tensor(lengths[:, None] + slot), extent)
        return self.forward(
            self._tensor(ids),
            self._tensor(lengths[:, None] + depths),
            self._tensor(mask),
            hidden_states=self.gives_hidden_states,
        )

    def keep(self, lengths: Lengths, drafts: Drafts, verdict: Verdict) -> None:
        """Move the accepted path of each tree to where a chain would be; what is behind it is free."""
        if drafts.parents is None:
            return
        rows, at = np.nonzero((verdict.path >= 0) & (verdict.path != np.arange(verdict.path.shape[1])))
        if len(rows):
            first = lengths[rows] + 1
            self.cache.move(
                self._tensor(rows), self._tensor(first + verdict.path[rows, at]), self._tensor(first + at)
            )

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)


def load_model(
    model: str | Path, tokenizer: Any = None, dtype: str | torch.dtype = "auto"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a folder or hub name.

    Raises:
        ConfigError: it cannot be loaded, with the reason.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        return loaded, tokenizer or AutoTokenizer.from_pretrained(model)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"model: {str(model)!r} cannot be loaded: {error}") from error


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens that the model's generation configuration names, else the tokenizer's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
