"""Drafts in the form of SGLang's verifier, against a plain walk over the nodes."""

from __future__ import annotations

import numpy as np
import pytest

from spec_plugins.adapters.sglang.draft_tree import accepted_paths, verify_arrays
from spec_plugins.proposer import Drafts, IntArray


def random_trees(n: int, width: int, seed: int) -> Drafts:
    """Trees whose siblings differ in their token."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, width + 1, n).astype(np.int32)
    tokens, parents = np.zeros((n, width), np.int32), np.full((n, width), -1, np.int32)
    for i in range(n):
        used: set[tuple[int, int]] = set()
        for j in range(width):
            while True:
                parent, token = int(rng.integers(-1, j)) if j else -1, int(rng.integers(0, 4))
                if (parent, token) not in used or len(used) > 50:
                    break
            used.add((parent, token))
            tokens[i, j], parents[i, j] = token, parent
    return Drafts(tokens, counts, parents)


def ancestors(parents: IntArray, j: int) -> set[int]:
    """Slots that node ``j`` attends to."""
    found = {0}
    while j >= 0:
        found.add(j + 1)
        j = int(parents[j])
    return found


@pytest.mark.parametrize("room", [0, 3])
def test_masks_and_padding(room: int) -> None:
    drafts, last = random_trees(40, 6, 1), np.arange(40, dtype=np.int32) + 50
    width = 7 + room
    tokens, mask = verify_arrays(drafts, last, width)
    assert (tokens.dtype, mask.dtype) == (np.int64, np.bool_)
    for i, (row, seen) in enumerate(zip(tokens.reshape(40, -1), mask.reshape(40, width, width), strict=True)):
        count = int(drafts.counts[i])
        assert row.tolist() == [last[i], *drafts.tokens[i, :count], *[last[i]] * (width - 1 - count)]
        for slot in range(width):
            expected = {slot}  # padding hangs on nothing, so that the verifier never comes to it
            if slot <= count:
                assert drafts.parents is not None
                expected = ancestors(drafts.parents[i], slot - 1)
            assert set(np.flatnonzero(seen[slot])) == expected


def test_chains_need_no_parents() -> None:
    drafts = Drafts(np.array([[7, 8], [9, 0]], np.int32), np.array([2, 1], np.int32))
    tokens, mask = verify_arrays(drafts, np.array([1, 2], np.int32), 3)
    assert tokens.tolist() == [1, 7, 8, 2, 9, 2]
    assert mask.reshape(2, 3, 3).astype(int).tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
    ]


def test_no_drafts_at_all() -> None:
    tokens, mask = verify_arrays(Drafts.empty(2), np.array([5, 6], np.int32), 1)
    assert (tokens.tolist(), mask.tolist()) == ([5, 6], [True, True])


def test_accepted_nodes_are_found_by_their_tokens() -> None:
    drafts = random_trees(200, 6, 2)
    assert drafts.parents is not None
    rng = np.random.default_rng(3)
    committed, accepted = np.full((200, 7), -1, np.int32), np.zeros(200, np.int32)
    expected = np.full((200, 7), -1, np.int32)
    for i in range(200):
        at = -1
        while True:
            children = [j for j in range(drafts.counts[i]) if drafts.parents[i, j] == at]
            if not children or rng.random() < 0.2:
                break
            token = drafts.tokens[i, rng.choice(children)]
            at = next(j for j in children if drafts.tokens[i, j] == token)
            committed[i, accepted[i]], expected[i, accepted[i]] = token, at
            accepted[i] += 1
        committed[i, accepted[i]] = 77  # the target's own
    assert accepted.max() > 2
    assert accepted_paths(drafts, committed, accepted).tolist() == expected.tolist()
