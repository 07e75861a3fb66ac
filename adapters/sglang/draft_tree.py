"""Drafts in the form of SGLang's tree verifier."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import Drafts, IntArray
from spec_plugins.trees import chain_parents

__all__ = ["accepted_paths", "verify_arrays"]

Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def verify_arrays(drafts: Drafts, last_tokens: IntArray, width: int) -> tuple[Tokens, Mask]:
    """Pad a batch of drafts to one width, the last committed token in column 0.

    SGLang derives parents from the mask, and so the walk of its verifier: a slot that attends to no other
    hangs on nothing, and is never reached. Padding is that.

    Args:
        drafts: ``n`` chains or trees of at most ``width - 1`` nodes.
        last_tokens: ``[n]``.
        width: slots a request.

    Returns:
        Token ids ``[n * width]`` and ancestor-or-self mask ``[n * width * width]``. O(n · width²), compiled.
    """
    n = len(drafts)
    parents = chain_parents(*drafts.tokens.shape) if drafts.parents is None else drafts.parents
    tokens, mask = np.empty((n, width), np.int64), np.zeros((n, width, width), np.bool_)
    _fill(drafts.tokens, np.ascontiguousarray(parents), drafts.counts, last_tokens, tokens, mask)
    return tokens.reshape(-1), mask.reshape(-1)


@numba.njit(cache=True)
def _fill(
    drafted: IntArray, parents: IntArray, counts: IntArray, last_tokens: IntArray, tokens: Tokens, mask: Mask
) -> None:
    n, width = tokens.shape
    for i in range(n):
        tokens[i, :] = last_tokens[i]
        mask[i, 0, 0] = True
        for j in range(1, width):
            mask[i, j, j] = True
        for j in range(counts[i]):
            tokens[i, j + 1] = drafted[i, j]
            p = parents[i, j] + 1
            for a in range(p + 1):
                mask[i, j + 1, a] = mask[i, p, a]


def accepted_paths(drafts: Drafts, committed: IntArray, accepted: IntArray) -> IntArray:
    """Which nodes were accepted, found by their tokens, since siblings differ.

    Args:
        drafts: ``n`` of them.
        committed: ``[n, width]``: the tokens that a step committed, accepted ones first.
        accepted: ``[n]``.

    Returns:
        ``[n, width]`` nodes from the root down, then -1. O(nodes), compiled.
    """
    parents = chain_parents(*drafts.tokens.shape) if drafts.parents is None else drafts.parents
    paths = np.full(committed.shape, -1, np.int32)
    _walk(drafts.tokens, np.ascontiguousarray(parents), drafts.counts, committed, accepted, paths)
    return paths


@numba.njit(cache=True)
def _walk(
    tokens: IntArray,
    parents: IntArray,
    counts: IntArray,
    committed: IntArray,
    accepted: IntArray,
    paths: IntArray,
) -> None:
    for i in range(len(counts)):
        at, depth = -1, 0
        for j in range(counts[i]):
            if depth == accepted[i]:
                break
            if parents[i, j] == at and tokens[i, j] == committed[i, depth]:
                paths[i, depth] = j
                at = j
                depth += 1
