"""One proposer, unchanged, is shown the same and drafts the same in every engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import recording
from conftest import ENGINES, Recorded
from questions import ALONE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Record = Callable[[str], Recorded]
CACHED = ("suffix, cache", "suffix, cache, tree")
"""What they draft depends on which answers came before, which in a batch is the engine's choice."""
OWN_WAYS = {
    "vllm": {
        "suffix, cache, tree", "lookahead", "verified", "predictions", "suffix, cache", "eagle3, tree",
        "medusa, tree",
    }
}  # fmt: skip
"""vLLM verifies no trees and tells no predictions. It asks once more after a request's last token, so that a
cache of answers has a few tokens more."""
STATEFUL = ("eagle", "eagle3", "eagle3, tree")
"""What they draft depends on states that no engine shows of a prefix that it had in its cache."""
pairs = pytest.mark.parametrize(("one", "other"), [("transformers", "vllm"), ("transformers", "sglang")])


def different(one: Recorded, other: Recorded, name: str) -> list[tuple[int, ...]]:
    """Histories that both saw, and after which one proposer drafted differently."""
    found = []
    for tokens in one.seen.keys() & other.seen.keys():
        a, b = one.seen[tokens], other.seen[tokens]
        alone = list(tokens[: a["prompt"]]) in ALONE
        if name in STATEFUL and not (a["complete"] and b["complete"]):
            continue
        if a["drafts"][name] != b["drafts"][name] and (alone or name not in CACHED):
            found.append(tokens)
    return found


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
    assert all(min(ours[tokens]["room"]) == min(theirs[tokens]["room"]) for tokens in both)
    for name in recording.PARTS.keys() - OWN_WAYS.get(other, set()):
        assert different(record(one), record(other), name) == [], name
    complete = [tokens for tokens in both if ours[tokens]["complete"] and theirs[tokens]["complete"]]
    assert len(complete) > 100


def test_drafts_that_an_engine_has_its_own_way_with_are_told_apart(record: Record) -> None:
    """The control: the comparison finds what is known to differ."""
    for name in OWN_WAYS["vllm"] & recording.PARTS.keys():
        assert different(record("transformers"), record("vllm"), name), name


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


@pairs
@pytest.mark.parametrize("kind", ["last layer", "layers"])
def test_the_same_hidden_states_are_shown(record: Record, one: str, other: str, kind: str) -> None:
    """At the newest positions; how far back they go depends on the prefix cache."""
    ours, theirs = record(one).seen, record(other).seen
    for tokens in ours.keys() & theirs.keys():
        a, b = np.array(ours[tokens][kind]), np.array(theirs[tokens][kind])
        both = min(len(a), len(b))
        assert both > 0
        assert np.allclose(a[-both:], b[-both:], atol=1e-4), (tokens, kind)
        assert both == 1 or not np.allclose(a[-both:-1], b[1 - both :], atol=1e-2), (
            "the control: a position off"
        )
