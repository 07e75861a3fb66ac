"""One proposer, unchanged, is shown the same and drafts the same in every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import ENGINES, Recorded
from questions import ALONE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Record = Callable[[str], Recorded]
CACHED = ("suffix, cache", "suffix, cache, tree")
"""What they draft depends on which answers came before, which in a batch is the engine's choice."""
OWN_WAYS = {"vllm": {"suffix, cache, tree", "lookahead", "verified", "predictions", "suffix, cache"}}
"""vLLM verifies no trees and tells no predictions. It asks once more after a request's last token, so that a
cache of answers has a few tokens more."""
pairs = pytest.mark.parametrize(("one", "other"), [("transformers", "vllm"), ("transformers", "sglang")])


def alone(tokens: tuple[int, ...]) -> bool:
    """Whether the request was asked alone."""
    return any(tokens[: len(p)] == tuple(p) for p in ALONE) and tokens not in map(tuple, ALONE)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_drafted_and_were_accepted(record: Record, engine: str) -> None:
    found = record(engine)
    assert all(len(answer) == 40 for batch in found.answers for answer in batch)
    drafts = [line["drafts"] for line in found.seen.values()]
    for name in drafts[0]:
        assert sum(bool(d[name][0]) for d in drafts) > len(drafts) // 4, name
    accepted = sum(line["fresh"] - 1 for line in found.seen.values() if line["fresh"] < line["prompt"])
    assert accepted > 100


@pairs
def test_answers_are_the_same(record: Record, one: str, other: str) -> None:
    assert record(one).answers == record(other).answers


@pairs
def test_the_same_drafts_for_the_same_history(record: Record, one: str, other: str) -> None:
    ours, theirs = record(one).seen, record(other).seen
    both = ours.keys() & theirs.keys()
    assert len(both) > 0.9 * max(len(ours), len(theirs))
    for tokens in both:
        a, b = ours[tokens], theirs[tokens]
        assert min(a["room"]) == min(b["room"])
        for name, draft in a["drafts"].items():
            if name not in OWN_WAYS.get(other, ()) and (alone(tokens) or name not in CACHED):
                assert draft == b["drafts"][name], (name, tokens)


@pairs
@pytest.mark.parametrize("shown", ["fresh", "prompt", "temperature", "verified", "predictions"])
def test_the_same_is_shown(record: Record, one: str, other: str, shown: str) -> None:
    if shown in OWN_WAYS.get(other, ()):
        assert all(line[shown] is None for line in record(other).seen.values())
        return
    ours, theirs = record(one).seen, record(other).seen
    different = {
        tokens: (ours[tokens][shown], theirs[tokens][shown])
        for tokens in ours.keys() & theirs.keys()
        if ours[tokens][shown] != theirs[tokens][shown]
    }
    assert different == {}
