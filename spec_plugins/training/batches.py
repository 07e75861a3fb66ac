"""Shards as padded batches, with what the target says about the next token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from spec_plugins.training.features import Shard

__all__ = ["Batch", "Teacher", "batches"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Conversations of like length, padded at the end."""

    tokens: torch.Tensor
    """``[batch, n]`` int64."""
    answered: torch.Tensor
    """``[batch, n]`` bool: the target said it; False for padding."""
    last: torch.Tensor
    """``[batch, n, hidden]``, see :class:`~spec_plugins.training.features.Shard`."""
    aux: torch.Tensor
    """``[batch, n, layers * hidden]``."""


def batches(
    shard: Shard, batch_tokens: int, device: torch.device, order: np.random.Generator | None = None
) -> Iterator[Batch]:
    """A shard's conversations in batches of up to ``batch_tokens`` positions, mixed by ``order``."""
    offsets = shard.offsets.tolist()
    lengths = np.diff(offsets)
    groups: list[list[int]] = []
    for i in np.argsort(lengths, kind="stable").tolist():
        if groups and (len(groups[-1]) + 1) * lengths[i] <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    if order is not None:
        order.shuffle(groups)
    for group in groups:
        longest = int(lengths[group].max())

        def padded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            out = torch.zeros(len(group), longest, *values.shape[1:], dtype=dtype)  # noqa: B023
            for row, i in enumerate(group):  # noqa: B023
                out[row, : lengths[i]] = values[offsets[i] : offsets[i + 1]]
            return out.to(device)

        yield Batch(
            padded(shard.tokens, torch.int64),
            padded(shard.answered, torch.bool),
            padded(shard.last, torch.float32),
            padded(shard.aux, torch.float32),
        )


class Teacher:
    """The target's own distributions over the draft vocabulary, at the positions before its answers."""

    def __init__(self, batch: Batch, lm_head: torch.Tensor, to_draft: torch.Tensor) -> None:
        """
        Args:
            batch: what to learn from.
            lm_head: ``[draft_vocab, hidden]``: the target's rows of the drafted tokens.
            to_draft: ``[vocab]`` int64: each token's draft id, -1 where it cannot be drafted.
        """
        self.batch, self._drafts = batch, to_draft[batch.tokens]
        told = batch.answered[:, 1:]
        self._row = torch.full(told.shape, -1, device=told.device)
        self._row[told] = torch.arange(int(told.sum()), device=told.device)
        with torch.no_grad():
            self._probs = (batch.last[:, :-1][told] @ lm_head.mT).softmax(-1)

    def ahead(
        self, distance: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What entries ``0 … rows - 1`` should say about the token ``distance`` after them.

        Returns:
            ``[batch, rows]`` bool, whether that token is the target's own; and for those entries, one
            after the other: ``[m]`` its draft id, -1 for none; ``[m, draft_vocab]`` the target's distribution
            there; ``[m]`` bool, whether to learn from it.
        """
        wanted = self.batch.answered[:, distance : distance + rows]
        drafts = self._drafts[:, distance : distance + rows][wanted]
        probs = self._probs[self._row[:, distance - 1 : distance - 1 + rows][wanted]]
        return wanted, drafts, probs, drafts >= 0
