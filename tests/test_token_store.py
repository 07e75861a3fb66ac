"""The token store against a dictionary of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from misbehaving_proposers import ints

from spec_plugins.token_store import TokenStore

operation: st.SearchStrategy[tuple[str, str, list[int]]] = st.one_of(
    st.tuples(st.just("append"), st.sampled_from("abcdef"), st.lists(st.integers(0, 2**31 - 1), max_size=9)),
    st.tuples(st.just("discard"), st.sampled_from("abcdef"), st.just([])),
)


@given(st.lists(operation, max_size=60), st.integers(0, 3), st.integers(0, 5))
def test_it_holds_what_a_dictionary_of_lists_does(
    operations: list[tuple[str, str, list[int]]], rows: int, capacity: int
) -> None:
    store, model = TokenStore(rows, capacity), dict[str, list[int]]()
    for what, request_id, tokens in operations:
        if what == "append":
            store.append(request_id, tokens)
            model.setdefault(request_id, []).extend(tokens)
        else:
            store.discard(request_id)
            model.pop(request_id, None)
        assert len(store) == len(model)
        for r in "abcdef":
            assert (r in store) == (r in model)
            assert store.length(r) == len(model.get(r, []))
        at, lengths = store.rows(list(model))
        assert at.dtype == lengths.dtype == store.token_ids.dtype == np.int32
        for r, row, length in zip(model, at, lengths, strict=True):
            assert store.tokens(r).tolist() == model[r]
            assert store.token_ids[row, :length].tolist() == model[r]


def test_rows_are_used_again() -> None:
    store = TokenStore(rows=2)
    for i in range(100):
        store.append(f"r{i}", [i])
        store.append(f"r{i}", [i + 1])
        assert store.tokens(f"r{i}").tolist() == [i, i + 1]
        store.discard(f"r{i}")
    assert len(store.token_ids) == 2


def test_a_request_that_comes_back_begins_empty() -> None:
    store = TokenStore()
    store.append("a", [1, 2, 3])
    store.discard("a")
    store.discard("a")  # it may be over already
    store.append("a", [])
    assert "a" in store
    assert store.tokens("a").tolist() == []


def test_tokens_are_a_view() -> None:
    store = TokenStore()
    store.append("a", ints(1, 2))
    assert np.shares_memory(store.tokens("a"), store.token_ids)


@pytest.mark.parametrize("tokens", [(1, 2), [1, 2], np.array([1, 2]), np.array([1, 2], np.uint8)])
def test_any_sequence_of_integers_will_do(tokens: list[int]) -> None:
    store = TokenStore()
    store.append("a", tokens)
    assert store.tokens("a").tolist() == [1, 2]


def test_a_bad_append_leaves_nothing_behind() -> None:
    store = TokenStore()
    with pytest.raises(ValueError, match="invalid literal"):
        store.append("a", ["x"])
    assert "a" not in store


def test_growing_copies_a_number_of_times_that_is_logarithmic() -> None:
    store, matrices = TokenStore(rows=1, capacity=1), set[int]()
    for i in range(5000):
        store.append("a", [i])
        matrices.add(store.token_ids.shape[1])
    assert len(matrices) <= 14
    assert store.tokens("a").tolist() == list(range(5000))


def test_an_unknown_request_has_no_tokens_and_no_row() -> None:
    store = TokenStore()
    assert store.length("a") == 0
    with pytest.raises(KeyError):
        store.tokens("a")
    with pytest.raises(KeyError):
        store.rows(["a"])


def test_several_requests_are_written_at_once() -> None:
    store, texts = TokenStore(rows=1, capacity=2), {"a": [1], "b": [2, 3], "c": []}
    for name, text in texts.items():
        store.append(name, text)
    overlaps = [0, 1]  # how many tokens before its end a text is written anew from
    for new in ({"b": [4], "a": [5, 6, 7]}, {"c": []}, {}, {"c": [8] * 9, "a": [7], "b": [9, 1]}):
        rows, lengths = store.rows(list(new))
        starts = np.maximum(lengths - ints(*(overlaps * 2)[: len(new)]), 0)
        ends = starts + ints(*map(len, new.values()))
        store.write(rows, starts, ends, ints(*(t for tokens in new.values() for t in tokens)))
        for (name, tokens), start in zip(new.items(), starts, strict=True):
            texts[name] = texts[name][:start] + tokens
        assert {name: store.tokens(name).tolist() for name in texts} == texts


def test_a_row_of_none_is_passed_over() -> None:
    store = TokenStore(rows=2, capacity=4)
    store.append("a", [1, 2])
    store.append("b", [3])
    rows = store.find(["a", "x", "b"])
    assert rows.tolist() == [*store.rows(["a"])[0], -1, *store.rows(["b"])[0]]
    assert store.lengths(rows).tolist() == [2, 2**31 - 1, 1]
    store.write(ints(rows[0], -1, -1, rows[2]), ints(2, 0, 5, 1), ints(3, 2, 3, 2), ints(4, 9, 9, 5))
    assert (store.tokens("a").tolist(), store.tokens("b").tolist()) == ([1, 2, 4], [3, 5])
    store.append("c", [0] * 9)  # it grows
    assert store.lengths(store.find(["x", "c"])).tolist() == [2**31 - 1, 9]
