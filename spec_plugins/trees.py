"""Geometry of draft trees in packed form, compiled.

A batch of trees is ``parents [n, width]`` with ``counts [n]``: node ``j`` of request ``i`` hangs on
node ``parents[i, j] < j``, or on the last committed token where that is ``-1``. Functions that speak
of *slots* count that token as slot 0 and draft node ``j`` as slot ``j + 1``: the layout in which a
host feeds the target. A chain is ``parents[i, j] == j - 1``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import Draft, Drafts, IntArray

if TYPE_CHECKING:
    import torch

__all__ = [
    "USUAL_NODES",
    "ancestor_masks",
    "chain_parents",
    "merge",
    "node_depths",
    "pack",
    "principal_chains",
    "sparse_tree",
    "spread",
]


USUAL_NODES = 24
"""Draft tokens of a tree, where nothing is said."""


def chain_parents(n: int, width: int) -> IntArray:
    """Parents of ``n`` chains, ``[n, width]``; a broadcast view."""
    return np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), (n, width))


@numba.njit(cache=True)
def node_depths(parents: IntArray, counts: IntArray) -> IntArray:
    """Depth of every node, ``[n, width]``: 1 right after the last committed token, 0 where unused."""
    n, width = parents.shape
    depths = np.zeros((n, width), np.int32)
    for i in range(n):
        for j in range(counts[i]):
            p = parents[i, j]
            depths[i, j] = 1 if p < 0 else depths[i, p] + 1
    return depths


@numba.njit(cache=True)
def ancestor_masks(parents: IntArray, counts: IntArray) -> npt.NDArray[np.bool_]:
    """``[n, width + 1, width + 1]`` over slots: True where a slot may attend to another, which is its
    ancestors and itself. Unused slots attend to slot 0 and themselves, so that no softmax is empty.
    """
    n, width = parents.shape
    mask = np.zeros((n, width + 1, width + 1), np.bool_)
    for i in range(n):
        mask[i, 0, 0] = True
        for j in range(width):
            if j < counts[i]:
                p = parents[i, j] + 1
                for a in range(p + 1):
                    mask[i, j + 1, a] = mask[i, p, a]
            else:
                mask[i, j + 1, 0] = True
            mask[i, j + 1, j + 1] = True
    return mask


@numba.njit(cache=True)
def _principal_chains(
    tokens: IntArray, parents: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    n, width = parents.shape
    out = np.zeros((n, width), np.int32)
    nodes = np.zeros((n, width), np.int32)
    lengths = np.zeros(n, np.int32)
    for i in range(n):
        at, m = -1, 0
        for j in range(counts[i]):
            if parents[i, j] == at:
                out[i, m] = tokens[i, j]
                nodes[i, m] = j
                at = j
                m += 1
        lengths[i] = m
    return out, nodes, lengths


def principal_chains(drafts: Drafts) -> Drafts:
    """Reduce trees to chains: follow each node's first child, the best by the contract. O(nodes)."""
    if drafts.parents is None:
        return drafts
    tokens, nodes, lengths = _principal_chains(drafts.tokens, drafts.parents, drafts.counts)
    probs = drafts.probs
    if probs is not None:
        probs = [None if p is None else p[nodes[i, : lengths[i]]] for i, p in enumerate(probs)]
    sources = drafts.sources
    if sources is not None:
        sources = np.take_along_axis(sources, nodes, axis=1)
    return Drafts(tokens, lengths, None, probs, sources)


def spread(drafts: Drafts, rows: Sequence[int], n: int) -> Drafts:
    """Drafts of some requests as those of all ``n``: ``drafts[j]`` is that of request ``rows[j]``."""
    if list(rows) == list(range(n)):
        return drafts
    at = np.asarray(rows, np.int64)

    def over_all(values: IntArray) -> IntArray:
        out = np.zeros((n, *values.shape[1:]), np.int32)
        out[at] = values
        return out

    probs: list[torch.Tensor | None] | None = None
    if drafts.probs is not None:
        probs = [None] * n
        for row, p in zip(rows, drafts.probs, strict=True):
            probs[row] = p
    return Drafts(
        over_all(drafts.tokens),
        over_all(drafts.counts),
        None if drafts.parents is None else over_all(drafts.parents),
        probs,
        None if drafts.sources is None else over_all(drafts.sources),
    )


