"""The driver: lifecycle, budgets, containment and statistics, with proposers good and bad."""

from __future__ import annotations

import gc
import json
import logging
import signal
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from misbehaving_proposers import (
    BAD_ANSWERS,
    VOCAB,
    Answer,
    BadStrError,
    FakeClock,
    Hanger,
    Host,
    LazyDraft,
    PanicError,
    ThreadedToy,
    Toy,
    breaks_a_trusting_host,
    chains,
    each,
    ints,
    make_step,
    no_drafts,
    obeys,
    raises,
    recurse,
)

from spec_plugins import driver, trees, validation
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.errors import UnsupportedError
from spec_plugins.policy import Outcome, Policy
from spec_plugins.proposer import Draft, Drafts, IntArray, Need, Packed, Sampling, Step, Target
from spec_plugins.validation import Fault

A, B = [1, 2, 3], [4, 5, 6, 7]
TREES = (Need.TREES,)


# ---------------------------------------------------------------------------------------------------
# Construction


def test_loads_the_proposer_with_the_target() -> None:
    toy = Toy()
    host = Host(toy)
    assert toy.target is host.driver.target


@pytest.mark.parametrize("need", Need, ids=lambda need: need.value)
def test_refuses_a_proposer_whose_need_the_host_does_not_provide(need: Need) -> None:
    class Needy(Toy):
        needs = frozenset({need})

    others = set(Need) - {need}
    with pytest.raises(UnsupportedError, match=f"'toy' needs {need.value}, which"):
        Host(Needy(), provides=tuple(others))
    Host(Needy(), provides=(need,))


def test_refuses_before_loading_and_names_all_needs() -> None:
    class Needy(Toy):
        needs = frozenset({Need.LM_HEAD, Need.EMBEDDINGS})

    toy = Needy()
    with pytest.raises(UnsupportedError, match="needs embeddings, lm_head"):
        Host(toy)
    assert toy.target is None


def test_raises_what_loading_raises() -> None:
    class Unloadable(Toy):
        def load(self, target: Target) -> None:
            raise UnsupportedError("a vocabulary of 100 is too small")

    with pytest.raises(UnsupportedError, match="too small"):
        Host(Unloadable())


def test_the_first_step_compiles_nothing() -> None:
    Host(Toy())
    compiled: list[Any] = [
        driver._clamp,
        driver._count_sources,
        trees.node_depths,
        validation._check_chains,
        validation._check_trees,
    ]
    before = [len(f.signatures) for f in compiled]
    tree = each(ints(1, 2), ints(-1, 0), None, ints(0, 0))
    for provides in ((), TREES):
        for answer in (no_drafts, chains(1, 2), tree):
            host = Host(Toy(answer), provides=provides)
            host.propose({"a": A, "b": B})
            host.observe({"a": 1, "b": 0}, [[0], [-1]])
            host.observe({"a": 1, "b": 0}, np.zeros((2, 4))[:, ::2])
    assert [len(f.signatures) for f in compiled] == before


# ---------------------------------------------------------------------------------------------------
# Lifecycle


def test_a_request_is_fresh_at_first_and_then_only_its_new_tokens_are() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": A})
    host.propose({"a": [*A, 4, 5]})
    host.propose({"a": [*A, 4, 5]})
    assert [s.fresh for s in toy.seen] == [[3], [2], [0]]
    assert [s.tokens for s in toy.seen] == [[A], [[*A, 4, 5]], [[*A, 4, 5]]]
    assert toy.finished == []


def test_requests_join_leave_and_move_between_rows() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": A, "b": B})
    host.propose({"b": [*B, 1], "c": [9]})
    host.propose({"c": [9, 8], "b": [*B, 1, 2]})
    assert [s.ids for s in toy.seen] == [("a", "b"), ("b", "c"), ("c", "b")]
    assert [s.fresh for s in toy.seen] == [[3, 4], [1, 1], [1, 1]]
    assert toy.seen[2].tokens == [[9, 8], [*B, 1, 2]]
    assert toy.finished == ["a"]


def test_finish_comes_before_the_step_in_which_the_request_is_gone() -> None:
    order: list[object] = []

    def answer(step: Step) -> Any:
        order.append(tuple(step.request_ids))
        return no_drafts(step)

    host = Host(Toy(answer, order.append))
    host.propose({"a": A, "b": B})
    host.propose({"b": B})
    assert order == [("a", "b"), "a", ("b",)]


def test_a_request_that_comes_back_is_new() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": A, "b": B})
    host.propose({"b": B})
    host.propose({"a": [*A, 4], "b": B})
    assert toy.seen[2].fresh == [4, 0]
    assert toy.finished == ["a"]


def test_a_request_that_left_and_came_back_between_two_calls_is_finished_and_new() -> None:
    """The proposer rests while it happens, so it sees the request in both of its steps."""
    clock = FakeClock()
    toy = Toy(chains(1))
    host = Host(toy, clock=clock, max_faults=1, rest_seconds=10)
    host.propose({"a": A, "b": B})
    toy.answer = BAD_ANSWERS["None"][0]  # no exception: the proposer's state is taken to be sound
    host.propose({"a": A, "b": B})
    assert host.driver.breaker.resting
    host.propose({"b": B})
    host.propose({"a": [7, 7, 7, 7, 7], "b": B})
    clock.now += 10
    host.propose({"a": [7, 7, 7, 7, 7, 8], "b": [*B, 1]})
    assert toy.finished == ["a"]
    assert toy.seen[-1].fresh == [6, 1]


def test_a_request_that_lost_tokens_is_finished_and_new() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": [1, 2, 3, 4], "b": B})
    host.propose({"a": [1, 2], "b": B})
    assert toy.finished == ["a"]
    assert toy.seen[1].fresh == [2, 0]


def test_tokens_lost_and_regrown_while_the_proposer_rests_are_noticed() -> None:
    clock = FakeClock()
    toy = Toy()
    host = Host(toy, clock=clock, max_faults=1, rest_seconds=10)
    host.propose({"a": [1, 2, 3, 4]})
    toy.answer = BAD_ANSWERS["None"][0]
    host.propose({"a": [1, 2, 3, 4]})
    host.propose({"a": [1, 2]})
    host.propose({"a": [1, 2, 9, 9, 9]})
    clock.now += 10
    host.propose({"a": [1, 2, 9, 9, 9, 9]})
    assert toy.finished == ["a"]
    assert toy.seen[-1].fresh == [6]


def test_an_empty_batch_only_finishes() -> None:
    toy = Toy()
    host = Host(toy)
    assert host.tokens({}) == []
    host.propose({"a": A})
    assert host.tokens({}) == []
    assert host.tokens({}) == []
    assert toy.finished == ["a"]
    assert [s.ids for s in toy.seen] == [("a",)]
    assert host.statistics.steps == 1
    host.observe({})


