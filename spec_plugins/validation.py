"""Checks drafts before an engine sees them. A bad draft is emptied, a long one cut; nothing raises."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import Draft, Drafts, IntArray, Step
from spec_plugins.trees import pack, principal_chains

if TYPE_CHECKING:
    import torch

__all__ = ["Fault", "check_drafts"]

# How far a row of probabilities may be from a sum of 1: half precision keeps about three digits.
SUM_TOLERANCE = 5e-3


class Fault(enum.Enum):
    """What can be wrong with a proposer's answer."""

    RAISED = "raised"
    LATE = "late"
    WRONG_COUNT = "wrong_count"
    NOT_A_DRAFT = "not_a_draft"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    WRONG_PARENTS = "wrong_parents"
    DUPLICATE_SIBLINGS = "duplicate_siblings"
    WRONG_PROBABILITIES = "wrong_probabilities"
    OVER_BUDGET = "over_budget"
    """Cut rather than emptied."""
    FINISH_RAISED = "finish_raised"


# By the number that the compiled checks write; 0 is sound.
_CODES = [
    None,
    Fault.NOT_A_DRAFT,
    Fault.TOKEN_OUT_OF_RANGE,
    Fault.WRONG_PARENTS,
    Fault.DUPLICATE_SIBLINGS,
    Fault.OVER_BUDGET,
]
# No engine verifies so many; whatever lies beyond is cut before it costs time and memory.
_MOST_NODES = 4096


@numba.njit(cache=True, nogil=True)
def _check_chains(
    tokens: IntArray,
    counts: IntArray,
    budgets: IntArray,
    depths: IntArray,
    vocab_size: int,
    codes: npt.NDArray[np.int8],
) -> int:
    """Cuts in place; returns the largest code."""
    worst = 0
    for i in range(len(counts)):
        if counts[i] < 0 or counts[i] > tokens.shape[1]:
            counts[i] = 0
            codes[i] = 1
        most = min(budgets[i], depths[i])
        if counts[i] > most:
            counts[i] = most
            codes[i] = 5
        for j in range(counts[i]):
            if tokens[i, j] < 0 or tokens[i, j] >= vocab_size:
                counts[i] = 0
                codes[i] = 2
                break
        worst = max(worst, codes[i])
    return worst


@numba.njit(cache=True, nogil=True)
def _check_trees(
    tokens: IntArray,
    parents: IntArray,
    counts: IntArray,
    budgets: IntArray,
    depths: IntArray,
    vocab_size: int,
    codes: npt.NDArray[np.int8],
    kept: IntArray,
) -> int:
    """Cuts to budget and depth in place, parents first; ``kept[i]`` lists the nodes that stay.

    Reads no further than to the node that fills the budget. O(nodes · siblings). Returns the largest code.
    """
    n, width = tokens.shape
    worst = 0
    depth = np.empty(width, np.int32)
    place = np.empty(width, np.int32)  # where a node moves to, -2 for one that is cut
    youngest = np.full(width + 1, -1, np.int32)  # of the children of the node before, -1 for none
    elder = np.empty(width, np.int32)  # the sibling before a node
    for i in range(n):
        if counts[i] < 0 or counts[i] > width:
            counts[i] = 0
            codes[i] = 1
        m = 0
        youngest[0] = -1
        for j in range(counts[i]):
            if m >= budgets[i]:
                codes[i] = 5
                break
            t, p = tokens[i, j], parents[i, j]
            if t < 0 or t >= vocab_size:
                codes[i] = 2
                break
            if p < -1 or p >= j:
                codes[i] = 3
                break
            depth[j] = 1 if p < 0 else depth[p] + 1
            at = -1 if p < 0 else place[p]
            if at == -2 or depth[j] > depths[i]:
                place[j] = -2
                codes[i] = 5
                continue
            k = youngest[at + 1]
            elder[m] = k
            while k >= 0 and tokens[i, k] != t:
                k = elder[k]
            if k >= 0:
                codes[i] = 4
                break
            # What is read is never behind what is written.
            tokens[i, m], parents[i, m], kept[i, m] = t, at, j
            place[j] = m
            youngest[at + 1] = m
            m += 1
            youngest[m] = -1
        counts[i] = m if codes[i] == 0 or codes[i] == 5 else 0
        worst = max(worst, codes[i])
    return worst


