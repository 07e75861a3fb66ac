"""Recorded conversations side by side, ready to be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError
from spec_plugins.proposer import FloatArray, IntArray
from spec_plugins.traffic.conversations import Conversation

__all__ = ["Recorded", "bring_together"]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """``n`` conversations, each a prompt and the response that the target gave."""

    tokens: IntArray
    """All tokens, one conversation after the other."""
    offsets: npt.NDArray[np.int64]
    """``[n + 1]``: where each begins."""
    prompt_lengths: IntArray
    """``[n]``."""
    ends: IntArray
    """``[n]``: the length, prompt included, at which an engine cuts the response: that of the recorded one,
    unless the target ended it by itself; then by ``max_tokens``, or the target's longest context."""
    temperatures: FloatArray
    """``[n]``: NaN where the log does not say."""
    tags: tuple[tuple[str, ...], ...]
    tenants: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> IntArray:
        """``[n]``: tokens of each, prompt included."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def response_tokens(self) -> int:
        """Tokens of all responses."""
        return len(self.tokens) - int(self.prompt_lengths.sum())

    def conversation(self, i: int) -> IntArray:
        """A view of one's tokens."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]


def bring_together(conversations: Sequence[Conversation], max_model_len: int = 2**31 - 1) -> Recorded:
    """Pack conversations, those with the earliest arrivals first where every one has one.

    Args:
        conversations: in the order of their log.
        max_model_len: the longest context of the engine that is asked about.

    Raises:
        ConfigError: there is none.
    """
    if not conversations:
        raise ConfigError("traffic: there is no conversation with a response; give one or more")
    found = list(conversations)
    arrived = [c.record.arrived for c in found]
    if all(a is not None for a in arrived):
        order = np.argsort(np.array(arrived, np.float64), kind="stable")
        found = [found[i] for i in order]
    lengths = np.array([len(c.tokens) for c in found], np.int64)
    prompts = np.array([c.prompt_length for c in found], np.int64)
    most = [c.record.max_tokens if c.record.max_tokens is not None else max_model_len for c in found]
    stopped = np.array([c.stopped for c in found])
    ends = np.where(stopped, np.minimum(prompts + np.array(most, np.int64), max_model_len), lengths)
    return Recorded(
        np.concatenate([c.tokens for c in found]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        prompts.astype(np.int32),
        np.maximum(ends, lengths).astype(np.int32),
        np.array([np.nan if (t := c.record.temperature) is None else t for c in found], np.float32),
        tuple(c.record.tags for c in found),
        tuple(c.record.tenant for c in found),
    )
