"""The engine's requests, as the driver wants them. Imports no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numba
import numpy as np

from spec_plugins.driver import Driver
from spec_plugins.proposer import Drafts, IntArray
from spec_plugins.token_store import TokenStore

__all__ = ["RequestState"]

# What a new text has instead of accepted tokens.
_NEW = -2
_PLACE = 2  # among facts


@dataclass(slots=True)
class _Batch:
    """What stays while a step has the requests of the one before, in their order."""

    ids: list[str]
    rows: IntArray
    prompts: IntArray
    longest: IntArray
    tenants: list[str]


_NOTHING = np.empty(0, np.int32)
_NO_BATCH = _Batch([], _NOTHING, _NOTHING, _NOTHING, [])


class RequestState:
    """One worker's requests.

    A request's text is read token by token from where it was left, so a step costs O(new tokens), however
    long the context. What was accepted is told by how far the text goes on as was drafted, since steps may
    have gone by in which nobody asked for drafts.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.tokens = TokenStore(8, min(driver.target.max_model_len, 1024))
        self.told_of_ends = False
        """Whether :meth:`end` is called for requests that are over; else those in no step count as over."""
        self._facts: IntArray = np.zeros((3, 0), np.int32)
        """``[3, rows]``, by row of the store: the prompt's length, the tokens at which the request ends, and
        its place in the last step, -1 for none."""
        self._tenants: dict[str, str] = {}
        """Of each known request."""
        self._over: dict[str, int] = {}
        """Requests that are over, and what was accepted of their last drafts; not yet told to the driver."""
        self._drafts = Drafts.empty(0)
        """Those of the last step."""
        self._batch = _NO_BATCH
        """The last step's, while its requests are known."""
        self._last_time = 0.0
        self._take_in((), ())  # compiles

    def propose(self, requests: Sequence[Any], most: int) -> list[list[int]]:
        """Drafts of a step.

        Args:
            requests: ``LlmRequest`` objects that decode in it.
            most: the longest draft that the engine takes now; 0 keeps proposers up to date alone.

        Returns:
            A fresh list for each request, of at most ``most`` draft tokens.
        """
        if not requests:
            return []
        ids = [str(r.py_request_id) for r in requests]
        lengths, accepted, new = self._take_in(ids, requests)
        # Where a request ran on, the engine cannot have been idle since the step before.
        now, before = time.perf_counter(), self._last_time
        self._last_time = now
        self._observe(ids, accepted, now - before if len(new) < len(ids) else None)
        # A bound, should an end ever not be told.
        most_known = 2 * self.driver.target.max_num_seqs if self.told_of_ends else len(ids) - len(new)
        if len(self._tenants) > most_known:
            for name in self._tenants.keys() - set(ids):
                self._drop(name)
        for i in new:
            lengths[i] = self._admit(ids[i], requests[i])
        if ids != self._batch.ids:
            self._batch = self._gather(ids)
        batch = self._batch
        drafts = self._drafts = self.driver.propose(
            ids,
            self.tokens.token_ids,
            batch.rows,
            lengths,
            alive=self._tenants.keys(),
            limits=np.maximum(np.minimum(batch.longest - lengths - 1, most), 0),
            prompt_lengths=batch.prompts,
            tenants=batch.tenants,
        )
        found: list[list[int]] = drafts.tokens.tolist()
        for draft, n in zip(found, drafts.counts.tolist(), strict=True):
            del draft[n:]
        return found

    def end(self, request: Any) -> None:
        """A request is over, or was preempted and will come back as new. Unknown ones do not matter."""
        name = str(request.py_request_id)
        if name not in self._tenants:
            return
        _, accepted, _ = self._take_in([name], [request])
        self._over[name] = max(-1, int(accepted[0]))
        self._drop(name)
        if not self._tenants:  # the next step may be far
            self._observe([], accepted[:0])
            self._propose_nothing()

    def forget(self) -> None:
        """Drop everything: what is known may be wrong."""
        self.driver.finish([*self._tenants, *self._over])
        for name in [*self._tenants]:
            self._drop(name)
        self._over = {}
        self._propose_nothing()

    def _propose_nothing(self) -> None:
        """Let the proposer forget what is over."""
        self.driver.propose([], np.empty((0, 0), np.int32), _NOTHING, _NOTHING)

    def _observe(self, ids: list[str], accepted: IntArray, step_seconds: float | None = None) -> None:
        """Tell the driver what came of the last drafts, and which requests are over."""
        if self._over or _NEW in accepted.tolist():
            ids = [*self._over, *compress(ids, accepted != _NEW)]
            accepted = np.array([*self._over.values(), *accepted[accepted != _NEW]], np.int32)
        if ids:
            self.driver.observe(ids, accepted, step_seconds=step_seconds)
        self.driver.finish(self._over)
        self._over = {}

    def _take_in(self, ids: Sequence[str], requests: Sequence[Any]) -> tuple[IntArray, IntArray, list[int]]:
        """Bring the texts of known requests up to date.

        Returns:
            Lengths; what was accepted of the last drafts: -1 where nothing was decoded, ``_NEW`` where a
            request is unknown or its text another; and which those are, whose texts are yet to be taken in.
        """
        rows = self._batch.rows if ids == self._batch.ids else self.tokens.find(ids)
        known = self.tokens.lengths(rows)
        ends = np.array([r.get_num_tokens(0) for r in requests], np.int32)
        starts = known - 1  # the last known token once more, to see that it is the same text
        spans = zip(requests, starts.tolist(), ends.tolist(), strict=True)
        tokens = np.array([r.get_token(0, i) for r, start, end in spans for i in range(start, end)], np.int32)
        accepted = np.empty(len(rows), np.int32)
        drafts = self._drafts
        news = _accept(
            self.tokens.token_ids, rows, starts, ends, tokens, drafts.tokens, drafts.counts,
            self._facts[_PLACE], accepted,
        )  # fmt: skip
        self.tokens.write(rows, starts, ends, tokens)
        return ends, accepted, np.flatnonzero(accepted == _NEW).tolist() if news else []

    def _gather(self, ids: list[str]) -> _Batch:
        rows = self.tokens.find(ids)
        self._facts[_PLACE] = -1
        self._facts[_PLACE, rows] = np.arange(len(rows))
        prompts, longest, _ = self._facts[:, rows]
        return _Batch(ids, rows, prompts, longest, [self._tenants[name] for name in ids])

    def _admit(self, name: str, request: Any) -> int:
        """Take in a whole text, whose length is returned."""
        if name in self._tenants:  # another text, of which the driver learns by its end
            self._drop(name)
            self.driver.finish([name])
        tokens = request.get_tokens(0)
        length, longest = len(tokens), self.driver.target.max_model_len
        prompt = getattr(request, "py_orig_prompt_len", None) or length
        most = getattr(request, "py_max_new_tokens", None)
        if most is not None:
            longest = min(longest, prompt + int(most))
        salt = getattr(request, "cache_salt_id", None)
        self.tokens.append(name, tokens)
        self._tenants[name] = "" if salt is None else str(salt)
        more = len(self.tokens.token_ids) - self._facts.shape[1]
        self._facts = np.pad(self._facts, ((0, 0), (0, more)), constant_values=-1)
        self._facts[:, self.tokens.find([name])[0]] = min(prompt, length), longest, -1
        return length

    def _drop(self, name: str) -> None:
        self._batch = _NO_BATCH
        del self._tenants[name]
        self.tokens.discard(name)


@numba.njit(cache=True)
def _accept(
    token_ids: IntArray,
    rows: IntArray,
    starts: IntArray,
    ends: IntArray,
    tokens: IntArray,
    drafts: IntArray,
    counts: IntArray,
    places: IntArray,
    accepted: IntArray,
) -> int:
    """See how many of its draft tokens each text goes on with, as :meth:`RequestState._take_in` returns it.

    ``tokens`` has those from ``starts`` to ``ends``, one text's after the other's. The first of a text must
    be the known one, the last is the target's own. ``places`` says by row which draft is its: -1 where it was
    not in the last step, and what it was given before is long gone. Returns the number of ``_NEW``.
    """
    at = news = 0
    for i in range(len(rows)):
        length = ends[i] - starts[i]
        if length < 1 or tokens[at] != token_ids[rows[i], starts[i]]:
            accepted[i] = _NEW
            news += 1
        elif length == 1:
            accepted[i] = -1
        else:
            d, n = places[rows[i]], 0
            while d >= 0 and n < min(counts[d], length - 2) and drafts[d, n] == tokens[at + 1 + n]:
                n += 1
            accepted[i] = n
        at += max(0, length)
    return news
