"""Toy proposers, most of them bad, and a toy host that runs them through a driver."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_plugins.config import Config, Containment
from spec_plugins.driver import Driver
from spec_plugins.policy import Policy
from spec_plugins.proposer import Draft, Drafts, Need, Proposer, Step, Target
from spec_plugins.token_store import TokenStore
from spec_plugins.validation import Fault

VOCAB = 100
Answer = Callable[[Step], Any]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def make_step(
    n: int = 2,
    budgets: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    *,
    writeable: bool = False,
) -> Step:
    """A step of ``n`` requests with the tokens 1, 2, 3, with arrays as the driver gives them."""
    tokens = np.tile(ints(1, 2, 3), (n, 1))
    numbers = np.zeros((6, n), np.int32)
    numbers[0] = np.arange(n)
    numbers[1] = numbers[2] = numbers[5] = 3
    numbers[3] = 4 if budgets is None else budgets
    numbers[4] = numbers[3] if depths is None else depths
    tokens.setflags(write=writeable)
    numbers.setflags(write=writeable)
    return Step(tuple(f"r{i}" for i in range(n)), tokens, *numbers)


def obeys(drafts: Sequence[Draft], step: Step, vocab_size: int = VOCAB) -> bool:
    """Whether drafts are what a host may rely on."""
    if len(drafts) != len(step):
        return False
    for i, draft in enumerate(drafts):
        n = len(draft.tokens)
        arrays = [draft.tokens] if draft.parents is None else [draft.tokens, draft.parents]
        if any(a.dtype != np.int32 or a.shape != (n,) for a in arrays) or n > step.budgets[i]:
            return False
        tokens = draft.tokens.tolist()
        parents = list(range(-1, n - 1)) if draft.parents is None else draft.parents.tolist()
        if any(not 0 <= t < vocab_size for t in tokens):
            return False
        if any(not -1 <= p < j for j, p in enumerate(parents)):
            return False
        if len(set(zip(parents, tokens, strict=True))) != n:
            return False
        depths = [0] * n
        for j, p in enumerate(parents):
            depths[j] = 1 if p < 0 else depths[p] + 1
        if max(depths, default=0) > step.depths[i]:
            return False
    return True


def breaks_a_trusting_host(answer: Answer, step: Step) -> bool:
    """The negative control: without checks, this answer raises or gets through as it is."""
    try:
        given = answer(step)
        if isinstance(given, Drafts):
            if given.counts.dtype != np.int32 or [len(d) for d in given] != given.counts.tolist():
                return True
            return not obeys(given, step)
        return len(given) < 0 or not obeys(list(itertools.islice(given, 100)), step)
    except Exception:
        return True


# ---------------------------------------------------------------------------------------------------
# Proposers


@dataclass
class Seen:
    """A copy of what a proposer was shown."""

    ids: tuple[str, ...]
    tokens: list[list[int]]
    fresh: list[int]
    budgets: list[int]
    depths: list[int]
    prompts: list[int]


def no_drafts(step: Step) -> list[Draft]:
    return [Draft(ints()) for _ in range(len(step))]


def chains(*tokens: int) -> Answer:
    """The same chain for every request, cut to its budget."""
    return lambda step: [Draft(ints(*tokens)[: step.budgets[i]]) for i in range(len(step))]


class Toy(Proposer):
    """Answers as it is told, on the engine's thread, and notes what it sees."""

    name = "toy"
    bounded = True

    def __init__(self, answer: Answer = no_drafts, on_finish: Callable[[str], object] = id) -> None:
        self.answer, self.on_finish = answer, on_finish
        self.seen: list[Seen] = []
        self.finished: list[str] = []
        self.target: Target | None = None

    def load(self, target: Target) -> None:
        self.target = target

    def propose(self, step: Step) -> Any:
        self.seen.append(
            Seen(
                tuple(step.request_ids),
                [step.tokens(i).tolist() for i in range(len(step))],
                step.fresh.tolist(),
                step.budgets.tolist(),
                step.depths.tolist(),
                step.prompt_lengths.tolist(),
            )
        )
        return self.answer(step)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        self.on_finish(request_id)


class ThreadedToy(Toy):
    """The same on a thread of its own."""

    bounded = False


class Hanger:
    """A call that never returns, except that a test can end it at last."""

    def __init__(self, *, busy: bool = False) -> None:
        self.busy = busy
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, *_: object) -> Any:
        self.entered.set()
        if self.busy:
            while not self.release.is_set():
                pass
        else:
            self.release.wait()
        return [Draft(ints(66))]


class BadStrError(Exception):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


class PanicError(BaseException):
    """Like the one that a panic in Rust becomes."""


def raises(error: BaseException | type[BaseException]) -> Callable[[object], Any]:
    def answer(_: object) -> Any:
        raise error

    return answer


def recurse(step: Step) -> Any:
    return recurse(step)


class Lies(Sequence[Draft]):
    """Says it has ``said`` drafts, and has ``had``; ``None``: without end."""

    def __init__(self, said: int, had: int | None) -> None:
        self.said, self.had = said, had

    def __len__(self) -> int:
        return self.said

    def __getitem__(self, i: Any) -> Any:
        return Draft(ints(1))

    def __iter__(self) -> Iterator[Draft]:
        return (Draft(ints(1)) for _ in (itertools.count() if self.had is None else range(self.had)))