def test_prompt_lengths_are_the_hosts_or_what_was_first_seen() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": A})
    host.propose({"a": [*A, 4], "b": B})
    host.propose({"b": B, "a": [1]})
    assert [s.prompts for s in toy.seen] == [[3], [3, 4], [4, 1]]
    host.propose({"a": [1, 2], "b": B}, prompt_lengths=ints(2, 3))
    assert toy.seen[-1].prompts == [2, 3]


def test_passes_on_everything_that_the_host_gives() -> None:
    steps: list[Step] = []

    def answer(step: Step) -> Any:
        steps.append(step)
        return no_drafts(step)

    host = Host(Toy(answer), provides=tuple(Need))
    values, offsets = np.arange(3, dtype=np.int32), ints(0, 2, 3)
    hidden: Any = Packed(np.ones((2, 4), np.float32), ints(0, 1, 2))
    host.propose(
        {"a": A, "b": B},
        tenants=["x", "y"],
        sampling=Sampling.greedy(2),
        predictions=Packed(values, offsets),
        hidden_states=hidden,
        aux_hidden_states=hidden,
    )
    step = steps[0]
    assert step.tenants == ("x", "y")
    assert step.sampling is not None
    assert step.sampling.top_p.tolist() == [1, 1]
    assert step.predictions is not None
    assert step.predictions[0].tolist() == [0, 1]
    assert step.verified == [None, None]
    assert step.hidden_states is hidden
    assert step.aux_hidden_states is hidden


def test_shows_the_draft_that_was_verified() -> None:
    verified: list[Any] = []

    def answer(step: Step) -> Any:
        verified.append([None if d is None else d.tokens.tolist() for d in step.verified or ()])
        return chains(7, 8, len(step))(step)

    host = Host(Toy(answer), provides=(Need.PREDICTIONS,))
    nothing: Any = Packed(ints(), ints(0, 0, 0, 0))
    host.propose({"a": A, "b": B, "c": A}, predictions=nothing)
    host.observe({"a": 1, "b": -1, "c": 0})  # b was in prefill
    host.propose({"b": B, "a": A}, predictions=nothing)
    host.propose({"b": B, "a": A}, predictions=nothing)  # nothing was verified in between
    host.propose({"b": B, "a": A})  # the host has none to give
    assert verified == [[None] * 3, [None, [7, 8, 3]], [None, None], []]


# ---------------------------------------------------------------------------------------------------
# Budgets


class Sliding(Policy):
    """What an adaptive policy can do: a budget of its own for each request, and learning."""

    def __init__(self, nodes: Sequence[int], depths: Sequence[int]) -> None:
        self.nodes, self.depths = nodes, depths
        self.limits: list[list[int]] = []
        self.outcomes: list[Outcome] = []
        self.finished: list[str] = []

    def budgets(self, request_ids: Sequence[str], limits: IntArray) -> tuple[IntArray, IntArray]:
        self.limits.append(limits.tolist())
        n = len(request_ids)
        return np.array(self.nodes[:n], np.int64), np.array(self.depths[:n], np.int64)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)


def test_the_fixed_policy_asks_for_the_same_from_all() -> None:
    toy = Toy()
    host = Host(toy, depth=5)
    host.propose({"a": A, "b": B})
    host.propose({"a": A})
    assert [s.budgets for s in toy.seen] == [[5, 5], [5]]
    assert [s.depths for s in toy.seen] == [[5, 5], [5]]


def test_budgets_stay_within_the_engines_limits() -> None:
    toy = Toy()
    host = Host(toy, depth=5, nodes=12, provides=TREES)
    host.propose({"a": A, "b": B, "c": A, "d": B}, limits=np.array([9, 2, 0, -3]))
    assert toy.seen[0].depths == [5, 2, 0, 0]
    assert toy.seen[0].budgets == [12, 12, 0, 0]


def test_a_host_of_chains_gets_no_wider_budgets_than_deep() -> None:
    toy = Toy()
    host = Host(toy, depth=5, nodes=12)
    host.propose({"a": A, "b": B}, limits=ints(9, 2))
    assert toy.seen[0].budgets == toy.seen[0].depths == [5, 2]


def test_a_policy_sets_budgets_by_request_within_what_the_host_can_do() -> None:
    toy = Toy()
    policy = Sliding([1, 50, -2, 3], [1, 50, 2, -1])
    host = Host(toy, depth=4, nodes=8, provides=TREES, policy=policy)
    host.propose({"a": A, "b": B, "c": A, "d": B}, limits=ints(4, 4, 0, 4))
    assert policy.limits == [[4, 4, 0, 4]]
    assert toy.seen[0].budgets == [1, 8, 0, 0]
    assert toy.seen[0].depths == [1, 4, 0, 0]
    host.propose({"a": A})
    assert policy.limits[1] == [4]  # no limit is the deepest position there is


def test_a_policy_learns_the_outcome_and_forgets_requests() -> None:
    clock = FakeClock()
    policy = Sliding([4] * 3, [4] * 3)

    def answer(step: Step) -> Any:
        clock.now += 0.25
        return chains(1, 2, 3)(step)

    host = Host(Toy(answer), policy=policy, clock=clock)
    host.propose({"a": A, "b": B, "c": B})
    host.observe({"a": 2, "b": -1}, step_seconds=1.5)
    (outcome,) = policy.outcomes
    assert list(outcome.request_ids) == ["a", "b"]
    assert outcome.drafted.tolist() == [3, 0]
    assert outcome.nodes.tolist() == [3, 0]
    assert outcome.accepted.tolist() == [2, -1]
    assert (outcome.step_seconds, outcome.propose_seconds) == (1.5, 0.25)
    host.propose({"b": B})
    assert sorted(policy.finished) == ["a", "c"]


def test_a_policy_is_asked_and_told_while_the_proposer_rests() -> None:
    clock = FakeClock()
    policy = Sliding([4], [4])

    def answer(step: Step) -> Any:
        clock.now += 0.25
        raise ValueError

    host = Host(Toy(answer), policy=policy, clock=clock, max_faults=1)
    for _ in range(2):
        host.propose({"a": A})
        host.observe({"a": 0})
    assert len(policy.limits) == 2
    assert [o.propose_seconds for o in policy.outcomes] == [0.25, 0]
    assert [o.drafted.tolist() for o in policy.outcomes] == [[0], [0]]


