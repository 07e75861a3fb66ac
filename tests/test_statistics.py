"""Figures of drafting, against counting by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_plugins.statistics import KEEP_FINISHED, RequestStatistics, Statistics
from spec_plugins.validation import Fault

POSITIONS = 5

entry = st.tuples(
    st.sampled_from("abcd"), st.integers(0, POSITIONS), st.integers(0, 3), st.integers(-1, POSITIONS)
)


@given(st.lists(st.lists(entry, max_size=4, unique_by=lambda e: e[0]), max_size=10))
def test_counts_add_up(steps: list[list[tuple[str, int, int, int]]]) -> None:
    statistics = Statistics(POSITIONS)
    verified: list[tuple[str, int, int, int]] = []
    decoded: list[str] = []
    for step in steps:
        # As the driver has it: no more accepted than deep, no more deep than nodes, nothing of a prefill.
        rows = []
        for request_id, depth, more, accepted in step:
            nodes = depth + more if depth else 0
            rows.append((request_id, depth, nodes, min(accepted, depth)))
        ids, depths, nodes_, accepted_ = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        sums = statistics.count(ids, depths, nodes_, accepted_)
        now = [r for r in rows if r[3] >= 0]
        assert sums == (sum(r[2] for r in now), sum(r[3] for r in now))
        decoded += [r[0] for r in now]
        verified += [r for r in now if r[2]]

    assert statistics.verify_steps == len(decoded)
    assert statistics.drafts == len(verified)
    assert statistics.draft_tokens == sum(nodes for _, _, nodes, _ in verified)
    assert statistics.accepted_tokens == sum(accepted for *_, accepted in verified)
    drafted = [sum(depth > p for _, depth, _, _ in verified) for p in range(POSITIONS)]
    taken = [sum(a > p for *_, a in verified) for p in range(POSITIONS)]
    assert statistics.drafted_by_position.tolist() == drafted
    assert statistics.accepted_by_position.tolist() == taken
    assert statistics.acceptance_by_position == [a / d for a, d in zip(taken, drafted, strict=True) if d]
    for request_id in "abcd":
        figures = statistics.request(request_id)
        mine = [v for v in verified if v[0] == request_id]
        if figures is None:
            assert request_id not in decoded
            continue
        assert figures.verify_steps == decoded.count(request_id)
        assert figures.drafts == len(mine)
        assert figures.draft_tokens == sum(nodes for _, _, nodes, _ in mine)
        assert figures.accepted_tokens == sum(a for *_, a in mine)


def test_nothing_yet() -> None:
    statistics = Statistics(3)
    assert statistics.acceptance_length == 1
    assert statistics.acceptance_by_position == []
    assert statistics.drafted_by_position.tolist() == [0, 0, 0]
    assert statistics.request("a") is None
    assert statistics.snapshot()["acceptance_rate"] == 0


def test_finished_requests_are_kept_for_a_while() -> None:
    statistics = Statistics(1)
    for i in range(KEEP_FINISHED + 10):
        statistics.count([f"r{i}"], [1], [1], [1])
        statistics.finish(f"r{i}")
    assert statistics.running == {}
    assert len(statistics.finished) == KEEP_FINISHED
    assert statistics.request("r9") is None
    oldest = statistics.request("r10")
    assert oldest is not None
    assert oldest.acceptance_length == 2
    statistics.finish("unknown")
    assert len(statistics.finished) == KEEP_FINISHED


def test_a_request_that_comes_back_starts_anew_and_is_the_newest_again() -> None:
    statistics = Statistics(1)

    def live(request_id: str, steps: int) -> None:
        for _ in range(steps):
            statistics.count([request_id], [1], [1], [0])
        statistics.finish(request_id)

    live("a", 3)
    live("b", 1)
    live("a", 2)
    assert list(statistics.finished) == ["b", "a"]
    figures = statistics.request("a")
    assert figures is not None
    assert figures.verify_steps == 2


def test_a_running_requests_figures_come_before_its_finished_ones() -> None:
    statistics = Statistics(1)
    statistics.count(["a"], [1], [1], [1])
    statistics.finish("a")
    statistics.count(["a"], [0], [0], [0])
    assert statistics.request("a") == statistics.running["a"] == RequestStatistics(verify_steps=1)


def test_requests_that_run_on_keep_their_figures_when_others_end() -> None:
    statistics = Statistics(2)
    for n in range(20):  # more than there were rows at first
        statistics.count(["a", f"r{n}", "b"], [1, 1, 2], [1, 1, 2], [1, 0, n % 3])
        statistics.finish(f"r{n}")
        assert statistics.count([], [], [], []) == (0, 0)
        statistics.count(["b", f"r{n - 1}"], [0, 0], [0, 0], [0, -1])
    assert statistics.running == {
        "a": RequestStatistics(20, 20, 20, 20),
        "b": RequestStatistics(40, 20, 40, 19),
    }
    assert len(statistics.finished) == 20
    assert all(f == RequestStatistics(1, 1, 1, 0) for f in statistics.finished.values())


def test_a_source_without_draft_tokens_is_not_listed() -> None:
    statistics = Statistics(1)
    statistics.count_source("x", 0, 0)
    statistics.count_source("y", 3, 1)
    statistics.count_source("y", 1, 1)
    assert {n: (s.draft_tokens, s.accepted_tokens) for n, s in statistics.by_source.items()} == {"y": (4, 2)}


@pytest.mark.parametrize(("times", "median"), [([], 0.0), ([3.0], 3.0), ([5.0, 1.0, 2.0], 2.0)])
def test_a_snapshot_is_json(times: list[float], median: float) -> None:
    statistics = Statistics(2)
    statistics.recent_propose_seconds.extend(times)
    statistics.faults[Fault.LATE] += 2
    snapshot: dict[str, Any] = json.loads(json.dumps(statistics.snapshot()))
    assert snapshot["propose_seconds_median"] == median
    assert snapshot["faults"] == {"late": 2}
