"""Keeps a proposer's faults away from the engine: a guard for each call, a breaker over many."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["CircuitBreaker", "Guard", "InlineGuard", "LateError", "RaisedError", "ThreadGuard"]

T = TypeVar("T")


class LateError(Exception):
    """A call took longer than its allowance, or an earlier one has still not returned."""


class RaisedError(Exception):
    """A call raised; ``__cause__`` is what."""


class Guard(Protocol):
    """Runs a call and lets nothing through but its result."""

    @property
    def free(self) -> bool:
        """False while a late call has not returned."""

    def contains(self, error: BaseException) -> bool:
        """Whether what came out of a call can only be the call's own."""

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function``.

        Raises:
            RaisedError: it raised.
            LateError: it is late.
        """


class InlineGuard:
    """Calls on the engine's own thread: no cost, and no help against a hang."""

    free = True

    def contains(self, error: BaseException) -> bool:
        """All but what a signal handler raises, which is for the engine: Ctrl-C, an orderly exit."""
        return not isinstance(error, (KeyboardInterrupt, SystemExit))

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function``; raises :class:`RaisedError` where it raised."""
        try:
            return function()
        except BaseException as error:
            if not self.contains(error):
                raise
            raise RaisedError from error


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.result: T | None = None
        self.error: BaseException | None = None
        self.returned = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # SystemExit must not end the thread either
            self.error = error
        self.returned = True
        self.done.release()


def _work(jobs: SimpleQueue[_Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or the arrays of the last step would live until the next


class ThreadGuard:
    """Calls on a thread of its own, which is left behind while a call is late. Some 30 µs a call.

    Python cannot stop a thread: a late call goes on, its result is thrown away, and no other call
    starts until it has returned. The thread is a daemon, so it never holds up the engine's exit, and
    ends with the guard.
    """

    def __init__(self, allowance_seconds: float, name: str = "proposer") -> None:
        self.allowance_seconds = allowance_seconds
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._out: _Job[Any] | None = None
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name=f"spec-plugins-{name}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def contains(self, error: BaseException) -> bool:
        """Everything: signals reach the main thread only."""
        return True

    @property
    def free(self) -> bool:
        """False while a late call has not returned."""
        if self._out is not None and self._out.returned:
            self._out = None
        return self._out is None

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function``.

        Raises:
            RaisedError: it raised.
            LateError: it is not back within the allowance, or an earlier one is still out.
        """
        if not self.free:
            raise LateError("an earlier call has not returned")
        job = _Job(function)
        self._out = job  # before the wait, which a signal may end
        self._jobs.put(job)
        if not job.done.acquire(timeout=self.allowance_seconds):
            raise LateError(f"no answer within {self.allowance_seconds * 1e3:g} ms")
        self._out = None
        if job.error is not None:
            error, job.error = job.error, None  # no cycle through the traceback
            raise RaisedError from error
        return job.result  # type: ignore[return-value]


class CircuitBreaker:
    """Closed while things go well; open for a rest after faults in a row; then one try decides.

    Each failed try doubles the rest, up to a longest one; a success closes it and resets the rest.
    """

    def __init__(
        self, max_faults: int, rest_seconds: float, longest_rest_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.max_faults, self.rest_seconds = max_faults, rest_seconds
        self.longest_rest_seconds, self.clock = max(rest_seconds, longest_rest_seconds), clock
        self._faults = 0
        self._rest = rest_seconds
        self._until: float | None = None

    @property
    def resting(self) -> bool:
        """True while no call should be made."""
        return self._until is not None and self.clock() < self._until

    def succeed(self) -> None:
        """A call went well."""
        self._faults, self._rest, self._until = 0, self.rest_seconds, None

    def fail(self) -> float | None:
        """A call went wrong. Returns the seconds of rest that this begins, if it does."""
        self._faults += 1
        if self._faults < self.max_faults:
            return None
        rest = self._rest
        self._until = self.clock() + rest
        self._rest = min(self.longest_rest_seconds, 2 * rest)
        self._faults = self.max_faults - 1  # one failed try is enough to rest again
        return rest
