"""Suffix automata over token ids, in flat int32 buffers, compiled.

The automaton of a text has one state for every set of substrings that end at the same positions, at
most two a token, and grows by a token in amortised O(1). The suffix link of the state of the whole
text is its longest suffix that also occurs earlier: the match that a draft continues is never searched
for. The same automaton over many documents is a cache that running texts are matched against.

A *table* ``[automata, COLUMNS]`` int64 has a row for each automaton with the address of its buffer, so
that one call works through a whole batch. For ``T`` tokens of capacity the buffer holds

======= =============== ===========================================================================
states  ``[2T + 2, 6]`` longest string's length, suffix link, occurrences, token and target of the
                        first edge (target 0: none), head of the list of further edges (0: none)
edges   ``[T + 1, 5]``  further edges: source, token, target, next of the source, next of the bucket
buckets ``[B]``         hash of source and token to a further edge
text    ``[T]``         the tokens; only in the automaton of a request
======= =============== ===========================================================================

where a state or an edge is known by its offset; state 0 is the root, and there is no edge 0. The first
edge is the most frequent one, the latest among equals, so that following the likeliest continuation is
one load a token. ``N`` tokens in ``D`` documents make at most ``2N`` states and, beyond a first one
each, ``N + 2D - 2`` edges; a cache therefore counts a document as two tokens more, and no kernel can
run out of room. Some 60 bytes a token are in use; room never used is address space only.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import types

from spec_plugins.proposer import IntArray
from spec_plugins.proposers.buffers import buffer_at

__all__ = ["COLUMNS", "Table", "allocate", "compile_kernels", "grow", "insert", "propose"]

Table = npt.NDArray[np.int64]

# Columns of the table: the automaton itself; SERIAL, not 0 in a cache, changes with its content ...
ADDRESS, CAPACITY, SHIFT, STATES, EDGES, LAST, TOKENS, SERIAL = range(8)
# ... and, for a request's own: how many tokens propose() was shown, how many the prompt has, and two
# places in caches: the cache's row (-1: none), the serial it had, state, matched tokens.
SEEN, PROMPT, PLACES = 8, 9, 10
COLUMNS = 18
CACHE, CACHE_SERIAL, CACHE_STATE, CACHE_MATCHED = range(4)
# Fields of a state, of a further edge, and of a candidate for a draft's next node.
LENGTH, LINK, COUNT, TOKEN, TARGET, FURTHER, STATE_SIZE = range(7)
SOURCE, EDGE_TOKEN, EDGE_TARGET, NEXT, CHAINED, EDGE_SIZE = range(6)
GUESS, STATE, PARENT, LEVEL, MATCHED, AUTOMATON, LIMIT, FIELDS = range(8)

DOUBT = 2.0  # see _expand
WALK = 64  # suffixes whose counts a token bumps, longest first: periodic text has as many as tokens
SPAN = 32  # tokens of context that are matched against a cache
SCAN = 16  # further edges of a state that a tree looks at
CANDIDATES = 128
TRICKLE = 64  # tokens of a request that any step takes in


@numba.njit(cache=True)
def _open(row: Table) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Views of states, edges, buckets and text."""
    capacity, at = row[CAPACITY], row[ADDRESS]
    states = buffer_at(at, STATE_SIZE * (2 * capacity + 2))
    at += 4 * states.size
    edges = buffer_at(at, EDGE_SIZE * (capacity + 1))
    at += 4 * edges.size
    buckets = buffer_at(at, 1 << (64 - row[SHIFT]))
    at += 4 * buckets.size
    return states, edges, buckets, buffer_at(at, capacity)


def allocate(row: Table, capacity: int, text: bool) -> IntArray:
    """Make ``row`` an empty automaton with room for ``capacity`` tokens.

    Returns:
        Its buffer, which the caller keeps for as long as the row is in use.
    """
    bits = max(4, capacity.bit_length())
    size = STATE_SIZE * (2 * capacity + 2) + EDGE_SIZE * (capacity + 1) + (1 << bits) + capacity * text
    buffer = np.zeros(size, np.int32)
    buffer[LINK] = -1
    row[ADDRESS] = buffer.ctypes.data
    row[CAPACITY], row[SHIFT] = capacity, 64 - bits
    row[STATES], row[EDGES], row[LAST], row[TOKENS] = STATE_SIZE, EDGE_SIZE, 0, 0
    return buffer


