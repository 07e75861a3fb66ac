"""An EAGLE head with its cache, ready to be run over the requests of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_plugins.heads.eagle import EagleHead
from spec_plugins.heads.key_value_rows import KeyValueRows

__all__ = ["EagleRunner"]


class EagleRunner:
    """A head, what it borrows from its target, and keys and values by request."""

    def __init__(
        self,
        head: EagleHead,
        embeddings: torch.Tensor,
        lm_head: torch.Tensor,
        vocab_size: int,
        cache_tokens: int,
    ) -> None:
        """
        Args:
            head: on its device, in its dtype.
            embeddings: ``[vocab, hidden]``.
            lm_head: ``[draft_vocab, hidden]``.
            vocab_size: the target's.
            cache_tokens: the most entries of the cache, over all requests.
        """
        config, parameter = head.config, next(head.parameters())
        self.head, self.vocab_size = head, vocab_size
        self.device, self.dtype = parameter.device, parameter.dtype
        self._embeddings, self._lm_head = embeddings, lm_head.to(parameter)
        self.kv = KeyValueRows(
            config.num_layers, config.num_key_value_heads, config.head_dim, self.dtype, self.device,
            cache_tokens,
        )  # fmt: skip

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """:meth:`EagleHead.features` of what the target shows, wherever and in whatever dtype."""
        return self.head.features(states.to(self.device, self.dtype))

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: Sequence[int],
        slots: torch.Tensor, mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One pass of the head: :meth:`EagleHead.forward` over rows of the cache.

        Args:
            ids: ``[batch, n]``: the target's ids of the tokens after each position.
            features, positions: as there.
            rows, slots, mask: see :meth:`KeyValueRows.attends`.
        """
        self.kv.reserve(mask.shape[-1])
        embeds = self._embeddings[ids.to(self._embeddings.device)].to(self.device, self.dtype)
        return self.head(embeds, features, positions, self.kv.attends(rows, slots, mask))  # type: ignore[no-any-return]

    def logits(self, heard: torch.Tensor) -> torch.Tensor:
        """``[..., draft_vocab]`` float32 of what :meth:`forward` gave for the LM head."""
        return (heard @ self._lm_head.mT).float()

    def over_vocabulary(self, probs: torch.Tensor) -> torch.Tensor:
        """Distributions over draft ids, ``[..., draft_vocab]``, as ones over the target's ids."""
        if self.head.d2t is None:
            return probs
        ids = self.head.target_ids(torch.arange(probs.shape[-1], device=self.device))
        spread = probs.new_zeros(*probs.shape[:-1], self.vocab_size)
        spread[..., ids] = probs
        return spread
