"""Throw-away drafts, and how long the engine takes to verify them: for ``spec-plugins calibrate``."""

from __future__ import annotations

import os
import time
from typing import Annotated

import numpy as np
from pydantic import Field

from spec_plugins.errors import ConfigError
from spec_plugins.proposer import Drafts, Proposer, Step, Target

__all__ = ["CalibrationProposer"]

MAX_SAMPLES = 200_000
"""What a file of samples holds at most, some 8 MB."""


class CalibrationProposer(Proposer):
    """Drafts random tokens, hardly ever accepted, and notes how long each of the engine's steps takes.

    The draft lengths come in shuffled blocks that hold each of them once, so that a machine whose speed
    drifts favours none. A step is noted where it is one of decoding alone: the same requests before and
    after it, all past their prompt, with drafts of one length. Its time is that from the end of one call to
    the beginning of the next, so that what this proposer takes does not count. Each is a line of the file:
    requests, draft tokens of each, their mean context in tokens, seconds. Takes some 100 µs a step.
    """

    # A write of 40 bytes to a local file waits for nothing.
    bounded = True

    def __init__(
        self,
        draft_tokens: Annotated[
            Annotated[list[Annotated[int, Field(ge=0, le=256)]], Field(min_length=1, max_length=64)] | None,
            Field(description="The draft lengths in turn. Default: none at all, and the longest."),
        ] = None,
        samples: Annotated[
            str | None,
            Field(min_length=1, description="File for the times, a new one. Default: they are not kept."),
        ] = None,
        seed: Annotated[int, Field(ge=0, description="Of the tokens and of the order of lengths.")] = 0,
    ) -> None:
        self.draft_tokens, self.samples = draft_tokens, samples
        self._rng = np.random.default_rng(seed)
        self._lengths: list[int] = []
        self._block: list[int] = []
        """What is left of a shuffled block."""
        self._vocab_size = 1
        self._file = -1
        self._room = MAX_SAMPLES
        self._before: tuple[frozenset[str], int, float, float] | None = None
        """Requests, draft tokens of each, mean context, and the time at the end of the call before."""

    def load(self, target: Target) -> None:
        """Open the file.

        Raises:
            ConfigError: it is there already, cannot be made, or a draft length is too long.
        """
        longest = target.num_speculative_tokens
        self._lengths = sorted(set(self.draft_tokens or (0, longest)))
        self._vocab_size = target.vocab_size
        if self._lengths[-1] > longest:
            raise ConfigError(
                f"options.draft_tokens: {self._lengths[-1]} is more than num_speculative_tokens {longest}; "
                "raise that"
            )
        if self.samples is not None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                self._file = os.open(os.path.expanduser(self.samples), flags, 0o600)
            except OSError as error:
                raise ConfigError(f"options.samples: {self.samples!r} cannot be made: {error}") from error

    def propose(self, step: Step) -> Drafts:
        now, before = time.perf_counter(), self._before
        n = len(step)
        requests = frozenset(step.request_ids)
        # All of a request's tokens are fresh where it came back from a preemption.
        went_on = bool((step.fresh > 0).all() and (step.fresh < step.lengths).all())
        if before is not None and before[0] == requests and went_on and self._file >= 0 and self._room:
            line = f"{n},{before[1]},{before[2]:.1f},{now - before[3]:.7f}\n"
            os.write(self._file, line.encode())
            self._room -= 1
        counts = np.minimum(np.minimum(step.budgets, step.depths), self._next()).astype(np.int32)
        width = int(counts.max(initial=0))
        drafts = self._rng.integers(0, self._vocab_size, (n, width), np.int32)
        # One without output is, in some engines, still at its prompt.
        even = n > 0 and bool((counts == width).all() and (step.lengths > step.prompt_lengths).all())
        context = float(step.lengths.mean()) if n else 0.0
        self._before = (requests, width, context, time.perf_counter()) if even else None
        return Drafts(drafts, counts)

    def _next(self) -> int:
        if not self._block:
            self._block = self._rng.permutation(self._lengths).tolist()
        return self._block.pop()