def grow(row: Table, capacity: int, text: bool) -> IntArray:
    """Move an automaton to a larger buffer, which is returned. O(tokens), some 20 ns each.

    The old buffer must be alive until this returns.
    """
    new = row.copy()
    buffer = allocate(new, capacity, text)
    _move(row, new, text)
    row[:] = new
    return buffer


@numba.njit(cache=True)
def _move(old: Table, new: Table, text: bool) -> None:
    states, edges, _, tokens = _open(old)
    new_states, new_edges, buckets, new_tokens = _open(new)
    new_states[: old[STATES]] = states[: old[STATES]]
    new_edges[: old[EDGES]] = edges[: old[EDGES]]
    for e in range(EDGE_SIZE, old[EDGES], EDGE_SIZE):
        b = _bucket(new[SHIFT], edges[e + SOURCE], edges[e + EDGE_TOKEN])
        new_edges[e + CHAINED] = buckets[b]
        buckets[b] = e
    if text:
        new_tokens[: old[TOKENS]] = tokens[: old[TOKENS]]
    for column in (STATES, EDGES, LAST, TOKENS):
        new[column] = old[column]


@numba.njit(cache=True)
def _bucket(shift: int, state: int, token: int) -> Any:
    key = (np.uint64(state) << np.uint64(32)) ^ np.uint64(token)
    return np.intp((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift))


@numba.njit(cache=True)
def _find(edges: IntArray, buckets: IntArray, shift: int, state: int, token: int) -> Any:
    """A state's further edge for a token, 0 if there is none."""
    e = buckets[_bucket(shift, state, token)]
    while e > 0 and (edges[e + SOURCE] != state or edges[e + EDGE_TOKEN] != token):
        e = edges[e + CHAINED]
    return np.int64(e)


@numba.njit(cache=True)
def _child(states: IntArray, edges: IntArray, buckets: IntArray, shift: int, state: int, token: int) -> Any:
    """Where a token leads from a state, 0 if nowhere."""
    if states[state + TARGET] > 0 and states[state + TOKEN] == token:
        return np.int64(states[state + TARGET])
    if states[state + FURTHER] == 0:
        return np.int64(0)
    return np.int64(edges[_find(edges, buckets, shift, state, token) + EDGE_TARGET])


@numba.njit(cache=True)
def _chain(
    edges: IntArray, buckets: IntArray, shift: int, e: int, state: int, token: int, target: int
) -> None:
    """Fill in a further edge and enter it in its bucket."""
    b = _bucket(shift, state, token)
    edges[e + SOURCE] = state
    edges[e + EDGE_TOKEN] = token
    edges[e + EDGE_TARGET] = target
    edges[e + CHAINED] = buckets[b]
    buckets[b] = e


@numba.njit(cache=True)
def _promote(
    states: IntArray, edges: IntArray, buckets: IntArray, shift: int, state: int, token: int
) -> None:
    """Let a token's further edge trade places with the state's first."""
    e = _find(edges, buckets, shift, state, token)
    target = edges[e + EDGE_TARGET]
    b = _bucket(shift, state, token)
    before = np.int64(buckets[b])
    if before == e:
        buckets[b] = edges[e + CHAINED]
    else:
        while edges[before + CHAINED] != e:
            before = np.int64(edges[before + CHAINED])
        edges[before + CHAINED] = edges[e + CHAINED]
    _chain(edges, buckets, shift, e, state, states[state + TOKEN], states[state + TARGET])
    states[state + TOKEN] = token
    states[state + TARGET] = target


@numba.njit(cache=True)
def _split(
    row: Table, states: IntArray, edges: IntArray, buckets: IntArray, state: int, token: int, target: int
) -> Any:
    """The state of ``state``'s longest string followed by ``token``, which leads to ``target``. Where
    that stands for longer strings too, the shorter ones move to a new state."""
    if states[target + LENGTH] == states[state + LENGTH] + 1:
        return target
    shift = row[SHIFT]
    clone = row[STATES]
    row[STATES] = clone + STATE_SIZE
    states[clone : clone + STATE_SIZE] = states[target : target + STATE_SIZE]
    states[clone + LENGTH] = states[state + LENGTH] + 1
    states[clone + FURTHER] = 0
    states[target + LINK] = clone
    e, tail = np.int64(states[target + FURTHER]), np.int64(0)
    while e > 0:
        copy = row[EDGES]
        row[EDGES] = copy + EDGE_SIZE
        _chain(edges, buckets, shift, copy, clone, edges[e + EDGE_TOKEN], edges[e + EDGE_TARGET])
        edges[copy + NEXT] = 0
        if tail > 0:
            edges[tail + NEXT] = copy
        else:
            states[clone + FURTHER] = copy
        tail = copy
        e = np.int64(edges[e + NEXT])
    while state >= 0:
        if states[state + TOKEN] == token:
            if states[state + TARGET] != target:
                break
            states[state + TARGET] = clone
        else:
            e = _find(edges, buckets, shift, state, token)
            if edges[e + EDGE_TARGET] != target:
                break
            edges[e + EDGE_TARGET] = clone
        state = np.int64(states[state + LINK])
    return clone