def test_a_draft_over_budget_is_cut_and_no_reason_to_rest() -> None:
    host = Host(Toy(each(np.arange(50))), max_faults=1)
    for _ in range(3):
        assert host.tokens({"a": A, "b": B}, limits=ints(4, 2)) == [[0, 1, 2, 3], [0, 1]]
    assert host.faults() == {"over_budget": 6}
    assert not host.driver.breaker.resting


def test_a_budget_of_zero_draws_no_draft_yet_shows_the_tokens() -> None:
    toy = Toy(each(ints(1, 2)))
    host = Host(toy)
    assert host.tokens({"a": A}, limits=ints(0)) == [[]]
    assert toy.seen[0].fresh == [3]


# ---------------------------------------------------------------------------------------------------
# Containment: exceptions

CONTAINED = {
    "an exception": raises(ValueError("broken")),
    "out of memory": raises(MemoryError),
    "endless recursion": recurse,
    "StopIteration": raises(StopIteration),
    "an exception without words": raises(BadStrError()),
    "a Rust panic": raises(PanicError),
    "GeneratorExit": raises(GeneratorExit),
}
FOR_THE_ENGINE = {"SystemExit": raises(SystemExit(3)), "KeyboardInterrupt": raises(KeyboardInterrupt)}


@pytest.mark.parametrize("toy_class", [Toy, ThreadedToy])
@pytest.mark.parametrize("answer", CONTAINED.values(), ids=CONTAINED)
def test_an_exception_costs_the_step_and_the_proposers_memory(
    answer: Answer, toy_class: type[Toy], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BaseException):  # noqa: B017, PT011 — the negative control
        Toy(answer).propose(make_step())

    toy = toy_class(chains(1, 2))
    host = Host(toy)
    assert host.tokens({"a": A, "b": B}) == [[1, 2], [1, 2]]
    toy.answer = answer
    assert host.tokens({"a": [*A, 4], "c": B}) == [[], []]
    toy.answer = chains(5)
    assert host.tokens({"a": [*A, 4, 5], "c": B}) == [[5], [5]]
    assert host.faults() == {"raised": 1}
    # It forgets all that it may know, and sees everything as new.
    assert set(toy.finished) == {"a", "b", "c"}
    assert toy.seen[-1].fresh == [5, 4]
    assert "proposer 'toy' raised " in caplog.text


@pytest.mark.parametrize("answer", FOR_THE_ENGINE.values(), ids=FOR_THE_ENGINE)
def test_on_its_own_thread_even_an_exit_is_contained(answer: Answer) -> None:
    toy = ThreadedToy(answer)
    host = Host(toy)
    assert host.tokens({"a": A}) == [[]]
    toy.answer = chains(1)
    assert host.tokens({"a": A}) == [[1]]
    assert host.faults() == {"raised": 1}


@pytest.mark.parametrize("answer", FOR_THE_ENGINE.values(), ids=FOR_THE_ENGINE)
def test_inline_an_exit_reaches_the_engine_and_leaves_the_driver_sound(answer: Answer) -> None:
    """It may be a signal handler's; the engine decides."""
    toy = Toy(chains(1))
    host = Host(toy)
    host.propose({"a": A, "b": A})
    toy.answer = answer
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        host.propose({"a": A})
    toy.answer = chains(2)
    assert host.tokens({"a": A}) == [[2]]
    assert set(toy.finished) == {"a", "b"}
    assert toy.seen[-1].fresh == [3]
    assert host.held() == {"seen": 1, "prompts": 1, "pending": 1}


def test_ctrl_c_while_a_proposer_works_reaches_the_engine() -> None:
    hang, pressed = Hanger(), threading.Event()

    def on_ctrl_c(*_: object) -> None:
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    def press(main: int) -> None:
        hang.entered.wait()
        while not pressed.wait(0.02):  # one that comes just before the engine's thread waits is not noticed
            signal.pthread_kill(main, signal.SIGINT)

    toy = ThreadedToy(hang)
    host = Host(toy)
    before = signal.signal(signal.SIGINT, on_ctrl_c)
    presser = threading.Thread(target=press, args=[threading.get_ident()], daemon=True)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            host.propose({"a": A})
    finally:
        pressed.set()
        presser.join(60)
        signal.signal(signal.SIGINT, before)
    toy.answer = chains(1)
    assert host.tokens({"a": A}) == [[]]  # the call is still out
    hang.release.set()
    host.wait_until_free()
    assert host.tokens({"a": A}) == [[1]]
    assert toy.finished == ["a"]
    assert toy.seen[-1].fresh == [3]


@pytest.mark.parametrize("toy_class", [Toy, ThreadedToy])
@pytest.mark.parametrize(
    "error", [ValueError("no"), BadStrError(), PanicError()], ids=lambda e: type(e).__name__
)
def test_an_exception_in_finish_stops_neither_the_others_nor_the_step(
    error: BaseException, toy_class: type[Toy], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)):  # the negative control
        Toy(on_finish=raises(error)).finish("a")

    toy = toy_class(chains(1), raises(error))
    host = Host(toy, max_faults=1)
    host.propose({"a": A, "b": B, "c": A})
    assert host.tokens({"c": A}) == [[1]]
    assert sorted(toy.finished) == ["a", "b"]
    assert host.faults() == {"finish_raised": 2}
    assert not host.driver.breaker.resting
    assert "in finish" in caplog.text
    assert host.tokens({"c": A}) == [[1]]
    assert len(toy.finished) == 2  # it is told once


def test_an_exit_in_finish_on_its_own_thread_is_contained() -> None:
    toy = ThreadedToy(chains(1), raises(SystemExit))
    host = Host(toy)
    host.propose({"a": A, "b": B})
    assert host.tokens({"b": B}) == [[1]]
    assert host.faults() == {"finish_raised": 1}


# ---------------------------------------------------------------------------------------------------
# Containment: hangs


def test_a_hang_inline_hangs_without_a_thread() -> None:
    """The negative control of those below: the call does not come back."""
    hang = Hanger()
    thread = threading.Thread(target=Toy(hang).propose, args=[make_step()], daemon=True)
    thread.start()
    assert hang.entered.wait(60)
    thread.join(0.1)
    assert thread.is_alive()
    hang.release.set()
    thread.join(60)
    assert not thread.is_alive()


def lazily(hang: Hanger) -> Answer:
    """A call that returns at once, with a draft that hangs when it is read."""
    return lambda step: [LazyDraft(hang) for _ in range(len(step))]


