"""Tree geometry against slow and plain versions of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from misbehaving_proposers import ints

from spec_plugins.proposer import Draft, Drafts
from spec_plugins.trees import ancestor_masks, chain_parents, merge, node_depths, pack, principal_chains

Tree = list[tuple[int, int]]
"""``(token, parent)`` of each node, parents first."""
Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, most: int = 12, tokens: int = 4) -> Tree:
    """Trees in which siblings may be alike."""
    n = draw(st.integers(0, most))
    return [(draw(st.integers(0, tokens - 1)), draw(st.integers(-1, j - 1))) for j in range(n)]


batches = st.lists(trees(), max_size=4)


def batch(forest: list[Tree], spare: int = 2) -> tuple[Any, Any, Any]:
    """Tokens, parents and counts, with nonsense past the counts."""
    width = max(map(len, forest), default=0) + spare
    tokens = np.full((len(forest), width), -77, np.int32)
    parents = np.full((len(forest), width), 99, np.int32)
    for i, tree in enumerate(forest):
        for j, (token, parent) in enumerate(tree):
            tokens[i, j], parents[i, j] = token, parent
    return tokens, parents, ints(*map(len, forest))


def ancestors(tree: Tree, j: int) -> list[int]:
    """A node and those above it, from the root down."""
    above = [j]
    while tree[above[0]][1] >= 0:
        above.insert(0, tree[above[0]][1])
    return above


def path(tree: Tree, j: int) -> Path:
    return tuple(tree[k][0] for k in ancestors(tree, j))


@given(batches)
def test_node_depths(forest: list[Tree]) -> None:
    _, parents, counts = batch(forest)
    depths = node_depths(parents, counts)
    for i, tree in enumerate(forest):
        expected = [len(ancestors(tree, j)) for j in range(len(tree))]
        assert depths[i].tolist() == expected + [0] * (depths.shape[1] - len(tree))


@given(batches)
def test_ancestor_masks(forest: list[Tree]) -> None:
    _, parents, counts = batch(forest)
    masks = ancestor_masks(parents, counts)
    assert masks.shape == (len(forest), parents.shape[1] + 1, parents.shape[1] + 1)
    for i, tree in enumerate(forest):
        for slot in range(masks.shape[1]):
            node = slot - 1
            above = ancestors(tree, node) if 0 <= node < len(tree) else [node] if slot else []
            assert set(np.flatnonzero(masks[i, slot])) == {0, *(k + 1 for k in above)}


@given(batches)
def test_principal_chains(forest: list[Tree]) -> None:
    tokens, parents, counts = batch(forest)
    sources = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
    probs: Any = [None if i % 2 else np.arange(len(t)) for i, t in enumerate(forest)]
    chains = principal_chains(Drafts(tokens, counts, parents, probs, sources))
    assert chains.parents is None
    assert chains.sources is not None
    for i, tree in enumerate(forest):
        nodes: list[int] = []
        while True:
            at = nodes[-1] if nodes else -1
            children = [j for j, (_, p) in enumerate(tree) if p == at]
            if not children:
                break
            nodes.append(children[0])
        draft = chains[i]
        assert draft.tokens.tolist() == [tree[j][0] for j in nodes]
        assert draft.sources is not None
        assert draft.sources.tolist() == [sources[i, j] for j in nodes]
        assert draft.probs is None if i % 2 else draft.probs.tolist() == nodes  # type: ignore[union-attr]


def test_a_chain_is_its_own_principal_chain() -> None:
    chain = Drafts(ints(1, 2)[None], ints(2))
    assert principal_chains(chain) is chain


@given(st.lists(trees(), max_size=4), st.integers(0, 20))
def test_merge(forest: list[Tree], budget: int) -> None:
    tokens: list[int] = []
    parents: list[int] = []
    for tree in forest:
        start = len(tokens)
        tokens += [t for t, _ in tree]
        parents += [p if p < 0 else p + start for _, p in tree]
    labels = list(range(len(tokens)))
    merged = merge(ints(*tokens), ints(*parents), ints(*labels), budget)

    # The nodes that stay, as paths, in the order in which they first come.
    whole: Tree = list(zip(tokens, parents, strict=True))
    kept: dict[Path, int] = {}
    for j in range(len(whole)):
        p = path(whole, j)
        if p not in kept and len(kept) < budget and (len(p) == 1 or p[:-1] in kept):
            kept[p] = j
    order = list(kept)
    assert merged[0].tolist() == [p[-1] for p in order]
    assert merged[1].tolist() == [order.index(p[:-1]) if len(p) > 1 else -1 for p in order]
    assert merged[2].tolist() == list(kept.values())
    assert all(a.dtype == np.int32 for a in merged)


def test_merging_shares_beginnings_and_keeps_the_first_label() -> None:
    tokens, parents = ints(1, 2, 3, 1, 2, 4, 5), ints(-1, 0, 1, -1, 3, 4, -1)
    merged = merge(tokens, parents, ints(0, 0, 0, 1, 1, 1, 2), 10)
    assert [a.tolist() for a in merged] == [[1, 2, 3, 4, 5], [-1, 0, 1, 1, -1], [0, 0, 0, 1, 2]]


def test_chain_parents() -> None:
    assert chain_parents(2, 3).tolist() == [[-1, 0, 1]] * 2
    assert chain_parents(0, 3).shape == (0, 3)
    assert chain_parents(2, 0).shape == (2, 0)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=5), st.booleans(), st.booleans(), st.booleans()),
        max_size=5,
    )
)
def test_pack_is_undone_by_reading(given_drafts: list[tuple[list[int], bool, bool, bool]]) -> None:
    drafts = []
    for tokens, tree, sourced, sampled in given_drafts:
        n = len(tokens)
        drafts.append(
            Draft(
                ints(*tokens),
                np.full(n, -1, np.int32) if tree else None,
                np.arange(n, dtype=np.int32) if sampled else None,  # type: ignore[arg-type]
                np.full(n, 7, np.int32) if sourced else None,
            )
        )
    packed = pack(drafts)
    assert len(packed) == len(drafts)
    assert packed.tokens.dtype == packed.counts.dtype == np.int32
    for before, after in zip(drafts, packed, strict=True):
        assert after.tokens.tolist() == before.tokens.tolist()
        assert not np.shares_memory(after.tokens, before.tokens)
        if before.parents is not None:
            assert after.parents is not None
            assert after.parents.tolist() == before.parents.tolist()
        elif after.parents is not None:  # another of the batch is a tree
            assert after.parents.tolist() == list(range(-1, len(before) - 1))
        if before.sources is not None:
            assert after.sources is not None
            assert after.sources.tolist() == before.sources.tolist()
        assert after.probs is before.probs


def test_packing_nothing() -> None:
    assert len(pack([])) == 0
    assert pack([Draft(ints())]).tokens.shape == (1, 0)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_empty_batches(width: int) -> None:
    nothing, none = np.empty((0, width), np.int32), np.empty(0, np.int32)
    assert node_depths(nothing, none).shape == (0, width)
    assert ancestor_masks(nothing, none).shape == (0, width + 1, width + 1)
    assert len(principal_chains(Drafts(nothing, none, nothing))) == 0