@numba.njit(cache=True)
def _extend(row: Table, states: IntArray, edges: IntArray, buckets: IntArray, token: int) -> None:
    """Append a token. Amortised O(1)."""
    shift = row[SHIFT]
    before = row[LAST]
    target = _child(states, edges, buckets, shift, before, token)
    if target > 0:  # only in a cache: another document went this way
        last = _split(row, states, edges, buckets, before, token, target)
    else:
        last = row[STATES]
        row[STATES] = last + STATE_SIZE
        states[last + LENGTH] = states[before + LENGTH] + 1
        p = before
        while p >= 0 and target == 0:
            if states[p + TARGET] == 0:
                states[p + TOKEN] = token
                states[p + TARGET] = last
            else:
                e = row[EDGES]
                row[EDGES] = e + EDGE_SIZE
                _chain(edges, buckets, shift, e, p, token, last)
                edges[e + NEXT] = states[p + FURTHER]
                states[p + FURTHER] = e
            p = np.int64(states[p + LINK])
            if p >= 0:
                target = _child(states, edges, buckets, shift, p, token)
        states[last + LINK] = 0 if p < 0 else _split(row, states, edges, buckets, p, token, target)
    row[LAST] = last

    # Each suffix occurred once more. Those before and after the token run in step: a suffix p leads to
    # the child whose strings include p's longest and the token.
    child, p, steps = last, before, 0
    while child > 0 and steps < WALK:
        count = states[child + COUNT] + 1
        states[child + COUNT] = count
        shortest = states[states[child + LINK] + LENGTH]
        while p > 0 and states[p + LENGTH] >= shortest:
            if states[p + TOKEN] != token and states[states[p + TARGET] + COUNT] <= count:
                _promote(states, edges, buckets, shift, p, token)
            p = np.int64(states[p + LINK])
            steps += 1
        child = np.int64(states[child + LINK])


@numba.njit(cache=True)
def insert(table: Table, cache: int, request: int, start: int) -> None:
    """Append a request's text from ``start`` on to a cache, as a document. The cache needs room for its
    tokens and two more. Some 0.4 to 0.8 µs a token."""
    row = table[cache]
    states, edges, buckets, _ = _open(row)
    text = _open(table[request])[3]
    row[LAST] = 0
    for j in range(start, table[request, TOKENS]):
        _extend(row, states, edges, buckets, text[j])
    row[TOKENS] += table[request, TOKENS] - start + 2


@numba.njit(cache=True)
def _follow(table: Table, place: Table, tokens: IntArray, known: int, length: int) -> None:
    """Bring a place in a cache up to date: the longest suffix of the tokens, of at most ``SPAN``, that
    occurs there. ``known`` tokens were seen before; starts over where the cache changed."""
    cache = table[place[CACHE]]
    state, matched, start = place[CACHE_STATE], place[CACHE_MATCHED], known
    if place[CACHE_SERIAL] != cache[SERIAL] or length - known >= SPAN:
        place[CACHE_SERIAL] = cache[SERIAL]
        state, matched, start = 0, 0, max(0, length - SPAN)
    states, edges, buckets, _ = _open(cache)
    shift = cache[SHIFT]
    for j in range(start, length):
        target = _child(states, edges, buckets, shift, state, tokens[j])
        while target == 0 and state > 0:
            state = np.int64(states[state + LINK])
            matched = np.int64(states[state + LENGTH])
            target = _child(states, edges, buckets, shift, state, tokens[j])
        if target > 0:
            state = target
            matched += 1
            if matched > SPAN:
                matched = SPAN
                while states[states[state + LINK] + LENGTH] >= SPAN:
                    state = np.int64(states[state + LINK])
    place[CACHE_STATE], place[CACHE_MATCHED] = state, matched


