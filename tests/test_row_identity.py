"""Requests known again by their tokens, where vLLM tells no ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from spec_plugins.adapters.vllm.row_identity import RowIdentity

Rows = dict[int, list[int]]


def names(identity: RowIdentity, rows: Rows, new: dict[int, int]) -> dict[int, str]:
    """Names by row; ``new`` tokens came to each row in this step."""
    token_ids = np.zeros((8, 64), np.int32)
    for row, tokens in rows.items():
        token_ids[row, : len(tokens)] = tokens
    order = np.array(list(rows), np.int32)
    lengths = np.array([len(rows[r]) for r in rows], np.int32)
    before = lengths - np.array([new[r] for r in rows], np.int32)
    return dict(zip(rows, identity.names(order, before, lengths, token_ids), strict=True))


def test_a_request_keeps_its_name_when_its_row_moves() -> None:
    identity = RowIdentity()
    first = names(identity, {0: [1, 2, 3], 1: [4, 5, 6]}, {0: 1, 1: 1})
    second = names(identity, {0: [4, 5, 6, 7], 1: [1, 2, 3, 9, 9]}, {0: 1, 1: 2})
    assert second == {0: first[1], 1: first[0]}


def test_another_request_in_the_same_row_is_new() -> None:
    identity = RowIdentity()
    first = names(identity, {0: [1, 2, 3]}, {0: 1})
    second = names(identity, {0: [8, 8, 8, 8]}, {0: 1})
    assert second[0] != first[0]


def test_requests_that_are_alike_are_told_apart_by_their_rows() -> None:
    identity = RowIdentity()
    first = names(identity, {0: [1, 2, 3], 1: [1, 2, 3]}, {0: 1, 1: 1})
    assert first[0] != first[1]
    second = names(identity, {0: [1, 2, 3, 4], 1: [1, 2, 3, 5]}, {0: 1, 1: 1})
    assert second == first


def test_nothing_is_kept_of_requests_that_left() -> None:
    identity = RowIdentity()
    names(identity, {row: [row, 1] for row in range(8)}, dict.fromkeys(range(8), 1))
    names(identity, {0: [0, 1, 2]}, {0: 1})
    kept: Any = identity._ended
    assert len(kept) == 1