class LazyDraft(Draft):
    """A draft that works out its tokens when they are read, or fails to."""

    def __init__(self, work: Callable[[], Any]) -> None:
        object.__setattr__(self, "work", work)

    @property
    def tokens(self) -> Any:
        return self.work()  # type: ignore[attr-defined]


def each(*fields: Any, **more: Any) -> Answer:
    """The same draft for every request."""
    return lambda step: [Draft(*fields, **more) for _ in range(len(step))]


def packed(tokens: Any, counts: Any, *rest: Any) -> Answer:
    """A packed answer to two requests."""
    arrays: Any = [np.asarray(field) for field in (tokens, counts, *rest)]
    return lambda step: Drafts(*arrays)


def rows(*values: Sequence[int]) -> Any:
    return np.array(values, np.int32)


TWO = ints(2, 2)
# What a proposer must not return, and what the driver counts it as.
BAD_ANSWERS: dict[str, tuple[Answer, Fault]] = {
    "None": (lambda step: None, Fault.NOT_A_DRAFT),
    "a number": (lambda step: 7, Fault.NOT_A_DRAFT),
    "a generator": (lambda step: (Draft(ints(1)) for _ in step.request_ids), Fault.NOT_A_DRAFT),
    "a string": (lambda step: "x" * len(step), Fault.NOT_A_DRAFT),
    "a dict": (lambda step: dict.fromkeys(step.request_ids), Fault.NOT_A_DRAFT),
    "an array": (lambda step: np.ones((len(step), 2), np.int32), Fault.NOT_A_DRAFT),
    "Nones": (lambda step: [None] * len(step), Fault.NOT_A_DRAFT),
    "lists of tokens": (lambda step: [[1, 2]] * len(step), Fault.NOT_A_DRAFT),
    "a draft too few": (lambda step: no_drafts(step)[1:], Fault.WRONG_COUNT),
    "a draft too many": (lambda step: [*no_drafts(step), Draft(ints(1))], Fault.WRONG_COUNT),
    "nothing": (lambda step: [], Fault.WRONG_COUNT),
    "packed, too few": (lambda step: Drafts.empty(len(step) - 1), Fault.WRONG_COUNT),
    "fewer than it says": (lambda step: Lies(len(step), len(step) - 1), Fault.WRONG_COUNT),
    "without end": (lambda step: Lies(len(step), None), Fault.WRONG_COUNT),
    "tokens that raise": (
        lambda step: [LazyDraft(lambda: 1 // 0) for _ in range(len(step))],
        Fault.NOT_A_DRAFT,
    ),
    "an unmade draft": (lambda step: [Draft.__new__(Draft)] * len(step), Fault.NOT_A_DRAFT),
    "tokens None": (each(None), Fault.NOT_A_DRAFT),
    "tokens of floats": (each(np.ones(2)), Fault.NOT_A_DRAFT),
    "tokens of bools": (each(np.ones(2, np.bool_)), Fault.NOT_A_DRAFT),
    "tokens of strings": (each(["a", "b"]), Fault.NOT_A_DRAFT),
    "a string of tokens": (each("ab"), Fault.NOT_A_DRAFT),
    "tokens beyond any integer": (each([2**70]), Fault.NOT_A_DRAFT),
    "ragged tokens": (each([[1], [2, 3]]), Fault.NOT_A_DRAFT),
    "two-dimensional tokens": (each(np.ones((2, 2), np.int32)), Fault.NOT_A_DRAFT),
    "a scalar token": (each(np.int32(4)), Fault.NOT_A_DRAFT),
    "a token past the vocabulary": (each(ints(1, VOCAB)), Fault.TOKEN_OUT_OF_RANGE),
    "a negative token": (each(ints(1, -1)), Fault.TOKEN_OUT_OF_RANGE),
    "a token that wraps to 0": (each(np.array([2**32])), Fault.TOKEN_OUT_OF_RANGE),
    "a token that wraps to -1": (each(np.array([2**64 - 1], np.uint64)), Fault.TOKEN_OUT_OF_RANGE),
    "a token that wraps to 1": (each(np.array([-(2**32) + 1])), Fault.TOKEN_OUT_OF_RANGE),
    "a bad token in a tree": (each(ints(1, VOCAB), ints(-1, -1)), Fault.TOKEN_OUT_OF_RANGE),
    "its own parent": (each(ints(1, 2), ints(-1, 1)), Fault.WRONG_PARENTS),
    "a parent after its child": (each(ints(1, 2, 3), ints(-1, 2, -1)), Fault.WRONG_PARENTS),
    "a parent out of range": (each(ints(1, 2), ints(-1, 70)), Fault.WRONG_PARENTS),
    "a parent below -1": (each(ints(1, 2), ints(-1, -2)), Fault.WRONG_PARENTS),
    "a parent that wraps": (each(ints(1, 2), np.array([-1, 2**32])), Fault.WRONG_PARENTS),
    "too few parents": (each(ints(1, 2), ints(-1)), Fault.WRONG_PARENTS),
    "too many parents": (each(ints(1, 2), ints(-1, 0, 1)), Fault.WRONG_PARENTS),
    "parents of floats": (each(ints(1, 2), np.array([-1.0, 0.0])), Fault.WRONG_PARENTS),
    "parents that are none": (each(ints(1, 2), "ab"), Fault.WRONG_PARENTS),
    "ragged parents": (each(ints(1, 2), [[-1], [0, 1]]), Fault.WRONG_PARENTS),
    "siblings alike": (each(ints(1, 2, 2), ints(-1, 0, 0)), Fault.DUPLICATE_SIBLINGS),
    "packed: counts past the width": (packed([[1, 2]] * 2, ints(3, 3)), Fault.NOT_A_DRAFT),
    "packed: counts without any width": (packed(rows([], []), TWO), Fault.NOT_A_DRAFT),
    "packed: negative counts": (packed(rows([1, 2, 3], [1, 2, 3]), ints(-1, -1)), Fault.NOT_A_DRAFT),
    "packed: counts of floats": (packed(rows([1, 2], [1, 2]), np.ones(2)), Fault.NOT_A_DRAFT),
    "packed: counts in a matrix": (packed(rows([1, 2], [1, 2]), [TWO, TWO]), Fault.NOT_A_DRAFT),
    "packed: tokens in one row": (packed(ints(1, 2), TWO), Fault.NOT_A_DRAFT),
    "packed: tokens for another": (packed(rows([1, 2]), TWO), Fault.NOT_A_DRAFT),
    "packed: tokens of floats": (packed(np.ones((2, 2)), TWO), Fault.NOT_A_DRAFT),
    "packed: a bad token": (packed(rows([1, 200], [1, 200]), TWO), Fault.TOKEN_OUT_OF_RANGE),
    "packed: narrow parents": (packed(rows([1, 2], [1, 2]), TWO, rows([-1], [-1])), Fault.WRONG_PARENTS),
    "packed: a bad parent": (packed(rows([1, 2], [1, 2]), TWO, rows([-1, 5], [-1, 5])), Fault.WRONG_PARENTS),
    "packed: siblings alike": (
        packed(rows([2, 2], [2, 2]), TWO, rows([-1, -1], [-1, -1])),
        Fault.DUPLICATE_SIBLINGS,
    ),
    "too many tokens": (each(np.arange(50)), Fault.OVER_BUDGET),
    "far too many tokens": (each(np.arange(100_000) % VOCAB), Fault.OVER_BUDGET),
    "packed: too many tokens": (packed(rows(range(50), range(50)), ints(50, 50)), Fault.OVER_BUDGET),
}


# ---------------------------------------------------------------------------------------------------
# The host


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Host:
    """Drives a proposer as an adapter does, with requests as lists of tokens."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        provides: Sequence[Need] = (),
        depth: int = 4,
        nodes: int | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **containment: Any,
    ) -> None:
        # So long by default that no loaded machine makes a good proposer late.
        contained = Containment(**{"time_allowance_ms": 60_000.0, **containment})
        self.driver = Driver(
            proposer,
            Target(VOCAB, 4096, 16, frozenset(provides), depth, nodes or depth),
            Config(num_speculative_tokens=depth, max_draft_nodes=nodes, containment=contained),
            policy,
            clock,
        )
        self.statistics = self.driver.statistics

    def propose(self, requests: Mapping[str, Sequence[int]], **more: Any) -> Drafts:
        """One step; the order of the mapping is that of the batch."""
        ids = list(requests)
        self.store = TokenStore(rows=1, capacity=4)
        for r in ids:
            self.store.append(r, requests[r])
        rows, lengths = self.store.rows(ids)
        return self.driver.propose(ids, self.store.token_ids, rows, lengths, **more)

    def tokens(self, requests: Mapping[str, Sequence[int]], **more: Any) -> list[list[int]]:
        """One step's draft tokens."""
        return [d.tokens.tolist() for d in self.propose(requests, **more)]

    def observe(self, accepted: Mapping[str, int], paths: Any = None, **more: Any) -> None:
        self.driver.observe(
            list(accepted), ints(*accepted.values()), None if paths is None else np.array(paths), **more
        )

    def faults(self) -> dict[str, int]:
        return {fault.value: n for fault, n in self.statistics.faults.items() if n}

    def held(self) -> dict[str, int]:
        """How much the driver keeps by request."""
        d = self.driver
        kept = {
            "seen": d._held(), "stale": d._stale, "prompts": d._places, "strangers": d._strangers,
            "pending": [place for place in d._places.values() if d._pending[place]],
            "verified": d._verified, "running": self.statistics.running,
        }  # fmt: skip
        return {name: len(those) for name, those in kept.items() if those}

    def wait_until_free(self, seconds: float = 60.0) -> None:
        """Wait for a late call to return."""
        deadline = time.monotonic() + seconds
        while not self.driver._guard.free:
            assert time.monotonic() < deadline, "the late call never returned"
            time.sleep(0.001)
