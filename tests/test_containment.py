"""Guards and the circuit breaker, without a driver."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from misbehaving_proposers import BadStrError, FakeClock, Hanger, PanicError

from spec_plugins.containment import CircuitBreaker, Guard, InlineGuard, LateError, RaisedError, ThreadGuard


def fail(error: BaseException) -> Any:
    raise error


def wait_until_free(guard: Guard) -> None:
    deadline = time.monotonic() + 60
    while not guard.free:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=["inline", "thread"])
def guard(request: pytest.FixtureRequest) -> Guard:
    return InlineGuard() if request.param == "inline" else ThreadGuard(60)


def test_a_result_comes_through(guard: Guard) -> None:
    assert [guard.call(lambda i=i: i) for i in (1, None, "x")] == [1, None, "x"]  # type: ignore[misc]
    assert guard.free


@pytest.mark.parametrize("error", [ValueError("x"), BadStrError(), PanicError(), GeneratorExit()], ids=repr)
def test_what_a_call_raises_is_the_cause(guard: Guard, error: BaseException) -> None:
    with pytest.raises(RaisedError) as caught:
        guard.call(lambda: fail(error))
    assert caught.value.__cause__ is error
    assert guard.free
    assert guard.call(lambda: 1) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exit_passes_inline_and_is_contained_on_a_thread(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        InlineGuard().call(lambda: fail(kind()))
    with pytest.raises(RaisedError) as caught:
        ThreadGuard(60).call(lambda: fail(kind()))
    assert isinstance(caught.value.__cause__, kind)


def test_calls_run_on_one_thread_of_their_own() -> None:
    guard = ThreadGuard(60, "acme")
    threads = {guard.call(threading.current_thread) for _ in range(3)}
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name == "spec-plugins-acme"


@pytest.mark.parametrize("busy", [False, True], ids=["a sleep", "a busy loop"])
def test_a_late_call_is_left_behind_and_its_result_thrown_away(busy: bool) -> None:
    guard = ThreadGuard(0.05)
    hang = Hanger(busy=busy)
    with pytest.raises(LateError, match="no answer within 50 ms"):
        guard.call(hang)
    assert not guard.free
    ran: list[int] = []
    with pytest.raises(LateError, match="has not returned"):
        guard.call(lambda: ran.append(1))
    hang.release.set()
    wait_until_free(guard)
    guard.allowance_seconds = 60
    assert guard.call(lambda: "mine") == "mine"
    assert ran == []


def test_what_a_late_call_raises_is_thrown_away() -> None:
    guard = ThreadGuard(0.05)
    hang = Hanger()
    with pytest.raises(LateError):
        guard.call(lambda: fail(ValueError(hang())))
    hang.release.set()
    wait_until_free(guard)
    guard.allowance_seconds = 60
    assert guard.call(lambda: 1) == 1


def test_the_thread_ends_with_its_guard() -> None:
    guard = ThreadGuard(60)
    thread = guard.call(threading.current_thread)
    del guard
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_hang_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
import time
from spec_plugins.containment import LateError, ThreadGuard
try:
    ThreadGuard(0.05).call(lambda: time.sleep(10_000))
except LateError:
    print("late")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "late\n"


# ---------------------------------------------------------------------------------------------------
# The breaker


def test_it_opens_after_so_many_faults_in_a_row(clock: FakeClock) -> None:
    breaker = CircuitBreaker(3, 10, 60, clock)
    assert [breaker.fail(), breaker.fail()] == [None, None]
    breaker.succeed()
    assert [breaker.fail(), breaker.fail(), breaker.resting] == [None, None, False]
    assert breaker.fail() == 10
    assert breaker.resting


def test_a_failed_try_doubles_the_rest_up_to_the_longest(clock: FakeClock) -> None:
    breaker = CircuitBreaker(2, 10, 35, clock)
    breaker.fail()
    for rest in (10, 20, 35, 35):
        assert breaker.fail() == rest
        clock.now += rest - 0.5
        assert breaker.resting
        clock.now += 0.5
        assert not breaker.resting


def test_a_success_closes_it_and_resets_the_rest(clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, 10, 60, clock)
    breaker.fail()
    clock.now += 10
    assert breaker.fail() == 20
    clock.now += 20
    breaker.succeed()
    assert not breaker.resting
    assert breaker.fail() == 10


def test_the_longest_rest_is_never_shorter_than_the_first(clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, 10, 5, clock)
    assert [breaker.fail(), breaker.fail()] == [10, 10]


@given(
    most=st.integers(1, 4),
    events=st.lists(st.one_of(st.sampled_from(["fail", "succeed"]), st.integers(1, 30)), max_size=60),
)
def test_it_does_as_a_plain_model_says(most: int, events: list[str | int]) -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(most, 8, 40, clock)
    faults, rests, until = 0, 0, clock.now  # in a row; since the last success
    for event in events:
        if isinstance(event, int):
            clock.now += event
        elif breaker.resting:
            continue  # the driver makes no call
        elif event == "succeed":
            breaker.succeed()
            faults = rests = 0
        else:
            faults += 1
            expected = min(40, 8 * 2**rests) if faults >= most else None
            assert breaker.fail() == expected
            if expected is not None:
                rests, until = rests + 1, clock.now + expected
        assert breaker.resting == (clock.now < until)