@numba.njit(cache=True)
def _expand(
    table: Table,
    at: Table,
    likelihood: float,
    ending: int,
    min_match: int,
    min_probability: float,
    vocab_size: int,
    tree: bool,
    queue: Table,
    likelihoods: npt.NDArray[np.float64],
    size: int,
) -> Any:
    """Queue what may follow a candidate, ``ending`` of whose occurrences are followed by nothing.

    A continuation seen ``c`` times out of ``n`` after ``m`` matching tokens gets the probability
    ``c / (n + DOUBT / m)``. In 2,560 answers of a 135M model, matches of 1, 2, 4, 8 and 16 tokens that had
    occurred once went on the same way in 32, 53, 71, 84 and 90 % of the cases: it is off by 4 at most.
    """
    if at[LEVEL] >= at[LIMIT]:
        return size
    states, edges, _, _ = _open(table[at[AUTOMATON]])
    state, matched = at[STATE], at[MATCHED]
    while state > 0 and states[state + TARGET] == 0:
        # The text ends here, or a document. In the request's own text that is a whole period after the
        # match: go round.
        state = np.int64(states[state + LINK])
        if table[at[AUTOMATON], SERIAL] != 0:
            matched = np.int64(states[state + LENGTH])
        ending = 1
    if state == 0 or matched < min_match:
        return size
    token, target = states[state + TOKEN], np.int64(states[state + TARGET])
    e = np.int64(states[state + FURTHER])
    count = states[target + COUNT]
    rest = max(states[state + COUNT] - ending, count)  # counts of long periodic texts are too low
    scale = likelihood / (rest + DOUBT / matched)
    for _ in range(SCAN + 1 if tree else 1):
        if scale * count >= min_probability and 0 <= token < vocab_size and size < CANDIDATES:
            likelihoods[size] = scale * count
            new = queue[size]
            new[GUESS], new[STATE], new[PARENT], new[LEVEL] = token, target, at[PARENT], at[LEVEL] + 1
            new[MATCHED], new[AUTOMATON], new[LIMIT] = matched + 1, at[AUTOMATON], at[LIMIT]
            size += 1
        rest -= count
        if e == 0 or scale * rest < min_probability:
            break
        token, target = edges[e + EDGE_TOKEN], np.int64(edges[e + EDGE_TARGET])
        e = np.int64(edges[e + NEXT])
        count = states[target + COUNT]
    return size


@numba.njit(cache=True)
def _draft(
    table: Table,
    slot: int,
    length: int,
    budget: int,
    depth: int,
    min_match: int,
    min_probability: float,
    length_factor: float,
    vocab_size: int,
    tree: bool,
    queue: Table,
    likelihoods: npt.NDArray[np.float64],
    tokens: IntArray,
    parents: IntArray,
) -> Any:
    """Draft the likeliest paths first, from the request's own text and its caches at once: where two
    agree they share nodes, and the more confident counts. Returns the number of nodes."""
    row = table[slot]
    at = queue[CANDIDATES]
    n, size = 0, 0
    for source in range(3):
        ending = 0
        if source == 0:
            if row[TOKENS] != length:
                continue
            states = _open(row)[0]
            at[AUTOMATON], at[STATE], ending = slot, states[row[LAST] + LINK], 1
            at[MATCHED] = states[at[STATE] + LENGTH] if at[STATE] > 0 else 0
        else:
            place = row[PLACES + 4 * (source - 1) :]
            if place[CACHE] < 0:
                continue
            at[AUTOMATON], at[STATE], at[MATCHED] = place[CACHE], place[CACHE_STATE], place[CACHE_MATCHED]
        at[PARENT], at[LEVEL] = -1, 0
        at[LIMIT] = min(depth, np.int64(length_factor * at[MATCHED]))
        size = _expand(
            table, at, 1.0, ending, min_match, min_probability, vocab_size, tree, queue, likelihoods, size
        )
    while size > 0 and n < budget:
        best = 0
        for k in range(1, size):
            if likelihoods[k] > likelihoods[best]:
                best = k
        likelihood = likelihoods[best]
        at[:] = queue[best]
        size -= 1
        for k in range(best, size):
            queue[k] = queue[k + 1]
            likelihoods[k] = likelihoods[k + 1]
        node = n
        if tree:
            for k in range(at[PARENT] + 1, n):
                if parents[k] == at[PARENT] and tokens[k] == at[GUESS]:
                    node = k
        elif at[LEVEL] <= n:
            node = at[LEVEL] - 1
            if tokens[node] != at[GUESS]:
                continue
        if node == n:
            tokens[n], parents[n] = at[GUESS], at[PARENT]
            n += 1
        at[PARENT] = node
        size = _expand(
            table, at, likelihood, 0, min_match, min_probability, vocab_size, tree, queue, likelihoods, size
        )
    return n