@pytest.mark.parametrize(
    ("busy", "wrap"),
    [(False, None), (True, None), (False, lazily)],
    ids=["a sleep", "a busy loop", "an answer that hangs"],
)
def test_a_hang_costs_its_step_and_those_until_it_returns(busy: bool, wrap: Any) -> None:
    hang = Hanger(busy=busy)
    toy = ThreadedToy(chains(1))
    host = Host(toy, time_allowance_ms=50)
    # A loaded machine may make even this first step late; then the proposer just starts anew.
    host.propose({"a": A, "b": B})
    host.wait_until_free()
    toy.answer = wrap(hang) if wrap else hang
    before = host.faults().get("late", 0)
    assert host.tokens({"a": [*A, 4], "c": B}) == [[], []]
    assert hang.entered.wait(60)
    assert host.faults()["late"] == before + 1
    calls = len(toy.seen)
    for _ in range(3):  # the engine goes on, and makes no other call
        assert host.tokens({"a": [*A, 4, 5], "c": B}) == [[], []]
        host.observe({"a": 0, "c": 0})
    assert len(toy.seen) == calls
    assert host.statistics.skipped_steps == 3

    hang.release.set()
    host.wait_until_free()
    toy.answer = chains(7)
    toy.finished.clear()
    host.driver._guard.allowance_seconds = 60  # type: ignore[attr-defined]
    # The late answer is thrown away, everything forgotten and shown again.
    assert host.tokens({"a": [*A, 4, 5, 6], "c": B}) == [[7], [7]]
    assert {"a", "b", "c"} >= set(toy.finished) >= {"a", "c"}
    assert toy.seen[-1].fresh == [6, 4]


def test_a_hang_in_finish_costs_no_more() -> None:
    hang = Hanger()
    toy = ThreadedToy(chains(1), hang)
    host = Host(toy)
    host.propose({"a": A, "b": B})
    host.driver._guard.allowance_seconds = 0.05  # type: ignore[attr-defined]
    assert host.tokens({"b": B}) == [[]]
    assert host.faults() == {"late": 1}
    assert host.tokens({"b": B}) == [[]]
    assert len(toy.seen) == 1
    hang.release.set()
    host.wait_until_free()
    host.driver._guard.allowance_seconds = 60  # type: ignore[attr-defined]
    assert host.tokens({"b": B}) == [[1]]
    assert set(toy.finished) == {"a", "b"}
    assert toy.seen[-1].fresh == [4]


def test_what_finish_raises_after_the_call_was_late_is_not_counted() -> None:
    hang = Hanger()

    def fail_late(request_id: str) -> None:
        hang(request_id)
        raise ValueError

    toy = ThreadedToy(chains(1), fail_late)
    host = Host(toy, time_allowance_ms=50)
    host.driver._guard.allowance_seconds = 60  # type: ignore[attr-defined]
    host.propose({"a": A, "b": B})
    host.driver._guard.allowance_seconds = 0.05  # type: ignore[attr-defined]
    host.propose({"b": B})
    hang.release.set()
    host.wait_until_free()
    assert host.faults() == {"late": 1}


def test_inline_a_late_answer_is_used_and_counted() -> None:
    clock = FakeClock()
    toy = Toy()

    def slow(step: Step) -> Any:
        clock.now += 0.3
        return chains(1)(step)

    toy.answer = slow
    host = Host(toy, clock=clock, time_allowance_ms=250, max_faults=2, rest_seconds=10)
    assert host.tokens({"a": A}) == [[1]]
    assert host.tokens({"a": A}) == [[1]]
    assert host.faults() == {"late": 2}
    assert host.driver.breaker.resting
    assert toy.finished == []  # nothing suggests that its state is wrong


# ---------------------------------------------------------------------------------------------------
# Containment: bad answers


