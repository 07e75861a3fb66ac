"""Committed tokens of running requests in one matrix, for engines that keep them in Python lists."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import IntArray

__all__ = ["TokenStore"]

_LONGEST = 2**31 - 1


class TokenStore:
    """Rows of tokens by request id. Appending costs O(new tokens), amortised; rows are used again."""

    def __init__(self, rows: int = 8, capacity: int = 1024) -> None:
        self.token_ids: IntArray = np.zeros((rows, capacity), np.int32)
        """``[rows, capacity]``; replaced by a larger one when it is full."""
        self._rows: dict[str, int] = {}
        self._lengths: IntArray = np.full(rows + 1, _LONGEST, np.int32)
        """By row, and one for row -1 at the end."""
        self._free = list(range(rows))[::-1]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def length(self, request_id: str) -> int:
        """How many tokens a request has; 0 for an unknown one."""
        row = self._rows.get(request_id)
        return 0 if row is None else int(self._lengths[row])

    def append(self, request_id: str, tokens: npt.ArrayLike | Sequence[int]) -> None:
        """Add tokens to the end of a request, which begins with its first."""
        new = np.asarray(tokens, np.int32)
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                self._grow(max(1, 2 * len(self.token_ids)), self.token_ids.shape[1])
            row = self._rows[request_id] = self._free.pop()
            self._lengths[row] = 0
        start = int(self._lengths[row])
        end = start + len(new)
        if end > self.token_ids.shape[1]:
            self._grow(len(self.token_ids), max(end, 2 * self.token_ids.shape[1]))
        self.token_ids[row, start:end] = new
        self._lengths[row] = end

    def write(self, rows: IntArray, starts: IntArray, ends: IntArray, tokens: IntArray) -> None:
        """Replace what stands from some place on, in several rows at once: some 5 µs.

        Args:
            rows: ``[n]`` int32; one of -1 is passed over, with its tokens.
            starts, ends: ``[n]`` int32: from where, and how long a row is afterwards.
            tokens: ``[m]`` int32: those from starts to ends, one row's after the other's.
        """
        while most := _write(self.token_ids, self._lengths, rows, starts, ends, tokens):
            self._grow(len(self.token_ids), max(most, 2 * self.token_ids.shape[1]))

    def shorten(self, request_id: str, length: int) -> None:
        """Take back what is behind the first ``length`` tokens of a known request."""
        row = self._rows[request_id]
        self._lengths[row] = min(length, int(self._lengths[row]))

    def rows(self, request_ids: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Rows and lengths of known requests, ``[n]`` int32 each."""
        rows = np.array([self._rows[r] for r in request_ids], np.int32)
        return rows, self._lengths[rows]

    def find(self, request_ids: Sequence[str]) -> IntArray:
        """Rows of requests, ``[n]`` int32; -1 for unknown ones."""
        known = self._rows.get
        return np.array([known(r, -1) for r in request_ids], np.int32)

    def lengths(self, rows: IntArray) -> IntArray:
        """Of some rows, ``[n]`` int32; 2**31 - 1 for -1, so that an unknown request has nothing new."""
        return self._lengths[rows]

    def tokens(self, request_id: str) -> IntArray:
        """A view of a request's tokens."""
        row = self._rows[request_id]
        return self.token_ids[row, : self._lengths[row]]

    def discard(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def _grow(self, rows: int, capacity: int) -> None:
        before = self.token_ids
        # zeros, not empty, and no copy of what is not in use: untouched pages cost no memory
        self.token_ids = np.zeros((rows, capacity), np.int32)
        for row in self._rows.values():
            length = self._lengths[row]
            self.token_ids[row, :length] = before[row, :length]
        self._lengths = np.pad(self._lengths, (0, rows - len(before)), mode="edge")
        self._free = list(range(len(before), rows))[::-1] + self._free


@numba.njit(cache=True)
def _write(
    token_ids: IntArray, lengths: IntArray, rows: IntArray, starts: IntArray, ends: IntArray, tokens: IntArray
) -> int:
    """Returns 0, or how long rows must be, and then nothing was written."""
    most = 0
    for i in range(len(rows)):
        if rows[i] >= 0:
            most = max(most, ends[i])
    if most > token_ids.shape[1]:
        return most
    at = 0
    for i in range(len(rows)):
        if rows[i] >= 0:
            for j in range(starts[i], ends[i]):
                token_ids[rows[i], j] = tokens[at + j - starts[i]]
            lengths[rows[i]] = ends[i]
        at += max(0, ends[i] - starts[i])
    return 0
