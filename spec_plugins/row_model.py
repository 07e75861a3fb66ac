"""A Hugging Face causal language model whose cache gives every request a row of its own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from spec_plugins.errors import UnsupportedError
from spec_plugins.row_cache import RowCache

__all__ = ["RowModel"]


class RowModel:
    """A decoder and its :class:`~spec_plugins.row_cache.RowCache`: forward passes over ragged batches."""

    def __init__(self, model: Any, rows: int, host: str) -> None:
        """
        Args:
            model: a causal language model of transformers.
            rows: how many requests its cache has room for.
            host: who runs it, for errors: "the embedded engine".

        Raises:
            UnsupportedError: it cannot be run so, with the reason.
        """
        self.model = model
        self.config = model.config.get_text_config()
        _check_model(model, self.config, host)
        self.max_model_len = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.cache = RowCache(self.config.num_hidden_layers, rows)
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 calls it so; the old name goes with 5.40.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device  # type: ignore[no-any-return]

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
        *,
        last_only: bool = False,
        hidden_states: bool = False,
    ) -> Any:
        """One forward pass, after the cache was told where it writes.

        Args:
            ids: ``[n, width]``.
            positions: ``[n, width]``.
            visible: ``[n, width, extent]`` bool: what each may attend to. ``None``: all before it.
            last_only: logits of the last column only, ``[n, 1, vocab]``.
            hidden_states: whether the output holds those of all layers.
        """
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None if visible is None else self._mask(visible[:, None]),
            use_cache=True,
            output_hidden_states=hidden_states,
            **{self._cache_keyword: self.cache},
            **(self._last_only if last_only else {}),
        )
        if last_only:
            output.logits = output.logits[:, -1:]
        return output

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        if self.config._attn_implementation == "sdpa":
            return visible
        least = torch.finfo(self.model.dtype).min
        return torch.zeros_like(visible, dtype=self.model.dtype).masked_fill_(~visible, least)


def _check_model(model: Any, config: Any, host: str) -> None:
    kind = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{kind} takes no position_ids, so draft tokens cannot be placed; {host} needs a decoder that "
            "does, as most with rotary or learned positions do"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedError(
            f"{kind} runs {config._attn_implementation!r} attention, which takes no mask of ours; load it "
            "with attn_implementation='sdpa'"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layers = set(
        getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    )
    if layers != {"full_attention"}:
        raise UnsupportedError(
            f"{kind} has layers of {', '.join(sorted(layers - {'full_attention'}))}; {host} takes full "
            "attention only, since it cannot take rejected tokens back from other caches. Serve it with "
            "vLLM or SGLang instead"
        )
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{kind} is an encoder-decoder; only decoders are supported")
