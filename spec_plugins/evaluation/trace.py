"""What a proposer drafted at each position of recorded responses, how much of it was right, and what follows
from that for every draft length. Compiled.

A response of ``m`` tokens has ``m - 1`` positions: its first token comes from the prefill, and before each of
the others an engine may have drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import Drafts, IntArray
from spec_plugins.trees import node_depths

__all__ = ["PLACES", "Counts", "Trace"]

Shorts = npt.NDArray[np.int16]
Longs = npt.NDArray[np.int64]

PLACES = (0, 64, 128, 256, 512)
"""Where the parts of a response begin that are looked at apart, in tokens."""
_NONE = np.int16(np.iinfo(np.int16).max)


@dataclass(slots=True, eq=False)
class Counts:
    """What an engine with one draft length would have counted, by conversation, ``[n]`` or ``[n, depth]``."""

    steps: Longs
    """Target forwards that decoded."""
    draft_tokens: Longs
    drafted: Longs
    """``[n, depth]``: drafts that reached each position."""
    accepted: Longs
    """``[n, depth]``: drafts that were accepted up to and with each position."""
    past_end: Longs
    """``[n, depth]``: drafts right as far as the response goes, and longer: of what is behind its end, the
    record cannot tell. Counted in ``drafted``, not in ``accepted``."""
    place_steps: Longs
    """``[n, places]``: steps that began in each part of the response, see :data:`PLACES`."""
    place_accepted: Longs
    """``[n, places]``: draft tokens accepted in them."""

    @property
    def accepted_tokens(self) -> Longs:
        """``[n]``."""
        found: Longs = self.accepted.sum(1)
        return found


@dataclass(slots=True, eq=False)
class Trace:
    """One proposer over all positions of recorded responses, ``p`` in all."""

    offsets: Longs
    """``[n + 1]``: where each conversation's positions begin."""
    depth: int
    """The deepest position that was drafted for."""
    nodes: Shorts = field(init=False)
    """``[p]``: draft tokens, over all branches; -1 where no step began."""
    drafted: Shorts = field(init=False)
    """``[p]``: depth of the draft."""
    accepted: Shorts = field(init=False)
    """``[p]``: how many tokens of its best path are what was recorded."""
    ranks: Shorts | None = field(init=False, default=None)
    """``[p, depth]``: which draft token the one is that was right at each depth; ``None``: chains only."""
    firsts: Shorts | None = field(init=False, default=None)
    """``[p, depth]``: the first draft token of each depth."""
    kept: dict[int, tuple[IntArray, IntArray | None]] = field(init=False, default_factory=dict)
    """Draft tokens and their parents at some positions, to be shown; ``None``: a chain."""

    def __post_init__(self) -> None:
        positions = int(self.offsets[-1])
        self.nodes = np.full(positions, -1, np.int16)
        self.drafted, self.accepted = np.zeros(positions, np.int16), np.zeros(positions, np.int16)

    def judge(self, drafts: Drafts, texts: IntArray, places: Longs) -> IntArray:
        """Compare a step's drafts with what was recorded, and keep what came of it.

        Args:
            drafts: of ``k`` requests.
            texts: tokens of all conversations.
            places: ``[3, k]``: at which position of the trace each request stands, where in ``texts`` its
                next token is, and how many tokens of its response are left.

        Returns:
            ``[k]``: how many draft tokens of each are right.
        """
        right: IntArray = np.empty(len(drafts), np.int32)
        if drafts.parents is None and self.ranks is None:
            _judge_chains(
                drafts.tokens, drafts.counts, texts, places, self.nodes, self.drafted, self.accepted, right
            )
            return right
        if self.ranks is None or self.firsts is None:
            self._allow_trees()
        assert self.ranks is not None
        assert self.firsts is not None
        parents = drafts.parents
        if parents is None:
            parents = np.tile(np.arange(-1, drafts.tokens.shape[1] - 1, dtype=np.int32), (len(drafts), 1))
        _judge_trees(
            drafts.tokens, parents, node_depths(parents, drafts.counts), drafts.counts, texts, places,
            self.nodes, self.drafted, self.accepted, self.ranks, self.firsts, right,
        )  # fmt: skip
        return right

    def conversation(self, position: int) -> int:
        """Which conversation a position is of."""
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def rejected(self, position: int) -> list[int]:
        """Draft tokens after those that were right, of a tree on the likeliest branch, if they were kept."""
        tokens, parents = self.kept.get(position, (np.zeros(0, np.int32), None))
        right = int(self.accepted[position])
        if parents is None:
            return [int(token) for token in tokens[right:]]
        assert self.ranks is not None
        last, found = int(self.ranks[position, right - 1]) if right else -1, []
        while (children := np.flatnonzero(parents == last)).size:
            last = int(children[0])
            found.append(int(tokens[last]))
        return found

    def _allow_trees(self) -> None:
        """All drafts so far were chains."""
        depth = np.arange(self.depth, dtype=np.int16)
        self.ranks = np.where(depth < self.accepted[:, None], depth, _NONE)
        self.firsts = np.where(depth < self.drafted[:, None], depth, _NONE)

    def cut(self, size: int) -> tuple[Shorts, Shorts, Shorts]:
        """Draft tokens, depth and accepted ones, ``[p]`` each, of each draft's first ``size`` tokens."""
        nodes = np.minimum(self.nodes, np.int16(size))
        if self.ranks is None or self.firsts is None:
            most = np.int16(size)
            return nodes, np.minimum(self.drafted, most), np.minimum(self.accepted, most)
        drafted, accepted = ((of < size).sum(1, dtype=np.int16) for of in (self.firsts, self.ranks))
        return nodes, drafted, accepted

    def counts(self, size: int) -> Counts:
        """Step through the responses as an engine does: on by what is accepted, and one.

        Args:
            size: the most draft tokens: the length of a chain, or the nodes of a tree. Less than was drafted
                only for a proposer whose drafts are nested.
        """
        n = len(self.offsets) - 1
        found = Counts(
            *(np.zeros(n, np.int64) for _ in range(2)),
            *(np.zeros((n, self.depth), np.int64) for _ in range(3)),
            *(np.zeros((n, len(PLACES)), np.int64) for _ in range(2)),
        )
        _walk(
            self.offsets, *self.cut(size), np.array(PLACES), found.steps, found.draft_tokens, found.drafted,
            found.accepted, found.past_end, found.place_steps, found.place_accepted,
        )  # fmt: skip
        return found


