"""The engine's requests, as the driver wants them. Imports no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_plugins.driver import Driver
from spec_plugins.token_store import TokenStore

__all__ = ["RequestState"]


@dataclass(slots=True)
class _Request:
    """What is kept of a request beside its tokens."""

    length: int
    """How many tokens it had when it was last seen."""
    last: int
    """The last of them."""
    prompt: int
    longest: int
    """Tokens at which it ends."""
    tenant: str
    draft: list[int]
    """What it was last given."""
    step: int = 0
    """When."""


class RequestState:
    """One worker's requests.

    A request's text is read token by token from where it was left, so a step costs O(new tokens), however
    long the context. What was accepted is told by how far the text grew, since steps may have gone by in
    which nobody asked for drafts.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.tokens = TokenStore(8, min(driver.target.max_model_len, 1024))
        self.told_of_ends = False
        """Whether :meth:`end` is called for requests that are over; else those in no step count as over."""
        self._requests: dict[str, _Request] = {}
        self._new: dict[str, list[int]] = {}
        """Tokens that are yet to be appended."""
        self._over: dict[str, int] = {}
        """Requests that are over, and what was accepted of their last drafts; not yet told to the driver."""
        self._step = 0
        self._last_ids: frozenset[str] = frozenset()
        self._last_time = 0.0

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
        observed: dict[str, int] = dict(self._over)
        for name, request in zip(ids, requests, strict=True):
            accepted = self._take_in(name, request)
            if accepted is not None:
                observed[name] = accepted
        if observed:
            self.driver.observe(
                list(observed), np.array([*observed.values()], np.int32), step_seconds=self._step_seconds(ids)
            )
        self.driver.finish(self._over)
        self._over = {}
        # A bound, should an end ever not be told.
        if not self.told_of_ends or len(self._requests) > 2 * self.driver.target.max_num_seqs:
            self._keep_only(ids)
        self._step += 1
        self.tokens.append_to(self._new)
        self._new = {}
        known = [self._requests[name] for name in ids]
        rows, lengths = self.tokens.rows(ids)
        drafts = self.driver.propose(
            ids,
            self.tokens.token_ids,
            rows,
            lengths,
            alive=self._requests.keys(),
            limits=np.array([max(0, min(q.longest - q.length - 1, most)) for q in known], np.int32),
            prompt_lengths=np.array([q.prompt for q in known], np.int32),
            tenants=[q.tenant for q in known],
        )
        found = []
        for q, row, count in zip(known, drafts.tokens.tolist(), drafts.counts.tolist(), strict=True):
            q.draft, q.step = row[:count], self._step
            found.append(row[:count])  # the engine pads its list
        return found

    def end(self, request: Any) -> None:
        """A request is over, or was preempted and will come back as new. Unknown ones do not matter."""
        name = str(request.py_request_id)
        if name not in self._requests:
            return
        accepted = self._take_in(name, request)
        self._new.pop(name, None)
        del self._requests[name]
        self.tokens.discard(name)
        self._over[name] = -1 if accepted is None else accepted
        if not self._requests:  # the next step may be far
            self.driver.observe(list(self._over), np.array([*self._over.values()], np.int32))
            self.driver.finish(self._over)
            self._over = {}
            self._propose_nothing()

    def forget(self) -> None:
        """Drop everything: what is known may be wrong."""
        self.driver.finish([*self._requests, *self._over])
        for name in self._requests:
            self.tokens.discard(name)
        self._requests, self._over, self._new = {}, {}, {}
        self._propose_nothing()

    def _propose_nothing(self) -> None:
        """Let the proposer forget what is over."""
        empty = np.empty(0, np.int32)
        self.driver.propose([], np.empty((0, 0), np.int32), empty, empty)

    def _take_in(self, name: str, request: Any) -> int | None:
        """Bring a request's text up to date; what was accepted of its last drafts, ``None`` for a new one,
        and -1 where nothing was decoded."""
        length, known = int(request.get_num_tokens(0)), self._requests.get(name)
        if known is not None and not (
            length >= known.length and request.get_token(0, known.length - 1) == known.last
        ):
            self.tokens.discard(name)  # another text: taken in anew, of which the driver learns by its length
            self.driver.finish([name])
            known = None
        if known is None:
            tokens = request.get_tokens(0)
            self.tokens.append(name, tokens)
            self._requests[name] = self._admit(request, tokens)
            return None
        if length == known.length:
            return -1
        self._new[name] = new = [request.get_token(0, i) for i in range(known.length, length)]
        known.length, known.last = length, new[-1]
        if known.step != self._step:  # it was not in the last step: those drafts are long gone
            return 0
        said = getattr(request, "py_num_accepted_draft_tokens", None)
        if said != len(new) - 1:  # steps without drafting went by, and it is the newest one's
            said = _common(known.draft, new[:-1])
        return min(int(said), len(known.draft))  # what the engine padded with is not ours

    def _admit(self, request: Any, tokens: Sequence[int]) -> _Request:
        length, longest = len(tokens), self.driver.target.max_model_len
        prompt = getattr(request, "py_orig_prompt_len", None) or length
        most = getattr(request, "py_max_new_tokens", None)
        if most is not None:
            longest = min(longest, prompt + int(most))
        salt = getattr(request, "cache_salt_id", None)
        return _Request(
            length, tokens[-1], min(prompt, length), longest, "" if salt is None else str(salt), []
        )

    def _keep_only(self, ids: Sequence[str]) -> None:
        for name in self._requests.keys() - set(ids):
            del self._requests[name]
            self.tokens.discard(name)

    def _step_seconds(self, ids: Sequence[str]) -> float | None:
        """Since the step before, where a request ran on, so that the engine cannot have been idle."""
        now = time.perf_counter()
        seconds, busy = now - self._last_time, not self._last_ids.isdisjoint(ids)
        self._last_ids, self._last_time = frozenset(ids), now
        return seconds if busy else None


def _common(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for n, (drafted, written) in enumerate(zip(draft, text, strict=False)):
        if drafted != written:
            return n
    return min(len(draft), len(text))