def check_drafts(
    drafts: Sequence[Draft], step: Step, vocab_size: int, *, trees: bool, probabilities: bool
) -> tuple[Drafts, list[tuple[int, Fault]]]:
    """Pack, check and cut the drafts of a step.

    Args:
        drafts: what the proposer returned, whatever that is.
        step: what it was asked.
        vocab_size: draft tokens must be less than this.
        trees: whether the host verifies trees; otherwise each is reduced to its principal chain.
        probabilities: whether the host verifies with draft probabilities; otherwise they are dropped
            (any draft is exact when treated as deterministic).

    Returns:
        Drafts in int32, safe to verify, and a list of ``(request index, fault)``; index ``-1`` speaks
        of the whole answer. All but the probabilities are a private copy. Nothing past the budget is
        read. O(nodes), plus O(nodes · vocab_size) for probabilities.
    """
    faults: list[tuple[int, Fault]] = []
    n = len(step)
    try:
        packed = _as_packed(drafts, n, probabilities, faults)
    except Exception:  # anything at all may have been returned
        faults.append((-1, Fault.NOT_A_DRAFT))
        packed = None
    if packed is None:
        return Drafts.empty(n), faults
    if packed.probs is not None:
        _check_shapes(packed, vocab_size, faults)
    if not trees and packed.parents is not None:
        whole = np.full(n, packed.tokens.shape[1], np.int32)
        _check(packed, whole, whole, vocab_size, faults)
        packed = principal_chains(packed)
    _check(packed, step.budgets, step.depths, vocab_size, faults)
    if packed.probs is not None:
        _check_values(packed, faults)
    return packed, faults


def _check(
    drafts: Drafts, budgets: IntArray, depths: IntArray, vocab_size: int, faults: list[tuple[int, Fault]]
) -> None:
    before = drafts.counts if drafts.probs is None else drafts.counts.copy()
    codes = np.zeros(len(before), np.int8)
    kept: IntArray | None = None
    if drafts.parents is None:
        worst = _check_chains(drafts.tokens, drafts.counts, budgets, depths, vocab_size, codes)
    else:
        kept = np.zeros(drafts.tokens.shape, np.int32)
        worst = _check_trees(
            drafts.tokens, drafts.parents, drafts.counts, budgets, depths, vocab_size, codes, kept
        )
    if not worst:
        return
    if kept is not None and drafts.sources is not None:
        drafts.sources = np.take_along_axis(drafts.sources, kept, axis=1)
    if drafts.probs is not None:
        probs = list(drafts.probs)
        for i, p in enumerate(probs):
            m = drafts.counts[i]
            if p is not None and m < before[i]:
                probs[i] = None if not m else p[:m] if kept is None else p[kept[i, :m]]
        drafts.probs = probs
    for i in np.flatnonzero(codes).tolist():
        fault = _CODES[codes[i]]
        assert fault is not None
        faults.append((i, fault))


def _as_packed(
    drafts: Sequence[Draft], n: int, probabilities: bool, faults: list[tuple[int, Fault]]
) -> Drafts | None:
    """A private int32 copy, so that checking can cut in place."""
    if len(drafts) != n:
        faults.append((-1, Fault.WRONG_COUNT))
        return None
    if isinstance(drafts, Drafts):
        return _copy(drafts, n, probabilities, faults)
    items = list(itertools.islice(drafts, n + 1))
    if len(items) != n:
        faults.append((-1, Fault.WRONG_COUNT))
        return None
    made = []
    for i, item in enumerate(items):
        try:
            draft = _as_draft(item, probabilities)
        except Exception:  # anything at all may be in it
            draft = Fault.NOT_A_DRAFT
        if isinstance(draft, Fault):
            faults.append((i, draft))
            draft = _EMPTY
        made.append(draft)
    return pack(made)


def _copy(d: Drafts, n: int, probabilities: bool, faults: list[tuple[int, Fault]]) -> Drafts | None:
    tokens, counts = _private(d.tokens, 2), _private(d.counts, 1)
    if tokens is None or counts is None or len(tokens) != n or len(counts) != n:
        faults.append((-1, Fault.NOT_A_DRAFT))
        return None
    parents = sources = probs = None
    if d.parents is not None:
        parents = _private(d.parents, 2)
        if parents is None or parents.shape != tokens.shape:
            faults.append((-1, Fault.WRONG_PARENTS))
            return None
    if d.sources is not None:
        sources = _private(d.sources, 2)
        if sources is not None and sources.shape != tokens.shape:
            sources = None  # only statistics suffer
    if d.probs is not None and probabilities:
        probs = list(itertools.islice(d.probs, n + 1))
        if len(probs) != n:
            faults.append((-1, Fault.WRONG_PROBABILITIES))
            return None
    width = tokens.shape[1]
    if width > _MOST_NODES:
        counts[(counts > _MOST_NODES) & (counts <= width)] = _MOST_NODES
        tokens = tokens[:, :_MOST_NODES].copy()
        parents = None if parents is None else parents[:, :_MOST_NODES].copy()
        sources = None if sources is None else sources[:, :_MOST_NODES].copy()
    return Drafts(tokens, counts, parents, probs, sources)


_EMPTY = Draft(np.empty(0, np.int32))
_INT32 = np.dtype(np.int32)


