"""Lookahead decoding: n-grams that the target itself wrote, or would have (arXiv 2402.02057).

Where the host verifies trees and reports the target's predictions (the embedded engine), a Jacobi window
runs beside the guesses. It needs no attention mask of its own: column ``i`` of level 0 is a chain, and
each deeper level hangs on the one above, so the window *is* a tree draft, whose nodes the target may even
accept. Where the host verifies chains, n-grams come from the committed text and, if the host reports
them, from the target's predictions after rejected draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numba
import numpy as np
from pydantic import Field

from spec_plugins.proposer import Draft, IntArray, Need, Proposer, Step, Target
from spec_plugins.trees import merge

__all__ = ["LookaheadProposer"]

# The pool is a table of sets, one a key token (a colliding key evicts): the key, a clock, then for each
# guess a time stamp (0: empty) and the n - 1 tokens that followed the key.
_KEY, _CLOCK, _GUESSES = 0, 1, 2
_GUESS, _WINDOW = 0, 1


@numba.njit(cache=True)
def _insert(pool: IntArray, ngram: IntArray) -> None:
    """Remember an n-gram under its first token, in place of the oldest guess. O(guesses · n)."""
    size = len(ngram)
    row = pool[(np.int64(ngram[0]) * 0x9E3779B1 >> 7) % len(pool)]
    if row[_KEY] != ngram[0] + 1:
        row[:] = 0
        row[_KEY] = ngram[0] + 1
    row[_CLOCK] += 1
    oldest = _GUESSES
    for at in range(_GUESSES, len(row), size):
        same = row[at] > 0
        for k in range(1, size):
            same = same and row[at + k] == ngram[k]
        if same:
            oldest = at
            break
        if row[at] < row[oldest]:
            oldest = at
    row[oldest] = row[_CLOCK]
    row[oldest + 1 : oldest + size] = ngram[1:]


@numba.njit(cache=True)
def _harvest(pool: IntArray, tokens: IntArray, start: int, n: int) -> None:
    """Remember every n-gram of ``tokens`` that ends at ``start`` or later."""
    for end in range(max(start, n - 1), len(tokens)):
        _insert(pool, tokens[end - n + 1 : end + 1])


@numba.njit(cache=True)
def _child(tokens: IntArray, parents: IntArray, parent: int, token: int) -> int:
    for j in range(parent + 1, len(tokens)):
        if parents[j] == parent and tokens[j] == token:
            return j
    return -2


@numba.njit(cache=True)
def _harvest_predictions(
    pool: IntArray, committed: IntArray, tokens: IntArray, parents: IntArray, predictions: IntArray, n: int
) -> None:
    """Remember the n-grams that end in the target's prediction after each draft token."""
    ngram = np.empty(n, np.int32)
    for j in range(len(tokens)):
        ngram[n - 1] = predictions[j + 1]
        at, k = j, n - 2
        while k >= 0 and at >= 0:
            ngram[k] = tokens[at]
            at = parents[at]
            k -= 1
        before = len(committed)
        while k >= 0 and before > 0:
            before -= 1
            ngram[k] = committed[before]
            k -= 1
        if k < 0:
            _insert(pool, ngram)


@numba.njit(cache=True)
def _advance(
    window: IntArray, filled: int, tokens: IntArray, parents: IntArray, predictions: IntArray, steps: int
) -> int:
    """Add the level that the target predicted after the last one; drop level 0 once all are there.

    ``steps`` columns are dropped on the left, one for each draft token that was accepted.
    """
    levels, width = window.shape
    # A column that was not verified keeps its last guess: a copy of its neighbour would make them one.
    new = window[filled - 1].copy()
    base = -1
    for i in range(width):
        base = _child(tokens, parents, base, window[0, i])
        if base < -1:
            break
        at = base
        for level in range(1, filled):
            at = _child(tokens, parents, at, window[level, i])
            if at < -1:
                break
        if at >= 0:
            new[i] = predictions[at + 1]
    if filled < levels:
        window[filled] = new
        filled += 1
    else:
        window[:-1] = window[1:].copy()
        window[-1] = new
    if steps > 0:
        keep = max(0, width - steps)
        for level in range(filled):
            row = window[level].copy()
            for i in range(width):
                window[level, i] = row[i + steps] if i < keep else row[(i + steps) % width]
    return filled


