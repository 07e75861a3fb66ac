"""Checks drafts before an engine sees them. A bad draft is emptied, a long one cut; nothing raises."""

from __future__ import annotations

import enum
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
    Fault.RAISED,
    Fault.TOKEN_OUT_OF_RANGE,
    Fault.WRONG_PARENTS,
    Fault.DUPLICATE_SIBLINGS,
    Fault.OVER_BUDGET,
]


@numba.njit(cache=True)
def _check_chains(
    tokens: IntArray, counts: IntArray, most: IntArray, vocab_size: int, codes: IntArray
) -> None:
    for i in range(len(counts)):
        if counts[i] > most[i]:
            counts[i] = most[i]
            codes[i] = 4
        for j in range(counts[i]):
            if tokens[i, j] < 0 or tokens[i, j] >= vocab_size:
                counts[i] = 0
                codes[i] = 1
                break


@numba.njit(cache=True)
def _check_trees(
    tokens: IntArray,
    parents: IntArray,
    counts: IntArray,
    budgets: IntArray,
    depths: IntArray,
    vocab_size: int,
    codes: IntArray,
    kept: IntArray,
) -> None:
    """Cuts to budget and depth, keeping parents first; ``kept[i]`` lists the nodes that stay."""
    width = tokens.shape[1]
    depth = np.empty(width, np.int32)
    place = np.empty(width, np.int32)
    for i in range(len(counts)):
        m = 0
        for j in range(counts[i]):
            t, p = tokens[i, j], parents[i, j]
            if t < 0 or t >= vocab_size:
                codes[i] = 1
            elif p < -1 or p >= j:
                codes[i] = 2
            else:
                for k in range(p + 1, j):
                    if parents[i, k] == p and tokens[i, k] == t:
                        codes[i] = 3
            if codes[i] != 0 and codes[i] != 4:
                m = 0
                break
            depth[j] = 1 if p < 0 else depth[p] + 1
            place[j] = -2
            if m < budgets[i] and depth[j] <= depths[i] and (p < 0 or place[p] != -2):
                place[j] = m
                kept[i, m] = j
                m += 1
            else:
                codes[i] = 4
        if m < counts[i]:
            # The list that is read is only ever ahead of the one that is written.
            for a in range(m):
                j = kept[i, a]
                p = parents[i, j]
                tokens[i, a] = tokens[i, j]
                parents[i, a] = -1 if p < 0 else place[p]
        counts[i] = m


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
        of the whole answer. O(nodes), plus O(nodes · vocab_size) for probabilities.
    """
    faults: list[tuple[int, Fault]] = []
    n = len(step)
    packed = _as_packed(drafts, n, faults)
    if packed is None:
        return Drafts.empty(n), faults
    if not trees and packed.parents is not None:
        whole = np.full(n, packed.tokens.shape[1], np.int32)
        faults += _check(packed, whole, whole, vocab_size)
        packed = principal_chains(packed)
    faults += _check(packed, step.budgets, step.depths, vocab_size)
    if packed.probs is not None:
        if not probabilities:
            packed.probs = None
        else:
            _check_probabilities(packed, step, vocab_size, faults)
    return packed, faults


def _check(drafts: Drafts, budgets: IntArray, depths: IntArray, vocab_size: int) -> list[tuple[int, Fault]]:
    n, width = drafts.tokens.shape
    if not width:
        return []
    codes = np.zeros(n, np.int32)
    if drafts.parents is None:
        _check_chains(drafts.tokens, drafts.counts, np.minimum(budgets, depths), vocab_size, codes)
    else:
        kept = np.zeros((n, width), np.int32)
        _check_trees(drafts.tokens, drafts.parents, drafts.counts, budgets, depths, vocab_size, codes, kept)
        if drafts.sources is not None:
            drafts.sources = np.take_along_axis(drafts.sources, kept, axis=1)
        if drafts.probs is not None:
            drafts.probs = [
                None if p is None else _rows(p, kept[i, : drafts.counts[i]])
                for i, p in enumerate(drafts.probs)
            ]
    return [(int(i), _CODES[codes[i]]) for i in np.flatnonzero(codes)]


def _rows(probs: Any, nodes: IntArray) -> Any:
    try:
        return probs[nodes]
    except Exception:  # a wrong shape is reported where shapes are checked
        return probs


def _as_packed(drafts: Sequence[Draft], n: int, faults: list[tuple[int, Fault]]) -> Drafts | None:
    """A private int32 copy, so that checking can cut in place."""
    try:
        if len(drafts) != n:
            faults.append((-1, Fault.WRONG_COUNT))
            return None
        if isinstance(drafts, Drafts) and _well_formed(drafts):
            return Drafts(
                np.array(drafts.tokens, np.int32, order="C"),
                np.array(drafts.counts, np.int32),
                None if drafts.parents is None else np.array(drafts.parents, np.int32, order="C"),
                None if drafts.probs is None else list(drafts.probs),
                drafts.sources,
            )
        return pack([_as_draft(i, draft, faults) for i, draft in enumerate(drafts)])
    except Exception:  # anything at all may have been returned
        faults.append((-1, Fault.NOT_A_DRAFT))
        return None


def _well_formed(d: Drafts) -> bool:
    shape = np.shape(d.tokens)
    return (
        len(shape) == 2
        and all(a is None or np.shape(a) == shape for a in (d.parents, d.sources))
        and np.shape(d.counts) == shape[:1]
        and (d.probs is None or len(d.probs) == shape[0])
        and all(a is None or a.dtype == np.int32 for a in (d.tokens, d.parents, d.counts, d.sources))
        and (not len(d.counts) or (d.counts.min() >= 0 and d.counts.max() <= shape[1]))
    )


_EMPTY = Draft(np.empty(0, np.int32))


def _as_draft(i: int, draft: object, faults: list[tuple[int, Fault]]) -> Draft:
    """One draft with int32 arrays of the right shapes, or an empty one."""
    if not isinstance(draft, Draft):
        faults.append((i, Fault.NOT_A_DRAFT))
        return _EMPTY
    tokens = _as_ints(draft.tokens)
    if tokens is None:
        faults.append((i, Fault.NOT_A_DRAFT))
        return _EMPTY
    parents, sources = None, None
    if draft.parents is not None:
        parents = _as_ints(draft.parents)
        if parents is None or len(parents) != len(tokens):
            faults.append((i, Fault.WRONG_PARENTS))
            return _EMPTY
    if draft.sources is not None:
        sources = _as_ints(draft.sources)
        if sources is None or len(sources) != len(tokens):
            sources = None  # only statistics suffer
    return Draft(tokens, parents, draft.probs if len(tokens) else None, sources)


def _as_ints(values: object) -> IntArray | None:
    array: npt.NDArray[Any] = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        return None
    if array.dtype == np.int32:
        return np.asarray(array, np.int32)
    # Out of int32's range is out of every vocabulary's: keep it so rather than let it wrap.
    return np.clip(array, -2, 2**31 - 1).astype(np.int32)


def _check_probabilities(
    drafts: Drafts, step: Step, vocab_size: int, faults: list[tuple[int, Fault]]
) -> None:
    assert drafts.probs is not None
    checked: list[torch.Tensor | None] = []
    for i, probs in enumerate(drafts.probs):
        n = int(drafts.counts[i])
        if probs is None or not n:
            checked.append(None)
            continue
        good = _good_probabilities(probs, drafts.tokens[i, :n], vocab_size)
        checked.append(good)
        if good is None:
            drafts.counts[i] = 0
            faults.append((i, Fault.WRONG_PROBABILITIES))
    drafts.probs = checked


def _good_probabilities(probs: Any, tokens: IntArray, vocab_size: int) -> torch.Tensor | None:
    import torch

    try:
        probs = torch.as_tensor(probs)[: len(tokens)]
        if probs.shape != (len(tokens), vocab_size) or not probs.is_floating_point():
            return None
        rows = torch.arange(len(tokens), device=probs.device)
        drawn = probs[rows, torch.as_tensor(tokens, dtype=torch.int64, device=probs.device)]
        sums = probs.sum(-1, dtype=torch.float32)
        # One comparison that NaN and infinity fail too, so that a device is waited for once.
        good = (sums - 1).abs().le(SUM_TOLERANCE).all() & probs.ge(0).all() & drawn.gt(0).all()
        return probs if bool(good) else None
    except Exception:  # anything at all may have been given
        return None