def pack(drafts: list[Draft]) -> Drafts:
    """Pack well-formed drafts; copies each once."""
    n = len(drafts)
    lengths = [len(d.tokens) for d in drafts]
    width = max(lengths, default=0)
    tokens = np.zeros((n, width), np.int32)
    for i, d in enumerate(drafts):
        tokens[i, : lengths[i]] = d.tokens
    parents = sources = None
    if any(d.parents is not None for d in drafts):
        parents = chain_parents(n, width).copy()
        for i, d in enumerate(drafts):
            if d.parents is not None:
                parents[i, : lengths[i]] = d.parents
    if any(d.sources is not None for d in drafts):
        sources = np.zeros((n, width), np.int32)
        for i, d in enumerate(drafts):
            if d.sources is not None:
                sources[i, : lengths[i]] = d.sources
    probs = [d.probs for d in drafts] if any(d.probs is not None for d in drafts) else None
    return Drafts(tokens, np.array(lengths, np.int32), parents, probs, sources)


@numba.njit(cache=True)
def merge(
    tokens: IntArray, parents: IntArray, labels: IntArray, budget: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Merge a forest into one tree: nodes with the same path from the root become one.

    Args:
        tokens: ``[n]`` node tokens of all drafts one after the other, best draft first.
        parents: ``[n]`` parents as indices into ``tokens``; a parent stands before its children.
        labels: ``[n]`` carried along; a shared node keeps its first.
        budget: most nodes to keep, first come first served.

    Returns:
        Tokens, parents and labels of the merged tree. O(n · siblings).
    """
    n = len(tokens)
    out_tokens = np.empty(min(n, budget), np.int32)
    out_parents = np.empty(min(n, budget), np.int32)
    out_labels = np.empty(min(n, budget), np.int32)
    place = np.full(n, -2, np.int32)
    m = 0
    for j in range(n):
        parent = -1 if parents[j] < 0 else place[parents[j]]
        if parent == -2:
            continue
        for k in range(parent + 1, m):
            if out_parents[k] == parent and out_tokens[k] == tokens[j]:
                place[j] = k
                break
        else:
            if m < budget:
                out_tokens[m], out_parents[m], out_labels[m] = tokens[j], parent, labels[j]
                place[j] = m
                m += 1
    return out_tokens[:m], out_parents[:m], out_labels[:m]


def sparse_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    """The tree of so many nodes that is accepted furthest, if heads are right independently of each other.

    Args:
        accuracies: for each head, how often its first, second, … guess is right.
        nodes: how many; fewer where there are no more.

    Returns:
        Each node's parent, head and rank of its guess, ``[n]`` int32, most useful first; parents before
        children, better siblings before worse. O(nodes · log nodes).
    """
    parents: list[int] = []
    heads: list[int] = []
    ranks: list[int] = []
    waiting: list[tuple[float, int, int, int]] = [(-accuracies[0][0], -1, 0, 0)] if accuracies else []
    while waiting and len(parents) < nodes:
        score, parent, head, rank = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        heads.append(head)
        ranks.append(rank)
        before = score / accuracies[head][rank] if accuracies[head][rank] else 0.0
        if rank + 1 < len(accuracies[head]):
            heapq.heappush(waiting, (before * accuracies[head][rank + 1], parent, head, rank + 1))
        if head + 1 < len(accuracies):
            heapq.heappush(waiting, (score * accuracies[head + 1][0], node, head + 1, 0))
    return np.array(parents, np.int32), np.array(heads, np.int32), np.array(ranks, np.int32)
