"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_plugins import ConfigError, Step, Target
from spec_plugins.proposers.ngram import NgramProposer
from spec_plugins.registry import registry


def make(**options: Any) -> NgramProposer:
    proposer = NgramProposer(**options)
    proposer.load(Target(1000, 4096, 8, num_speculative_tokens=8, max_draft_nodes=8))
    return proposer


def step(
    texts: dict[str, list[int]], seen: dict[str, int] | None = None, budget: int = 6, depth: int = 6
) -> Step:
    """Every text a request; ``seen`` says how much of it was shown before."""
    n = len(texts)
    width = max(map(len, texts.values())) + 3
    token_ids = np.full((n, width), -7, np.int32)
    # Rows out of order, since they move between steps.
    rows = np.arange(n, dtype=np.int32)[::-1].copy()
    lengths = np.array([len(t) for t in texts.values()], np.int32)
    for row, text in zip(rows, texts.values(), strict=True):
        token_ids[row, : len(text)] = text
    shown = np.array([(seen or {}).get(r, 0) for r in texts], np.int32)
    full = np.full(n, 1, np.int32)
    return Step(
        list(texts), token_ids, rows, lengths, lengths - shown, full * budget, full * depth, lengths
    )  # fmt: skip


def looked_up(text: list[int], k: int, shortest: int, longest: int, frequent: bool) -> list[int]:
    """The slow way: all earlier places of the longest n-gram, the most recent or most frequent next token."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        places = [p for p in range(n, len(text)) if text[p - n : p] == text[-n:]]
        if not places:
            continue
        at = places[-1]
        if frequent:
            nexts = [text[p] for p in places]
            most = max(map(nexts.count, nexts))
            # Of equally frequent ones, the one that got there last.
            at = next(p for p in reversed(places) if nexts.count(text[p]) == most)
        draft: list[int] = []
        while len(draft) < k:
            draft.append(([*text, *draft])[at + len(draft)])
        return draft
    return []


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 8))
def test_most_recent_of_the_longest(text: list[int], shortest: int, more: int, k: int) -> None:
    proposer = make(min_ngram=shortest, max_ngram=shortest + more)
    (draft,) = proposer.propose(step({"a": text}, budget=k, depth=9))
    assert draft.tokens.tolist() == looked_up(text, k, shortest, shortest + more, frequent=False)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 3))
def test_most_frequent(text: list[int], longest: int) -> None:
    proposer = make(max_ngram=longest, prefer="most_frequent")
    (draft,) = proposer.propose(step({"a": text}))
    assert draft.tokens.tolist() == looked_up(text, 6, 1, longest, frequent=True)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), TEXTS, min_size=1),
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=5)), max_size=12),
    st.booleans(),
)
def test_growing_texts_equal_whole_ones(
    texts: dict[str, list[int]], additions: list[tuple[str, list[int]]], frequent: bool
) -> None:
    prefer = "most_frequent" if frequent else "most_recent"
    proposer = make(prefer=prefer)
    seen: dict[str, int] = {}
    for name, more in [("a", []), *additions]:
        texts[name] = [*texts.get(name, [1]), *more]
        proposer.propose(step(texts, seen))
        seen = {r: len(t) for r, t in texts.items()}
    # What a step says is fresh is already known; only the answer counts.
    again = [d.tokens.tolist() for d in proposer.propose(step(texts, seen))]
    whole = [d.tokens.tolist() for d in make(prefer=prefer).propose(step(texts))]
    assert again == whole


def test_tokens_taken_back_are_forgotten() -> None:
    proposer = make()
    proposer.propose(step({"a": [1, 2, 3, 4, 5, 1, 2]}))
    text = [1, 2, 9, 9, 1]
    (draft,) = proposer.propose(step({"a": text}))  # all of it is fresh: the driver saw it shrink
    assert draft.tokens.tolist() == looked_up(text, 6, 1, 4, frequent=False)


def test_budget_zero_takes_in_and_drafts_nothing() -> None:
    proposer = make()
    (draft,) = proposer.propose(step({"a": [1, 2, 1]}, budget=0))
    assert not len(draft)
    (draft,) = proposer.propose(step({"a": [1, 2, 1]}, {"a": 3}, depth=3))
    assert draft.tokens.tolist() == [2, 1, 2]


def test_long_texts_grow_their_index() -> None:
    proposer = make()
    text = np.random.default_rng(0).integers(0, 50, 5000).tolist()
    for end in range(100, 5000, 100):
        (draft,) = proposer.propose(step({"a": text[:end]}, {"a": end - 100} if end > 100 else None))
        assert draft.tokens.tolist() == looked_up(text[:end], 6, 1, 4, frequent=False)


def test_extreme_tokens() -> None:
    text = [2**31 - 1, 0, 2**31 - 1, 0, 5, 2**31 - 1, 0]
    (draft,) = make().propose(step({"a": text}))
    assert draft.tokens.tolist() == looked_up(text, 6, 1, 4, frequent=False)


def test_memory_is_given_back() -> None:
    proposer = make()
    proposer.propose(step({"a": [1, 2], "b": [1]}))
    assert proposer.gauges()["requests"] == 2
    for name in ("a", "b", "b", "never seen"):
        proposer.finish(name)
    assert proposer.gauges() == {"requests": 0, "index_bytes": 0}


def test_impossible_options() -> None:
    with pytest.raises(ConfigError, match="min_ngram 5 is more than max_ngram 2"):
        registry().create("ngram", {"min_ngram": 5, "max_ngram": 2})
    with pytest.raises(ConfigError, match=r"options.max_ngram: 99 is out of range; set it to at most 16"):
        registry().create("ngram", {"max_ngram": 99})


def test_indexes_are_found_again_whatever_happened_between_steps() -> None:
    proposer, texts = make(), {"a": [1, 2, 3, 1, 2], "b": [4, 5, 4]}
    seen = dict.fromkeys(texts, 0)
    for turn in range(200):
        if turn % 7 == 5:
            proposer.finish("a")
            seen["a"] = 0
        if turn % 11 == 9:
            texts = dict(reversed(texts.items()))
        if turn == 100:
            texts["b"] = [*texts["b"], *range(3000)]  # more than its index has room for
        drafts = proposer.propose(step(texts, seen))
        for text, draft in zip(texts.values(), drafts, strict=True):
            assert draft.tokens.tolist() == looked_up(text, 6, 1, 4, frequent=False)
        seen = {r: len(text) for r, text in texts.items()}
        texts = {r: [*text, (turn * turn + len(text)) % 5] for r, text in texts.items()}
    assert proposer.gauges()["requests"] == 2