@numba.njit(cache=True)
def propose(
    table: Table,
    slots: Table,
    token_ids: IntArray,
    rows: IntArray,
    lengths: IntArray,
    fresh: IntArray,
    budgets: IntArray,
    depths: IntArray,
    min_match: int,
    min_probability: float,
    length_factor: float,
    vocab_size: int,
    tree: bool,
    allowance: int,
    done: npt.NDArray[np.bool_],
    out_tokens: IntArray,
    out_parents: IntArray,
    out_counts: IntArray,
) -> int:
    """Take in new tokens and draft, for each request of a step that is not ``done``.

    A request whose automaton is not that of its tokens, or too small, is left as it is. Some 0.5 µs a
    new token and 0.1 to 0.2 µs a drafted one.

    Args:
        table: one row an automaton.
        slots: ``[n]``, which row is the request's.
        token_ids, rows, lengths, fresh, budgets, depths: as in :class:`~spec_plugins.proposer.Step`.
        min_match, min_probability, length_factor, tree: options of the proposer.
        vocab_size: no other token ids are drafted.
        allowance: tokens to take in over all requests; one behind drafts from caches only.
        done: ``[n]``, set for every request that was dealt with.
        out_tokens: ``[n, width]``, drafted tokens.
        out_parents: ``[n, width]``, their parents.
        out_counts: ``[n]``, how many; 0 on entry.

    Returns:
        How many requests were left.
    """
    left = 0
    queue = np.empty((CANDIDATES + 1, FIELDS), np.int64)
    likelihoods = np.empty(CANDIDATES, np.float64)
    for i in range(len(slots)):
        if done[i]:
            continue
        row = table[slots[i]]
        length, r = np.int64(lengths[i]), rows[i]
        if r < 0 or r >= token_ids.shape[0] or length < 1 or length > token_ids.shape[1]:
            done[i] = True
            continue
        known = row[SEEN]
        if fresh[i] < 0 or known + fresh[i] != length or length > row[CAPACITY]:
            left += 1
            continue
        done[i] = True
        context = token_ids[r]
        states, edges, buckets, text = _open(row)
        start = row[TOKENS]
        stop = min(length, start + max(allowance, TRICKLE))
        allowance -= stop - start
        for j in range(start, stop):
            text[j] = context[j]
            _extend(row, states, edges, buckets, context[j])
        row[TOKENS], row[SEEN] = stop, length
        for at in (PLACES, PLACES + 4):
            if row[at] >= 0:
                _follow(table, row[at : at + 4], context, known, length)
        budget, depth = np.int64(min(budgets[i], out_tokens.shape[1])), np.int64(depths[i])
        if budget > 0:
            out_counts[i] = _draft(
                table,
                slots[i],
                length,
                budget,
                depth,
                min_match,
                min_probability,
                length_factor,
                vocab_size,
                tree,
                queue,
                likelihoods,
                out_tokens[i],
                out_parents[i],
            )
    return left


@functools.cache
def compile_kernels() -> None:
    """Compile everything, or load it from numba's cache, so that no step does: some ten seconds once."""
    table, row = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
    given = types.Array(types.int32, 1, "A", readonly=True)
    taken = types.Array(types.int32, 2, "C")
    kernels: list[tuple[Any, tuple[Any, ...]]] = [
        (
            propose,
            (
                *(
                    table,
                    row,
                    types.Array(types.int32, 2, "A", readonly=True),
                    given,
                    given,
                    given,
                    given,
                    given,
                ),
                *(types.int64, types.float64, types.float64, types.int64, types.boolean, types.int64),
                *(types.Array(types.boolean, 1, "C"), taken, taken, types.Array(types.int32, 1, "C")),
            ),
        ),
        (insert, (table, types.int64, types.int64, types.int64)),
        (_move, (row, row, types.boolean)),
    ]
    for kernel, signature in kernels:
        kernel.compile(signature)
        # Or numba would compile anew for arrays that are writable, or not contiguous.
        kernel.disable_compile()