@pytest.mark.parametrize("provides", [(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("answer", "fault"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_bad_answer_is_cut_or_dropped(answer: Answer, fault: Fault, provides: tuple[Need, ...]) -> None:
    assert breaks_a_trusting_host(answer, make_step(2, [3, 3]))  # the negative control

    toy = Toy(answer)
    host = Host(toy, provides=provides, depth=3)
    drafts = host.propose({"a": A, "b": B})
    assert obeys(drafts, make_step(2, [3, 3]))
    assert set(host.faults()) == {fault.value}
    assert drafts.counts.any() == (fault is Fault.OVER_BUDGET)
    host.observe({"a": 0, "b": 0})
    toy.answer = chains(1, 2)
    assert host.tokens({"a": A, "b": B}) == [[1, 2], [1, 2]]


POISON = {
    "no draft": None,
    "a bad token": Draft(ints(VOCAB)),
    "ragged tokens": Draft([[1], [2, 3]]),  # type: ignore[arg-type]
    "unsigned tokens": Draft(np.array([250], np.uint8)),
    "a bad parent": Draft(ints(1, 2), ints(-1, 5)),
    "siblings alike": Draft(ints(1, 1), ints(-1, -1)),
    "bad probabilities": Draft(ints(1, 2), probs="certain"),  # type: ignore[arg-type]
    "wrong probabilities": Draft(ints(1, 2), probs=np.full((2, VOCAB), np.nan)),  # type: ignore[arg-type]
    "tokens that raise": LazyDraft(lambda: 1 // 0),
}


@pytest.mark.parametrize("provides", [(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_one_bad_draft_does_not_stop_the_others(poison: Any, provides: tuple[Need, ...]) -> None:
    if Need.PROBABILITIES not in provides:
        pytest.importorskip("torch")
    answer = lambda step: [Draft(ints(1, 2)), poison, Draft(ints(3))]  # noqa: E731
    host = Host(Toy(answer), provides=(*provides, Need.PROBABILITIES), max_faults=1)
    for _ in range(3):
        assert host.tokens({"a": A, "b": B, "c": A}) == [[1, 2], [], [3]]
    assert sum(host.faults().values()) == 3
    assert not host.driver.breaker.resting


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2]),
        [1, 2],
        (1, 2),
        np.array([1, 2], np.uint8),
        np.array([1, 2], np.uint64),
        np.array([1, 2], ">i4"),
        np.array([1, 0, 2, 0], np.int32)[::2],
        np.ma.array([1, 2]),
    ],
    ids=["int64", "list", "tuple", "uint8", "uint64", "big-endian", "strided", "masked"],
)
def test_tokens_of_another_integer_kind_are_converted(tokens: Any) -> None:
    host = Host(Toy(each(tokens)), provides=TREES)
    assert host.tokens({"a": A, "b": B}) == [[1, 2], [1, 2]]
    matrix = np.array([tokens, tokens])
    host = Host(Toy(lambda step: Drafts(matrix, np.array([2, 1]))))
    assert host.tokens({"a": A, "b": B}) == [[1, 2], [1]]
    assert host.faults() == {}


def test_tokens_may_be_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    host = Host(Toy(each(torch.tensor([1, 2]))))
    assert host.tokens({"a": A}) == [[1, 2]]


# ---------------------------------------------------------------------------------------------------
# Containment: what belongs to the engine


def scribble(array: Any) -> None:
    array[...] = 66


WRITES: dict[str, Any] = {
    "token_ids": lambda step: scribble(step.token_ids),
    "a request's tokens": lambda step: scribble(step.tokens(0)),
    "rows": lambda step: scribble(step.rows),
    "lengths": lambda step: scribble(step.lengths),
    "fresh": lambda step: scribble(step.fresh),
    "budgets": lambda step: scribble(step.budgets),
    "depths": lambda step: scribble(step.depths),
    "prompt_lengths": lambda step: scribble(step.prompt_lengths),
    "request_ids": lambda step: step.request_ids.append("z"),
    "tenants": lambda step: step.tenants.append("z"),
    "temperature": lambda step: scribble(step.sampling.temperature),
    "top_k": lambda step: scribble(step.sampling.top_k),
    "top_p": lambda step: scribble(step.sampling.top_p),
    "min_p": lambda step: scribble(step.sampling.min_p),
    "predictions": lambda step: scribble(step.predictions.values),
    "offsets": lambda step: scribble(step.predictions.offsets),
    "verified tokens": lambda step: scribble(step.verified[0].tokens),
    "verified parents": lambda step: scribble(step.verified[0].parents),
    "verified sources": lambda step: scribble(step.verified[0].sources),
    "a field": lambda step: setattr(step, "budgets", None),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_proposer_that_writes_changes_nothing_of_the_engines(write: Any) -> None:
    toy = Toy(each(ints(1, 2), ints(-1, 0), None, ints(0, 0)))
    host = Host(toy, provides=(Need.TREES, Need.PREDICTIONS))
    handed = host.propose({"a": A})
    host.observe({"a": 2}, [[0, 1]])

    def answer(step: Step) -> Any:
        write(step)
        return no_drafts(step)

    toy.answer = answer
    ids, tenants = ["a"], ["x"]
    token_ids, rows, lengths, limits, prompts = np.array([A], np.int32), ints(0), ints(3), ints(3), ints(2)
    sampling, predictions = Sampling.greedy(1), Packed(ints(1, 2, 3), ints(0, 3))
    host.driver.propose(
        ids, token_ids, rows, lengths, limits=limits, prompt_lengths=prompts, tenants=tenants,
        sampling=sampling, predictions=predictions,
    )  # fmt: skip
    assert host.faults() == {"raised": 1}
    assert (ids, tenants) == (["a"], ["x"])
    kept = (token_ids, rows, lengths, limits, prompts, predictions.values, predictions.offsets)
    assert [a.tolist() for a in kept] == [[A], [0], [3], [3], [2], [1, 2, 3], [0, 3]]
    settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert [a.tolist() for a in settings] == [[0], [0], [1], [0]]
    assert handed.tokens.tolist() == [[1, 2]]


def test_a_step_of_writeable_arrays_would_let_it() -> None:
    """The negative control."""
    step = make_step(writeable=True)
    WRITES["token_ids"](step)
    assert step.token_ids.tolist() == [[66] * 3] * 2


@pytest.mark.parametrize(
    "answer",
    [
        lambda step: [Draft(step.token_ids[row, :3]) for row in step.rows],
        lambda step: Drafts(step.token_ids[:, :3], step.lengths),
    ],
    ids=["drafts", "packed"],
)
def test_drafts_that_are_views_of_the_hosts_tokens_are_copied(answer: Answer) -> None:
    host = Host(Toy(answer))
    drafts = host.propose({"a": A})
    scribble(host.store.token_ids)
    assert drafts.tokens.tolist() == [A]


def test_drafts_that_the_proposer_changes_afterwards_stay_as_they_were() -> None:
    mine = Drafts(
        np.array([[1, 2]], np.int32),
        ints(2),
        np.array([[-1, 0]], np.int32),
        None,
        np.array([[0, 1]], np.int32),
    )

    class TwoSources(Toy):
        sources = ("x", "y")

    host = Host(TwoSources(lambda step: mine), provides=TREES)
    drafts = host.propose({"a": A})
    for array in (mine.tokens, mine.counts, mine.parents, mine.sources):
        scribble(array)
    assert drafts[0].tokens.tolist() == [1, 2]
    assert drafts[0].parents is not None
    assert drafts[0].parents.tolist() == [-1, 0]
    host.observe({"a": 1}, [[0]])
    assert {n: (s.draft_tokens, s.accepted_tokens) for n, s in host.statistics.by_source.items()} == {
        "x": (1, 1),
        "y": (1, 0),
    }


def test_a_tree_becomes_its_principal_chain_where_only_chains_are_verified() -> None:
    tree = each(ints(1, 2, 3, 4, 5), ints(-1, -1, 0, 1, 2))
    assert Host(Toy(tree)).tokens({"a": A}) == [[1, 3, 5]]
    whole = Host(Toy(tree), provides=TREES, nodes=8).propose({"a": A})
    assert whole[0].tokens.tolist() == [1, 2, 3, 4, 5]
    assert whole[0].parents is not None
    assert whole[0].parents.tolist() == [-1, -1, 0, 1, 2]


def test_probabilities_reach_only_a_host_that_verifies_with_them() -> None:
    torch = pytest.importorskip("torch")
    answer = each(ints(1, 2), None, torch.full((2, VOCAB), 1 / VOCAB))
    given = Host(Toy(answer), provides=(Need.PROBABILITIES,)).propose({"a": A})
    assert given[0].probs is not None
    assert given[0].probs.shape == (2, VOCAB)
    without = Host(Toy(answer)).propose({"a": A})
    assert without.probs is None
    assert without.tokens.tolist() == [[1, 2]]


def test_wrong_probabilities_do_not_matter_to_a_host_without() -> None:
    host = Host(Toy(each(ints(1, 2), None, "certain")))
    assert host.tokens({"a": A}) == [[1, 2]]
    assert host.faults() == {}


# ---------------------------------------------------------------------------------------------------
# Resting


@pytest.mark.parametrize(
    "answer", [raises(ValueError), BAD_ANSWERS["None"][0], BAD_ANSWERS["a negative token"][0]]
)
def test_a_proposer_that_keeps_failing_rests_and_is_tried_again(answer: Answer, clock: FakeClock) -> None:
    toy = Toy(answer)
    host = Host(toy, clock=clock, max_faults=3, rest_seconds=10, longest_rest_seconds=25)

    def calls(seconds: float) -> int:
        """Let time pass, run a step, and say whether the proposer was called."""
        clock.now += seconds
        before = len(toy.seen)
        host.propose({"a": A})
        return len(toy.seen) - before

    assert [calls(1) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert [calls(7.9), calls(0.1)] == [0, 1]  # the rest is over; one try fails
    assert [calls(19.9), calls(0.1)] == [0, 1]  # twice the rest, and fails again
    assert [calls(24.9), calls(0.1)] == [0, 1]  # as long as a rest can be
    assert [calls(24.9), calls(0.1)] == [0, 1]
    assert host.statistics.rests == 5
    assert host.statistics.skipped_steps == 6
    clock.now += 25
    toy.answer = chains(1)
    assert host.tokens({"a": A}) == [[1]]  # a success ends it
    toy.answer = answer
    assert [calls(1) for _ in range(4)] == [1, 1, 1, 0]
    assert [calls(8.9), calls(0.1)] == [0, 1]  # and the first rest is short again


def test_faults_must_be_in_a_row(clock: FakeClock) -> None:
    toy = Toy()
    host = Host(toy, clock=clock, max_faults=2)
    for answer in (raises(ValueError), chains(1)) * 3:
        toy.answer = answer
        host.propose({"a": A})
    assert len(toy.seen) == 6
    assert host.statistics.rests == 0


def test_a_step_that_asks_for_nothing_teaches_nothing(clock: FakeClock) -> None:
    toy = Toy(raises(ValueError))
    host = Host(toy, clock=clock, max_faults=2, rest_seconds=10)
    host.propose({"a": A})
    toy.answer = no_drafts
    host.propose({"a": A}, limits=ints(0))  # prefill: nothing could go wrong
    host.propose({})
    toy.answer = raises(ValueError)
    host.propose({"a": A})
    assert host.driver.breaker.resting
    clock.now += 10
    toy.answer = no_drafts
    host.propose({})  # nor does finishing prove that it works again
    toy.answer = raises(ValueError)
    host.propose({"a": A})
    assert host.driver.breaker.resting
    assert host.statistics.rests == 2


def test_no_draft_is_a_good_answer() -> None:
    host = Host(Toy(no_drafts), max_faults=1)
    host.propose({"a": A})
    assert host.faults() == {}
    assert not host.driver.breaker.resting


def test_while_it_rests_the_engine_runs_without_drafts(clock: FakeClock) -> None:
    toy = Toy(raises(ValueError))
    host = Host(toy, clock=clock, max_faults=1)
    host.propose({"a": A})
    for _ in range(3):
        assert host.tokens({"a": A, "b": B}) == [[], []]
        host.observe({"a": 0, "b": 0})
    host.propose({})
    assert host.statistics.skipped_steps == 3  # one without requests is not a step
    assert host.statistics.verify_steps == 6
    assert host.statistics.acceptance_length == 1


# ---------------------------------------------------------------------------------------------------
# Warnings


def test_a_warning_of_each_kind_comes_once_in_a_while(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(raises(ValueError("broken")))
    host = Host(toy, clock=clock, max_faults=1000)
    for _ in range(5):
        host.propose({"a": A})
        clock.now += 1
    toy.answer = BAD_ANSWERS["None"][0]
    host.propose({"a": A})
    assert [r.getMessage() for r in caplog.records] == [
        "proposer 'toy' raised ValueError: broken",
        "proposer 'toy' gave a bad draft (not_a_draft); it was not used",
    ]
    assert caplog.records[0].exc_info is not None
    assert {r.levelno for r in caplog.records} == {logging.WARNING}
    caplog.clear()
    clock.now += 30
    toy.answer = raises(KeyError("else"))
    host.propose({"a": A})
    assert [r.getMessage() for r in caplog.records] == [
        "proposer 'toy' raised KeyError: 'else' (4 more like this since the last warning)"
    ]
    assert host.faults() == {"raised": 6, "not_a_draft": 1}  # the counters have them all


def test_a_rest_is_announced(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(Toy(raises(ValueError)), clock=clock, max_faults=1, rest_seconds=10)
    host.propose({"a": A})
    assert caplog.records[-1].getMessage() == "proposer 'toy' keeps failing and rests for 10 s"


def test_an_ordinary_run_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(Toy(each(np.arange(50))))
    host.propose({"a": A})
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------------
# Statistics


def test_statistics_of_chains_are_exact() -> None:
    toy = Toy()
    host = Host(toy, depth=4)
    drafts = {"a": [1, 2, 3], "b": [4], "c": []}
    toy.answer = lambda step: [Draft(ints(*drafts[r])) for r in step.request_ids]
    host.propose(dict.fromkeys(drafts, A))
    host.observe({"c": 0, "b": 1, "a": 2})
    drafts = {"a": [1, 2, 3, 4], "b": [1, 2], "c": [5]}
    host.propose(dict.fromkeys(drafts, A))
    host.observe({"a": 4, "b": -1, "c": 0, "stranger": 0})  # b was in prefill: nothing was verified
    host.propose({"c": A})

    s = host.statistics
    assert (s.steps, s.verify_steps, s.drafts, s.draft_tokens, s.accepted_tokens) == (3, 6, 4, 9, 7)
    assert s.drafted_by_position.tolist() == [4, 2, 2, 1]
    assert s.accepted_by_position.tolist() == [3, 2, 1, 1]
    assert s.acceptance_by_position == [3 / 4, 1, 1 / 2, 1]
    assert s.acceptance_length == 1 + 7 / 6
    a, b, c = (s.request(r) for r in "abc")
    assert a is not None
    assert (a.verify_steps, a.drafts, a.draft_tokens, a.accepted_tokens) == (2, 2, 7, 6)
    assert a.acceptance_length == 4
    assert b is not None
    assert (b.verify_steps, b.drafts, b.draft_tokens, b.accepted_tokens) == (1, 1, 1, 1)
    assert c is not None
    assert (c.verify_steps, c.drafts, c.draft_tokens, c.accepted_tokens) == (2, 1, 1, 0)
    assert set(s.running) == {"c"}
    assert set(s.finished) == {"a", "b", "stranger"}
    assert {n: (f.draft_tokens, f.accepted_tokens) for n, f in s.by_source.items()} == {"toy": (9, 7)}


class Sourced(Toy):
    sources = ("near", "far")


def test_statistics_of_trees_count_nodes_once_and_positions_by_depth() -> None:
    # 1 ─┬─ 2 ── 3    and    4 ── 5
    #    └─ 6
    tree = Draft(ints(1, 2, 3, 6, 4, 5), ints(-1, 0, 1, 0, -1, 4), None, ints(0, 0, 1, 1, 1, 0))
    host = Host(Sourced(lambda step: [tree] * len(step)), provides=TREES, depth=4, nodes=8)
    host.propose({"a": A, "b": B, "c": A})
    host.observe({"c": 0, "b": 3, "a": 2}, [[-1, -1, -1], [0, 1, 2], [4, 5, -1]])
    s = host.statistics
    assert (s.verify_steps, s.drafts, s.draft_tokens, s.accepted_tokens) == (3, 3, 18, 5)
    assert s.drafted_by_position.tolist() == [3, 3, 3, 0]
    assert s.accepted_by_position.tolist() == [2, 2, 1, 0]
    assert s.acceptance_by_position == [2 / 3, 2 / 3, 1 / 3]
    assert {n: (f.draft_tokens, f.accepted_tokens) for n, f in s.by_source.items()} == {
        "near": (9, 3),
        "far": (9, 2),
    }


def test_sources_follow_a_tree_that_is_cut_or_reduced() -> None:
    # nodes 0..5; the third is too deep for a depth of 2
    tree = Draft(ints(1, 2, 3, 6, 4, 5), ints(-1, 0, 1, 0, -1, 4), None, ints(0, 0, 0, 1, 1, 1))
    host = Host(Sourced(lambda step: [tree]), provides=TREES, depth=2, nodes=8)
    assert host.tokens({"a": A}) == [[1, 2, 6, 4, 5]]
    host.observe({"a": 2}, [[0, 2]])  # 1 and 6
    assert {n: (f.draft_tokens, f.accepted_tokens) for n, f in host.statistics.by_source.items()} == {
        "near": (2, 1),
        "far": (3, 1),
    }
    chain = Draft(ints(1, 6, 2, 3), ints(-1, -1, 0, 2), None, ints(1, 0, 0, 1))
    host = Host(Sourced(lambda step: [chain]))
    assert host.tokens({"a": A}) == [[1, 2, 3]]
    host.observe({"a": 2})
    assert {n: (f.draft_tokens, f.accepted_tokens) for n, f in host.statistics.by_source.items()} == {
        "near": (1, 1),
        "far": (2, 1),
    }


def test_sources_that_nobody_declared_are_unknown() -> None:
    wild = Draft(ints(1, 2, 3, 4), None, None, ints(-5, 2**31 - 1, 1, 2))
    host = Host(Sourced(lambda step: [wild]))
    host.propose({"a": A})
    host.observe({"a": 3})
    assert {n: (f.draft_tokens, f.accepted_tokens) for n, f in host.statistics.by_source.items()} == {
        "far": (1, 1),
        "unknown": (3, 2),
    }


@pytest.mark.parametrize("sources", [ints(1), "ab", [[0], [1, 2]], np.ones(2)])
def test_malformed_sources_cost_no_draft(sources: Any) -> None:
    host = Host(Sourced(each(ints(1, 2), None, None, sources)))
    assert host.tokens({"a": A}) == [[1, 2]]
    host.observe({"a": 1})
    assert host.faults() == {}


def test_nothing_is_verified_twice() -> None:
    host = Host(Toy(chains(1, 2)))
    host.propose({"a": A})
    host.observe({"a": 1})
    host.observe({"a": 0})  # the target decoded again, without a draft
    assert (host.statistics.verify_steps, host.statistics.draft_tokens) == (2, 2)


def test_a_draft_that_was_not_verified_is_not_counted() -> None:
    host = Host(Toy(chains(1, 2)))
    host.propose({"a": A, "b": B})
    host.propose({"a": A, "b": B})
    host.observe({"a": 1})
    host.propose({"a": A})  # b ended before
    host.observe({"a": 1, "b": 0})
    assert host.statistics.draft_tokens == 4
    figures = host.statistics.request("b")
    assert figures is not None
    assert (figures.verify_steps, figures.draft_tokens) == (1, 0)


def test_time_is_counted_also_where_it_was_lost(clock: FakeClock) -> None:
    toy = Toy()
    host = Host(toy, clock=clock)

    def taking(seconds: float, then: Answer) -> Answer:
        def answer(step: Step) -> Any:
            clock.now += seconds
            return then(step)

        return answer

    for seconds, then in [(0.25, chains(1)), (0.5, raises(ValueError)), (1.0, no_drafts)]:
        toy.answer = taking(seconds, then)
        host.propose({"a": A})
    assert host.statistics.steps == 3
    assert host.statistics.propose_seconds == 1.75
    assert list(host.statistics.recent_propose_seconds) == [0.25, 0.5, 1.0]


def test_a_snapshot_is_plain_data() -> None:
    host = Host(Toy(chains(1, 2)), depth=3)
    host.propose({"a": A})
    host.observe({"a": 1})
    host.driver.proposer.answer = raises(ValueError)  # type: ignore[attr-defined]
    host.propose({"a": A})
    snapshot = json.loads(json.dumps(host.statistics.snapshot()))
    assert snapshot["drafted_by_position"] == [1, 1, 0]
    assert snapshot["accepted_by_position"] == [1, 0, 0]
    assert snapshot["acceptance_by_position"] == [1, 0]
    assert snapshot["acceptance_rate"] == 0.5
    assert snapshot["faults"] == {"raised": 1}
    assert snapshot["sources"] == {"toy": {"draft_tokens": 2, "accepted_tokens": 1}}


# ---------------------------------------------------------------------------------------------------
# Leaks


@pytest.mark.parametrize("answer", [chains(1, 2), raises(ValueError)], ids=["good", "failing"])
def test_nothing_is_held_of_requests_that_left(answer: Answer) -> None:
    """10,000 requests: some observed only, as one whose prefill ends it, some never observed."""
    policy = Sliding([2] * 100, [2] * 100)
    toy = Toy(answer)
    host = Host(toy, provides=(Need.PREDICTIONS,), policy=policy, max_faults=1000)
    predictions: Any = Packed(ints(), np.zeros(101, np.int32))
    for block in range(100):
        ids = [f"{block}-{i}" for i in range(100)]
        host.propose(dict.fromkeys(ids[:80], A), predictions=predictions)
        host.observe(dict.fromkeys(ids[20:], 0))
    assert sum(host.held().values()) > 0
    host.propose({})
    assert host.held() == {}
    assert set(policy.finished) == {f"{b}-{i}" for b in range(100) for i in range(100)}
    assert set(toy.finished) == {f"{b}-{i}" for b in range(100) for i in range(80)}
    assert len(host.statistics.finished) == 1024


def test_nothing_is_held_of_requests_that_left_during_a_rest(clock: FakeClock) -> None:
    toy = Toy(raises(ValueError))
    host = Host(toy, clock=clock, max_faults=1, rest_seconds=10)
    host.propose(dict.fromkeys("abc", A))
    for r in "defgh":
        host.propose({r: A})
        host.observe({r: 0})
    assert host.held() == {"stale": 3, "prompts": 1, "running": 1}
    clock.now += 10
    host.propose({})
    assert host.held() == {}
    assert sorted(toy.finished) == ["a", "b", "c"]


def test_a_driver_that_is_dropped_ends_its_thread_and_frees_its_proposer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # or it keeps the exception, and all frames with it
    toy = ThreadedToy(chains(1))
    host = Host(toy)
    thread = host.driver._guard._thread  # type: ignore[attr-defined]
    host.propose({"a": A})
    host.driver.proposer.answer = raises(ValueError)  # type: ignore[attr-defined]
    host.propose({"a": A})
    gone = weakref.ref(toy)
    del toy, host
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None


def test_a_step_is_freed_when_the_next_begins() -> None:
    """Its hidden states may be large, and the engine's."""
    for toy_class in (Toy, ThreadedToy):
        toy = toy_class(chains(1))
        host = Host(toy)
        hidden = Packed(np.ones(4), ints(0, 4))
        kept = weakref.ref(hidden.values)
        host.propose({"a": A}, hidden_states=hidden)
        del hidden
        deadline = threading.Event()
        for _ in range(1000):
            if kept() is None:
                break
            deadline.wait(0.01)
        assert kept() is None


def test_the_driver_needs_no_configuration() -> None:
    driver = Driver(Toy(chains(1)), Target(VOCAB, 100, 1, num_speculative_tokens=2, max_draft_nodes=2))
    assert driver.config == Config()
    drafts = driver.propose(["a"], np.array([A], np.int32), ints(0), ints(3))
    assert drafts[0].tokens.tolist() == [1]


# ------------------------------------------------------------- requests that wait, drafts that are cut


def test_a_request_that_is_alive_keeps_its_state_while_it_is_in_no_step() -> None:
    toy = Toy(chains(1))
    host = Host(toy)
    host.propose({"a": [1, 2], "b": [5]})
    host.propose({"a": [1, 2, 3]}, alive={"a", "b"})
    host.propose({"a": [1, 2, 3, 4], "b": [5, 6]}, alive={"a", "b"})
    assert toy.finished == []
    assert toy.seen[-1].fresh == [1, 1]
    host.propose({"a": [1, 2, 3, 4, 5]})
    assert toy.finished == ["b"]


def test_a_request_that_waits_keeps_its_prompt_length() -> None:
    toy = Toy()
    host = Host(toy)
    host.propose({"a": [1, 2]})
    host.propose({}, alive={"a"})
    host.propose({"a": [1, 2, 3]}, alive={"a"})
    assert toy.seen[-1].prompts == [2]


def test_finish_ends_a_request_whose_name_is_used_again() -> None:
    toy = Toy(chains(1))
    host = Host(toy)
    host.propose({"a": [1, 2]})
    host.driver.finish(["a", "unknown"])
    assert host.driver.requests_held == 1, "it is yet to forget it"
    host.propose({"a": [3, 4, 5]}, alive={"a"})
    assert toy.finished == ["a"]
    assert toy.seen[-1].fresh == [3]


def test_what_is_known_of_requests_stays_theirs_in_any_order() -> None:
    toy = Toy(chains(1))
    host = Host(toy)
    host.propose({"a": [1, 2], "b": [5, 6, 7], "c": [8]})
    host.propose({"c": [8, 9], "a": [1, 2, 3]}, alive={"b"})
    assert (toy.seen[-1].fresh, toy.seen[-1].prompts) == ([1, 1], [1, 2])
    host.observe({"a": 1, "b": 1, "c": 0})  # b was not in the step
    host.propose({"b": [5, 6, 7, 8, 9], "d": [1], "a": [1, 2, 3]}, alive={"c"})
    assert (toy.seen[-1].fresh, toy.seen[-1].prompts) == ([2, 1, 0], [3, 1, 2])
    host.driver.finish(["a"])
    host.propose({"b": [5, 6, 7, 8, 9], "d": [1], "a": [1, 2, 3]})
    assert (toy.seen[-1].fresh, toy.seen[-1].prompts) == ([0, 0, 3], [3, 1, 3])
    assert sorted(toy.finished) == ["a", "c"]
    figures = host.statistics
    assert (figures.draft_tokens, figures.accepted_tokens) == (2, 1)
    assert {r: f.drafts for r, f in figures.running.items()} == {"b": 0}


def test_after_an_exception_requests_that_wait_are_forgotten_too() -> None:
    toy = Toy(chains(1))
    host = Host(toy)
    host.propose({"a": [1], "b": [2]})
    toy.answer = raises(PanicError)
    host.propose({"a": [1, 2]}, alive={"b"})
    toy.answer = chains(1)
    host.propose({"a": [1, 2, 3], "b": [2, 3]}, alive={"b"})
    assert sorted(toy.finished) == ["a", "b"]
    assert toy.seen[-1].fresh == [3, 2]


def test_draft_tokens_that_the_engine_cut_are_not_counted() -> None:
    host = Host(Toy(chains(1, 2, 3, 4)))
    host.propose({"a": [1], "b": [2], "c": [3]})
    host.driver.observe(["a", "b", "c"], ints(2, 0, 0), verified=ints(2, 4, 0))
    assert host.statistics.draft_tokens == 6
    assert host.statistics.drafts == 2
    assert host.statistics.drafted_by_position.tolist() == [2, 2, 1, 1]
    assert host.statistics.accepted_by_position.tolist() == [1, 1, 0, 0]


def test_cut_draft_tokens_are_not_credited_to_their_source() -> None:
    def answer(step: Step) -> list[Draft]:
        return [Draft(ints(7, 8, 9), sources=ints(0, 1, 1))]

    class Two(Toy):
        sources = ("first", "second")

    host = Host(Two(answer))
    host.propose({"a": [1]})
    host.driver.observe(["a"], ints(1), verified=ints(2))
    found = {name: (s.draft_tokens, s.accepted_tokens) for name, s in host.statistics.by_source.items()}
    assert found == {"first": (1, 1), "second": (1, 0)}


def test_gauges_of_a_proposer_that_cannot_say_are_empty() -> None:
    toy = Toy()
    driver = Host(toy).driver
    assert driver.gauges() == {}
    toy.gauges = lambda: {"bytes": 12}  # type: ignore[method-assign]
    assert driver.gauges() == {"bytes": 12.0}
    toy.gauges = lambda: {"bytes": "many"}  # type: ignore[method-assign,dict-item,return-value]
    assert driver.gauges() == {}


def test_the_budget_of_the_newest_step_is_known() -> None:
    host = Host(Toy())
    host.propose({"a": [1], "b": [2]}, limits=ints(3, 0))
    assert host.statistics.snapshot()["budget"] == 1.5
