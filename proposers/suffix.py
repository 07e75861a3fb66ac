"""Continues what was said before, in the request itself or in earlier outputs of the same tenant.

The idea is SuffixDecoding's (Oliaro et al., arXiv 2411.04975): whatever followed the longest match with
the end of the text, weighted by how often it did. It is looked up in suffix automata, as in SAM-Decoding
(Hu et al., arXiv 2411.10666), because their links keep the match current in constant time a token, with
neither a bound on its length nor a search. The request's own text and the cache are continued together,
in one search for the likeliest paths, which accepts more than the better of the two alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from spec_plugins.proposer import Drafts, IntArray, Need, Proposer, Step, Target
from spec_plugins.proposers import suffix_automaton
from spec_plugins.proposers.suffix_automaton import (
    ADDRESS,
    CAPACITY,
    COLUMNS,
    EDGES,
    PLACES,
    PROMPT,
    SEEN,
    SERIAL,
    SHIFT,
    STATES,
    TOKENS,
    Table,
)

__all__ = ["SuffixProposer"]

INGEST = 8192  # tokens that a step takes in beyond a few a request: some 3 ms
LEAD = 16  # tokens before an output that are cached with it, for its beginning to be found by
FINISHED = 1024  # requests whose cached output is remembered, in case they go on


@dataclass(slots=True)
class _Tenant:
    """The cache of one tenant: two generations, of which the older is dropped when the younger is full."""

    name: str
    caches: tuple[int, int]
    """Their rows in the table."""
    young: int = 0
    running: int = 0


class SuffixProposer(Proposer):
    """Repeats what followed the longest match, in the request or in earlier outputs of its tenant.

    For text that repeats itself or other text: code edits, agents, structured output, retrieval. Each
    running request has a suffix automaton of its tokens, and each tenant two of its finished outputs.
    A draft follows the likeliest continuations of the longest matches, by frequency, for as long as
    they are likely enough.

    Costs 2 to 4 µs a request and step, twice that for a tree of 16, at any length of the context, and
    about 1 µs for each further new token. A new prompt costs 0.2 to 0.6 µs a token, at most some 3 ms a
    step: what is left waits, and that request meanwhile drafts from the cache. :meth:`finish` costs 0.4
    to 0.8 µs a token of output, and a few times, while a cache fills, 0.1 µs a token that it holds.
    Memory is some 60 bytes a token, running or cached.
    """

    uses = frozenset({Need.TREES})
    bounded = True
    nested = True

    def __init__(
        self,
        *,
        min_match: Annotated[
            int, Field(ge=1, le=64, description="Shortest match, in tokens, that is continued.")
        ] = 1,
        min_probability: Annotated[
            float,
            Field(
                ge=0.01,
                le=1,
                description="Least estimated probability of a drafted token, and of all before it.",
            ),
        ] = 0.1,
        length_factor: Annotated[
            float, Field(gt=0, le=1000, description="Most draft tokens in a row for each token of the match.")
        ] = 4.0,
        tree: Annotated[
            bool, Field(description="Draft several continuations at once where the engine verifies trees.")
        ] = True,
        cache_tokens: Annotated[
            int,
            Field(
                ge=0,
                le=2**28,
                description="Most tokens of finished outputs that are kept, over all tenants, at some 60 "
                "bytes each. 0: drafts come from the request's own text only.",
            ),
        ] = 1_000_000,
        cache_prompts: Annotated[bool, Field(description="Keep prompts too, not only outputs.")] = False,
        cache_tenants: Annotated[
            int,
            Field(ge=1, le=2**16, description="Most tenants with a cache; the least recent is dropped."),
        ] = 256,
    ) -> None:
        self._min_match, self._min_probability = min_match, min_probability
        self._length_factor = length_factor
        self._wants_tree, self._tree = tree, False
        self._cache_tokens, self._cache_prompts = cache_tokens, cache_prompts
        self._cache_tenants = cache_tenants
        self._vocab_size = self._max_model_len = 2**31
        self._ingest = INGEST

        self._table = np.zeros((0, COLUMNS), np.int64)
        self._buffers: list[IntArray | None] = []
        self._free: list[int] = []
        self._slots: dict[str, int] = {}
        self._owners: dict[str, _Tenant] = {}
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # least recent first
        self._cached = 0
        self._serial = 0
        self._finished: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()

    @property
    def depends_on(self) -> Literal["text", "finished"]:  # type: ignore[override]
        return "finished" if self._cache_tokens else "text"

    def load(self, target: Target) -> None:
        self._ingest = 1 << 40 if target.offline else INGEST
        self._tree = self._wants_tree and Need.TREES in target.provides
        self._vocab_size, self._max_model_len = target.vocab_size, target.max_model_len
        suffix_automaton.compile_kernels()

    def propose(self, step: Step) -> Drafts:
        n = len(step)
        if n == 0:
            return Drafts.empty(0)
        places = [self._slots.get(request_id, -1) for request_id in step.request_ids]
        if -1 in places:
            places = [self._admit(step, i) if place < 0 else place for i, place in enumerate(places)]
        slots = np.array(places, np.int64)
        token_ids, rows = np.asarray(step.token_ids, np.int32), np.asarray(step.rows, np.int32)
        lengths, fresh = np.asarray(step.lengths, np.int32), np.asarray(step.fresh, np.int32)
        budgets, depths = np.asarray(step.budgets, np.int32), np.asarray(step.depths, np.int32)
        shape = (n, max(0, int(budgets.max())))
        tokens, parents = np.empty(shape, np.int32), np.empty(shape, np.int32)
        counts, done = np.zeros(n, np.int32), np.zeros(n, np.bool_)

        def work(slots: Table, fresh: IntArray) -> int:
            return suffix_automaton.propose(
                self._table, slots, token_ids, rows, lengths, fresh, budgets, depths, self._min_match,
                self._min_probability, self._length_factor, self._vocab_size, self._tree, self._ingest, done,
                tokens, parents, counts,
            )  # fmt: skip

        if work(slots, fresh):
            fresh = fresh.copy()
            for i in np.flatnonzero(~done).tolist():
                self._prepare(step, i, fresh)
            work(np.array([self._slots[r] for r in step.request_ids], np.int64), fresh)
        return Drafts(tokens, counts, parents if self._tree else None)

    def _prepare(self, step: Step, i: int, fresh: IntArray) -> None:
        """Make room for request ``i``, and let it start over where its automaton is of other tokens."""
        request_id, length = step.request_ids[i], int(step.lengths[i])
        slot = self._slots[request_id]
        if fresh[i] < 0 or self._table[slot, SEEN] + fresh[i] != length:
            self._release(request_id)
            slot = self._admit(step, i)
            fresh[i] = length
        row = self._table[slot]
        if length > row[CAPACITY]:
            old = int(row[CAPACITY])
            capacity = max(length, min(length + max(256, length // 4, old // 2), self._max_model_len))
            make = suffix_automaton.grow if old else suffix_automaton.allocate
            self._buffers[slot] = make(row, capacity, True)

    def finish(self, request_id: str) -> None:
        tenant = self._owners.get(request_id)
        try:
            if tenant is not None:
                self._remember(request_id, tenant)
        finally:
            self._release(request_id)

    def gauges(self) -> Mapping[str, float]:
        used = self._table[self._table[:, ADDRESS] != 0]
        text = used[used[:, SERIAL] == 0]
        size = 4 * used[:, STATES] + 4 * used[:, EDGES] + (4 << (64 - used[:, SHIFT]))
        return {
            "requests": len(self._slots),
            "tenants": len(self._tenants),
            "cached_tokens": self._cached,
            "bytes": int(size.sum() + 4 * text[:, TOKENS].sum()),
        }

    def _take(self) -> int:
        """A row of the table that is free."""
        if not self._free:
            n = len(self._table)
            table = np.zeros((2 * n + 16, COLUMNS), np.int64)
            table[:n] = self._table
            self._table = table
            self._buffers += repeat(None, len(table) - n)
            self._free = list(range(len(table) - 1, n - 1, -1))
        return self._free.pop()

    def _give(self, slot: int) -> None:
        self._buffers[slot] = None
        self._table[slot] = 0
        self._free.append(slot)

    def _admit(self, step: Step, i: int) -> int:
        """The row of request ``i``, a new one where it has none."""
        request_id = step.request_ids[i]
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._take()
            places = [-1, -1]
            if self._cache_tokens > 0:
                tenant = self._tenant("" if step.tenants is None else step.tenants[i])
                tenant.running += 1
                self._owners[request_id] = tenant
                places = list(tenant.caches)
            row = self._table[slot]
            row[PROMPT] = step.prompt_lengths[i]
            row[PLACES], row[PLACES + 4] = places
            self._slots[request_id] = slot
        return slot

    def _release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._give(slot)
        tenant = self._owners.pop(request_id, None)
        if tenant is not None:
            tenant.running -= 1
            self._forget_idle(tenant)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._cache_tenants:
                idle = next((t for t in self._tenants.values() if not t.running), None)
                if idle is not None:
                    self._forget(idle)
            tenant = self._tenants[name] = _Tenant(name, (self._take(), self._take()))
            for slot in tenant.caches:
                self._clear(slot)
        self._tenants.move_to_end(name)
        return tenant

    def _forget(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.name]
        for slot in tenant.caches:
            self._cached -= int(self._table[slot, TOKENS])
            self._give(slot)

    def _clear(self, slot: int, capacity: int = 0) -> None:
        """Empty a cache. Places of running requests in it become invalid with its serial."""
        row = self._table[slot]
        self._cached -= int(row[TOKENS])
        self._buffers[slot] = suffix_automaton.allocate(row, capacity, False)
        self._serial += 1
        row[SERIAL] = self._serial

    def _remember(self, request_id: str, tenant: _Tenant) -> None:
        """Cache the output of a request, or what of it is not cached yet."""
        slot = self._slots[request_id]
        buffer = self._buffers[slot]
        end, prompt, capacity = (int(self._table[slot, column]) for column in (TOKENS, PROMPT, CAPACITY))
        start = 0 if self._cache_prompts else max(0, prompt - LEAD)
        if buffer is None or (end <= prompt and not self._cache_prompts):
            return
        text = buffer[buffer.size - capacity :]
        known, tail = self._finished.pop((tenant.name, request_id), (0, b""))
        if 0 < known <= end and text[max(0, known - LEAD) : known].tobytes() == tail:
            start = end if known == end else max(start, known - LEAD)
        self._finished[tenant.name, request_id] = end, text[max(0, end - LEAD) : end].tobytes()
        if len(self._finished) > FINISHED:
            self._finished.popitem(last=False)

        most = self._cache_tokens // 2  # of a generation
        start = max(start, end - most + 2)
        if start >= end:
            return
        cost = end - start + 2
        cache = tenant.caches[tenant.young]
        if self._table[cache, TOKENS] + cost > most:
            tenant.young ^= 1
            cache = tenant.caches[tenant.young]
            self._clear(cache, most)
        self._tenants.move_to_end(tenant.name)
        self._evict(self._cached + cost - self._cache_tokens)
        row = self._table[cache]
        needed = int(row[TOKENS]) + cost
        if needed > row[CAPACITY]:
            # Far ahead, for growing is a pause; the room that is not used is no memory.
            self._buffers[cache] = suffix_automaton.grow(row, min(most, max(4096, 4 * needed)), False)
        suffix_automaton.insert(self._table, cache, slot, start)
        self._cached += cost
        self._serial += 1
        row[SERIAL] = self._serial

    def _evict(self, excess: int) -> None:
        """Drop generations of the least recent tenants, older ones first, that hold ``excess`` tokens."""
        for tenant in list(self._tenants.values()):
            if excess <= 0:
                return
            for slot in (tenant.caches[1 - tenant.young], tenant.caches[tenant.young]):
                if excess > 0:
                    excess -= int(self._table[slot, TOKENS])
                    self._clear(slot)
            self._forget_idle(tenant)

    def _forget_idle(self, tenant: _Tenant) -> None:
        if not tenant.running and not self._table[list(tenant.caches), TOKENS].any():
            self._forget(tenant)
