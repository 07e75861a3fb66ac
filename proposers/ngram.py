"""Prompt lookup: what followed the last time that the same n tokens stood here (arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numba
import numpy as np
import numpy.typing as npt
from pydantic import Field

from spec_plugins.proposer import Drafts, IntArray, Proposer, Step, Target
from spec_plugins.proposers.buffers import buffer_at

__all__ = ["NgramProposer"]

# An index is one int32 buffer: a header, then for each n a hash table of positions. A position is where
# the continuation of an n-gram begins (never 0, so 0 marks an empty entry) and is checked against the
# tokens themselves, so that a hash collision can do no harm.
_CAPACITY, _INGESTED, _HEADER = 0, 1, 4
# With most_frequent, a table has three more columns: how often the entry's continuation was seen, and a
# second table, of n-grams with their next token: where last seen, and how often.
_POSITION, _COUNT, _NEXT_POSITION, _NEXT_COUNT = 0, 1, 2, 3


@numba.njit(cache=True, inline="always")
def _find(table: IntArray, tokens: IntArray, end: int, n: int, key: np.uint64) -> Any:
    """The entry of the n tokens before ``end``, or the empty one where it belongs."""
    mask = len(table) - 1
    at = np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(24)) & mask
    while table[at] != 0:
        position = table[at]
        k = 1
        while k <= n and tokens[position - k] == tokens[end - k]:
            k += 1
        if k > n:
            return at
        at = (at + 1) & mask
    return at


@numba.njit(cache=True, inline="always")
def _mix(key: np.uint64, token: int) -> Any:
    return (key ^ np.uint64(token)) * np.uint64(0x100000001B3) + np.uint64(0x2545F4914F6CDD1D)


@numba.njit(cache=True)
def _ingest(
    tables: IntArray, tokens: IntArray, start: int, length: int, shortest: int, most_frequent: bool
) -> None:
    """Index the continuations that begin at ``start`` to ``length - 1``. O(n) a token."""
    longest = shortest + tables.shape[0] - 1
    for end in range(max(start, 1), length):
        key = np.uint64(0)
        for n in range(1, min(longest, end) + 1):
            key = _mix(key, tokens[end - n])
            if n < shortest:
                continue
            table = tables[n - shortest]
            at = _find(table[_POSITION], tokens, end, n, key)
            if not most_frequent:
                table[_POSITION, at] = end
                continue
            # One token more, at the front of the key: the continuation itself.
            follow = _find(table[_NEXT_POSITION], tokens, end + 1, n + 1, _mix(key, tokens[end] + 1))
            table[_NEXT_POSITION, follow] = end + 1
            table[_NEXT_COUNT, follow] += 1
            if table[_NEXT_COUNT, follow] >= table[_COUNT, at]:
                table[_COUNT, at] = table[_NEXT_COUNT, follow]
                table[_POSITION, at] = end


@numba.njit(cache=True)
def _propose(
    addresses: npt.NDArray[np.int64],
    token_ids: IntArray,
    rows: IntArray,
    lengths: IntArray,
    fresh: IntArray,
    most: IntArray,
    shortest: int,
    longest: int,
    most_frequent: bool,
    drafts: IntArray,
    counts: IntArray,
) -> None:
    columns = 4 if most_frequent else 1
    for i in range(len(addresses)):
        header = buffer_at(addresses[i], _HEADER)
        capacity, length = header[_CAPACITY], lengths[i]
        size = 2 * capacity
        flat = buffer_at(addresses[i], _HEADER + (longest - shortest + 1) * columns * size)[_HEADER:]
        tables = flat.reshape((longest - shortest + 1, columns, size))
        tokens = token_ids[rows[i], :length]
        if length - fresh[i] < header[_INGESTED] and header[_INGESTED] > 0:
            tables[:] = 0
            header[_INGESTED] = 0
        _ingest(tables, tokens, header[_INGESTED], length, shortest, most_frequent)
        header[_INGESTED] = length
        counts[i] = 0
        if most[i] <= 0:
            continue
        found = 0
        key = np.uint64(0)
        for n in range(1, min(longest, length) + 1):
            key = _mix(key, tokens[length - n])
            if n >= shortest:
                table = tables[n - shortest]
                position = table[_POSITION, _find(table[_POSITION], tokens, length, n, key)]
                # No n-gram, no longer n-gram either.
                if position == 0:
                    break
                found = position
        if found:
            # A match that reaches into its own continuation goes on repeating itself.
            for j in range(most[i]):
                drafts[i, j] = tokens[found + j] if found + j < length else drafts[i, found + j - length]
            counts[i] = most[i]


class NgramProposer(Proposer):
    """Looks the last tokens up in the request's own text and drafts what followed them there.

    The longest n-gram wins. Every n-gram is indexed once, as it appears: a step costs
    O(max_ngram² · new tokens + drafted), whatever the length of the context, and the whole batch is one
    compiled call. Memory: 8 bytes a token and n-gram length (32 with ``most_frequent``), up to twice
    that after a doubling, freed with the request.
    """

    bounded = True
    depends_on = "text"
    nested = True

    def __init__(
        self,
        max_ngram: Annotated[int, Field(ge=1, le=16, description="The longest n-gram looked up.")] = 4,
        min_ngram: Annotated[int, Field(ge=1, le=16, description="The shortest n-gram looked up.")] = 1,
        prefer: Annotated[
            Literal["most_recent", "most_frequent"],
            Field(description="Which continuation of an n-gram that stands in several places."),
        ] = "most_recent",
    ) -> None:
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram {min_ngram} is more than max_ngram {max_ngram}; lower it")
        self.max_ngram, self.min_ngram, self.prefer = max_ngram, min_ngram, prefer
        self._entries = (max_ngram - min_ngram + 1) * (4 if prefer == "most_frequent" else 1) * 2
        self._indexes: dict[str, tuple[int, int, IntArray]] = {}
        """Capacity in tokens, address and buffer of each request's index."""
        self._ids: tuple[str, ...] = ()
        """The last step's requests, while these are of their indexes:"""
        self._capacities = self._addresses = np.empty(0, np.int64)

    def load(self, target: Target) -> None:
        """Compile."""
        self.propose(Step.rehearsal())
        self.finish("rehearsal")

    def propose(self, step: Step) -> Drafts:
        n = len(step)
        most = np.minimum(step.budgets, step.depths)
        drafts = np.empty((n, int(most.max(initial=0))), np.int32)
        counts = np.empty(n, np.int32)
        if tuple(step.request_ids) != self._ids or (step.lengths > self._capacities).any():
            self._make_room(step)
        _propose(
            self._addresses, step.token_ids, step.rows, step.lengths, step.fresh, most,
            self.min_ngram, self.max_ngram, self.prefer == "most_frequent", drafts, counts,
        )  # fmt: skip
        return Drafts(drafts, counts)

    def _make_room(self, step: Step) -> None:
        """Have an index of every request of a step, and find them for it and those after it."""
        self._ids, found = (), []
        for request_id, length in zip(step.request_ids, step.lengths.tolist(), strict=True):
            index = self._indexes.get(request_id)
            if index is None or index[0] < length:
                index = self._indexes[request_id] = self._index(length)
            found.append(index[:2])
        self._ids = tuple(step.request_ids)
        self._capacities, self._addresses = np.array(found, np.int64).reshape(-1, 2).T.copy()

    def _index(self, length: int) -> tuple[int, int, IntArray]:
        """An empty index for ``length`` tokens and as many again, which it then fills anew."""
        capacity = 1 << max(8, (length + length // 4).bit_length())
        buffer: IntArray = np.zeros(_HEADER + self._entries * capacity, np.int32)
        buffer[_CAPACITY] = capacity
        return capacity, buffer.ctypes.data, buffer

    def finish(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
        self._ids = ()

    def gauges(self) -> Mapping[str, float]:
        buffers = [index[2].nbytes for index in self._indexes.values()]
        return {"requests": len(buffers), "index_bytes": sum(buffers)}