@numba.njit(cache=True)
def _draft(
    pool: IntArray,
    window: IntArray,
    filled: int,
    last: int,
    budget: int,
    depth: int,
    n: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """Guesses, newest first, then as many columns of the window as fit."""
    width = window.shape[1]
    row = pool[(np.int64(last) * 0x9E3779B1 >> 7) % len(pool)]
    guesses = (len(row) - _GUESSES) // n
    size = guesses * (n - 1) + filled * width
    tokens = np.empty(size, np.int32)
    parents = np.empty(size, np.int32)
    labels = np.empty(size, np.int32)
    m = 0
    if row[_KEY] == last + 1:
        stamps = row[_GUESSES::n].copy()
        for _ in range(guesses):
            best = np.argmax(stamps)
            if stamps[best] == 0 or m + n - 1 > budget:
                break
            stamps[best] = 0
            for k in range(min(n - 1, depth)):
                tokens[m] = row[_GUESSES + best * n + 1 + k]
                parents[m] = -1 if k == 0 else m - 1
                labels[m] = _GUESS
                m += 1
    if filled > 0:
        columns = min(width, (budget - m) // filled, depth - filled + 1)
        first = m
        for i in range(columns):
            for level in range(filled):
                tokens[m] = window[level, i]
                if level:
                    parents[m] = m - 1
                else:
                    parents[m] = -1 if i == 0 else first + (i - 1) * filled
                labels[m] = _WINDOW
                m += 1
    return merge(tokens[:m], parents[:m], labels[:m], budget)


@numba.njit(cache=True)
def _draft_chain(pool: IntArray, last: int, budget: int, n: int) -> IntArray:
    """The newest guess, and the newest after its last token, and so on."""
    out = np.empty(budget, np.int32)
    m = 0
    while m < budget:
        row = pool[(np.int64(last) * 0x9E3779B1 >> 7) % len(pool)]
        best = np.argmax(row[_GUESSES::n])
        if row[_KEY] != last + 1 or row[_GUESSES + best * n] == 0:
            break
        for k in range(min(n - 1, budget - m)):
            last = row[_GUESSES + best * n + 1 + k]
            out[m] = last
            m += 1
    return out[:m]


@dataclass(slots=True)
class _State:
    pool: IntArray
    window: IntArray
    filled: int = 0
    """Levels of the window in use; 0 where no window runs."""
    seen: int = 0


class LookaheadProposer(Proposer):
    """Needs no model and no training: drafts n-grams that the target wrote or predicted before.

    With a window, a step verifies up to ``window · (ngram - 1)`` tokens beside the guesses, so
    ``max_draft_nodes`` is ``(window + guesses) · (ngram - 1)`` by default; of what does not fit under a
    smaller one, the window is left out first. Cost: some 10 µs a request and step, and
    0.1 µs a new token. Memory: the pool, ``pool_sets · (2 + guesses · ngram) · 4`` bytes a request.
    """

    bounded = True
    uses = frozenset({Need.TREES, Need.PREDICTIONS})

    def __init__(
        self,
        window: Annotated[
            int, Field(ge=0, le=32, description="W, columns of the Jacobi window; 0: none.")
        ] = 4,
        ngram: Annotated[int, Field(ge=2, le=16, description="N, the length of an n-gram.")] = 4,
        guesses: Annotated[int, Field(ge=1, le=32, description="G, n-grams kept and tried for a token.")] = 4,
        pool_sets: Annotated[
            int, Field(ge=16, le=1 << 20, description="Key tokens that a request's pool has room for.")
        ] = 4096,
    ) -> None:
        self.window, self.ngram, self.guesses, self.pool_sets = window, ngram, guesses, pool_sets
        self._states: dict[str, _State] = {}
        self._trees = self._runs_window = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"{self.name}:guesses", f"{self.name}:window")

    @property
    def draft_nodes(self) -> int:
        return (self.window + self.guesses) * (self.ngram - 1)

    def load(self, target: Target) -> None:
        """Compile, and see whether the window can run here."""
        self._trees = Need.TREES in target.provides
        self._runs_window = self._trees and Need.PREDICTIONS in target.provides and self.window > 0
        for _ in range(2):  # once to begin, once to learn
            self.propose(Step.rehearsal(trees=self._trees))
        self.finish("rehearsal")

    def propose(self, step: Step) -> list[Draft]:
        return [self._propose(step, i) for i in range(len(step))]

    def _propose(self, step: Step, i: int) -> Draft:
        tokens = step.tokens(i)
        state = self._states.get(step.request_ids[i])
        if state is None or len(tokens) - step.fresh[i] < state.seen:
            state = self._states[step.request_ids[i]] = self._begin(tokens)
        verified = step.verified[i] if step.verified is not None else None
        if verified is not None and len(verified) and step.predictions is not None:
            self._learn(state, tokens, verified, step.predictions[i])
        _harvest(state.pool, tokens, state.seen, self.ngram)
        state.seen = len(tokens)
        budget, depth = int(step.budgets[i]), int(step.depths[i])
        if not self._trees:
            return Draft(_draft_chain(state.pool, tokens[-1], min(budget, depth), self.ngram))
        return Draft(*_with_sources(_draft(
            state.pool, state.window, state.filled, tokens[-1], budget, depth, self.ngram
        )))  # fmt: skip

    def _begin(self, tokens: IntArray) -> _State:
        pool = np.zeros((self.pool_sets, _GUESSES + self.guesses * self.ngram), np.int32)
        window = np.zeros((self.ngram - 1, max(1, self.window)), np.int32)
        # Anything may stand in the first level, as long as its columns differ; the latest words of the
        # prompt are likelier than chance.
        words = dict.fromkeys([*tokens[:-257:-1].tolist(), *range(window.shape[1])])
        window[0] = list(words)[: window.shape[1]]
        return _State(pool, window, int(self._runs_window))

    def _learn(self, state: _State, tokens: IntArray, verified: Draft, predictions: IntArray) -> None:
        parents = verified.parents
        if parents is None:
            parents = np.arange(-1, len(verified) - 1, dtype=np.int32)
        new = max(1, len(tokens) - state.seen)
        committed = tokens[: len(tokens) - new]
        _harvest_predictions(state.pool, committed, verified.tokens, parents, predictions, self.ngram)
        if state.filled:
            state.filled = _advance(
                state.window, state.filled, verified.tokens, parents, predictions, new - 1
            )

    def finish(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def gauges(self) -> Mapping[str, float]:
        return {
            "requests": len(self._states),
            "pool_bytes": sum(state.pool.nbytes for state in self._states.values()),
        }


def _with_sources(
    tree: tuple[IntArray, IntArray, IntArray],
) -> tuple[IntArray, IntArray, None, IntArray]:
    tokens, parents, labels = tree
    return tokens, parents, None, labels