def _as_draft(draft: object, probabilities: bool) -> Draft | Fault:
    """One draft with int32 arrays of the right shapes."""
    if not isinstance(draft, Draft):
        return Fault.NOT_A_DRAFT
    tokens = _as_ints(draft.tokens, 1)
    if tokens is None:
        return Fault.NOT_A_DRAFT
    parents, sources, probs = draft.parents, draft.sources, draft.probs
    plain = parents is None and sources is None and probs is None
    if plain and tokens is draft.tokens:  # no need of another
        return draft if len(tokens) <= _MOST_NODES else Draft(tokens[:_MOST_NODES])
    if parents is not None:
        parents = _as_ints(parents, 1)
        if parents is None or len(parents) != len(tokens):
            return Fault.WRONG_PARENTS
        parents = parents[:_MOST_NODES]
    if sources is not None:
        sources = _as_ints(sources, 1)
        sources = sources[:_MOST_NODES] if sources is not None and len(sources) == len(tokens) else None
    return Draft(tokens[:_MOST_NODES], parents, probs if probabilities and len(tokens) else None, sources)


def _as_ints(values: object, ndim: int) -> IntArray | None:
    """As int32, without a copy where it is that; ``None`` where it is no array of integers."""
    if type(values) is np.ndarray and values.dtype is _INT32:
        return values if values.ndim == ndim else None
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except Exception:  # ragged, say
        return None
    if not array.size:  # of any kind: [] becomes an array of floats
        array = np.zeros(array.shape, np.int32)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        return None
    if array.dtype != np.int32:
        # Out of int32's range is out of every vocabulary's: keep it so rather than let it wrap.
        wide = np.minimum(array, 2**31 - 1) if array.dtype == np.uint64 else array
        array = wide.astype(np.int64).clip(-2, 2**31 - 1).astype(np.int32)
    return array


def _private(values: object, ndim: int) -> IntArray | None:
    array = _as_ints(values, ndim)
    return None if array is None else array.copy()


def _check_shapes(drafts: Drafts, vocab_size: int, faults: list[tuple[int, Fault]]) -> None:
    """Make all probabilities tensors of the right shape; empties drafts with others."""
    assert drafts.probs is not None
    probs: list[torch.Tensor | None] = []
    for i, (given, m) in enumerate(zip(drafts.probs, drafts.counts.tolist(), strict=True)):
        good = None if given is None or m <= 0 else _as_probabilities(given, (m, vocab_size))
        probs.append(good)
        if good is None and given is not None and m > 0:
            drafts.counts[i] = 0
            faults.append((i, Fault.WRONG_PROBABILITIES))
    drafts.probs = probs if any(p is not None for p in probs) else None


def _as_probabilities(values: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    import torch

    try:
        probs = torch.as_tensor(values)
        # No quantised or sparse ones: those cannot be computed with throughout.
        plain = probs.layout is torch.strided and probs.dtype in (
            torch.float32, torch.float16, torch.bfloat16, torch.float64,
        )  # fmt: skip
        return probs if plain and probs.shape == shape else None
    except Exception:  # anything at all may have been given
        return None


def _check_values(drafts: Drafts, faults: list[tuple[int, Fault]]) -> None:
    """Empty drafts whose probabilities are none, or say that a drawn token could not be."""
    assert drafts.probs is not None
    probs = list(drafts.probs)
    tokens: dict[torch.device, torch.Tensor] = {}
    verdicts = [None if p is None else _verdict(p, drafts.tokens, i, tokens) for i, p in enumerate(probs)]
    for i, good in enumerate(_read_all(verdicts)):
        if good is False:
            drafts.counts[i], probs[i] = 0, None
            faults.append((i, Fault.WRONG_PROBABILITIES))
    drafts.probs = probs if any(p is not None for p in probs) else None


def _verdict(
    probs: torch.Tensor, all_tokens: IntArray, i: int, on_device: dict[torch.device, torch.Tensor]
) -> torch.Tensor | bool:
    import torch

    try:
        if probs.device not in on_device:
            on_device[probs.device] = torch.as_tensor(all_tokens, dtype=torch.int64, device=probs.device)
        drawn = probs.gather(1, on_device[probs.device][i, : len(probs), None])
        sums = probs.sum(-1, dtype=torch.float32)
        # Comparisons that NaN and infinity fail too.
        return (sums - 1).abs().le(SUM_TOLERANCE).all() & probs.ge(0).all() & drawn.gt(0).all()
    except Exception:  # of a kind of tensor that cannot be computed with
        return False


def _read_all(verdicts: list[torch.Tensor | bool | None]) -> list[bool | None]:
    """Copy verdicts from their device, waiting for it once where they are all on one."""
    import torch

    try:
        there = [v for v in verdicts if isinstance(v, torch.Tensor)]
        known = iter(torch.stack(there).tolist() if there else [])
        return [next(known) if isinstance(v, torch.Tensor) else v for v in verdicts]
    except Exception:  # several devices, or one that cannot be read
        return [_read(v) for v in verdicts]


def _read(verdict: torch.Tensor | bool | None) -> bool | None:
    try:
        return None if verdict is None else bool(verdict)
    except Exception:
        return False