@numba.njit(cache=True)
def _judge_chains(
    tokens: IntArray,
    counts: IntArray,
    texts: IntArray,
    places: Longs,
    nodes: Shorts,
    drafted: Shorts,
    accepted: Shorts,
    right: IntArray,
) -> None:
    for i in range(len(counts)):
        at, head, a = places[0, i], places[1, i], 0
        most = min(counts[i], places[2, i])
        while a < most and tokens[i, a] == texts[head + a]:
            a += 1
        nodes[at] = drafted[at] = counts[i]
        accepted[at] = right[i] = a


@numba.njit(cache=True)
def _judge_trees(
    tokens: IntArray,
    parents: IntArray,
    depths: IntArray,
    counts: IntArray,
    texts: IntArray,
    places: Longs,
    nodes: Shorts,
    drafted: Shorts,
    accepted: Shorts,
    ranks: Shorts,
    firsts: Shorts,
    right: IntArray,
) -> None:
    for i in range(len(counts)):
        at, head, left = places[0, i], places[1, i], places[2, i]
        last, a, deepest = -1, 0, 0
        for j in range(counts[i]):
            if depths[i, j] > deepest:
                firsts[at, deepest] = j
                deepest = depths[i, j]
            if parents[i, j] == last and a < left and tokens[i, j] == texts[head + a]:
                ranks[at, a] = j
                a += 1
                last = j
        nodes[at], drafted[at] = counts[i], deepest
        accepted[at] = right[i] = a


@numba.njit(cache=True)
def _walk(
    offsets: Longs,
    nodes: Shorts,
    drafted: Shorts,
    accepted: Shorts,
    places: Longs,
    steps: Longs,
    draft_tokens: Longs,
    drafted_by: Longs,
    accepted_by: Longs,
    past_end: Longs,
    place_steps: Longs,
    place_accepted: Longs,
) -> None:
    for c in range(len(offsets) - 1):
        end, p = offsets[c + 1], offsets[c]
        place = 0
        while p < end:
            while place + 1 < len(places) and p + 1 - offsets[c] >= places[place + 1]:
                place += 1
            right = np.int64(accepted[p])
            steps[c] += 1
            draft_tokens[c] += nodes[p]
            place_steps[c, place] += 1
            place_accepted[c, place] += right
            for j in range(drafted[p]):
                drafted_by[c, j] += 1
                accepted_by[c, j] += j < right
                past_end[c, j] += right == end - p and j >= right
            p += right + 1
