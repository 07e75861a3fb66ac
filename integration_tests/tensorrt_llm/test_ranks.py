"""Several ranks: threads, each with its own drafter and executor, that take the same steps.

The executors are stand-ins, and so is their MPI. In TensorRT-LLM ranks compute one forward pass together,
which is right only where all of them have the same draft tokens in it; here each records those that it was
given.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from executor_stand_in import VOCAB, ExecutorStandIn, engine_stand_in, without_drafting

from spec_plugins import Draft, Proposer, Step
from spec_plugins.adapters.tensorrt_llm import ranks as ranks_module
from spec_plugins.adapters.tensorrt_llm.drafter import engine_part
from spec_plugins.adapters.tensorrt_llm.ranks import Ranks
from spec_plugins.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("engine")

Recorded = list[dict[int, list[int]]]


class Fickle(Proposer):
    """No two of them draft the same."""

    bounded = True
    made = 0

    def load(self, target: Any) -> None:
        type(self).made += 1
        self.chance = random.Random(type(self).made)

    def propose(self, step: Step) -> list[Draft]:
        return [
            Draft(np.array([self.chance.randrange(VOCAB) for _ in range(min(2, budget))], np.int32))
            for budget in step.budgets.tolist()
        ]


class Late(Fickle):
    """Late now and then, so that it is put to rest: by the clock of its own rank."""

    def propose(self, step: Step) -> list[Draft]:
        if self.chance.random() < 0.3:
            time.sleep(0.003)
        return [Draft(np.full(min(2, budget), 3, np.int32)) for budget in step.budgets.tolist()]


class Broken(Fickle):
    """Fails at the start."""

    def load(self, target: Any) -> None:
        raise RuntimeError("no weights")


HASTY = {"time_allowance_ms": 2, "max_faults": 1, "rest_seconds": 0.005, "longest_rest_seconds": 0.005}


def run(
    mpi: Any,
    made: Callable[..., Any],
    crowd: Callable[..., Any],
    source: dict[str, Any],
    slow: int | None = None,
) -> tuple[list[Recorded], list[ExecutorStandIn]]:
    """Serve the crowd on two ranks; the drafts of each in each step, and the executors."""
    config = made({"num_speculative_tokens": 4, **source}, tensor_parallel_size=2)
    pickled = pickle.dumps((config.drafter, config.resource_manager))
    chance = random.Random(1)

    def work(rank: int) -> tuple[Recorded, ExecutorStandIn]:
        drafter, manager = pickle.loads(pickled)
        recorded: Recorded = []
        prepare = drafter.prepare_draft_tokens

        def record(batch: Any, resource_manager: Any = None) -> None:
            if rank == slow and chance.random() < 0.2:
                time.sleep(0.004)
            prepare(batch, resource_manager)
            recorded.append({r.request_id: list(r.py_draft_tokens) for r in batch.generation_requests})

        drafter.prepare_draft_tokens = record
        limits = dict.fromkeys(range(12, 20), 0) | dict.fromkeys(range(20, 24), 2)
        executor = ExecutorStandIn(drafter, manager, limits=limits, skipped=range(26, 32), preempt_every=5)
        executor.run(crowd())
        return recorded, executor

    results = mpi.run(work)
    return [recorded for recorded, _ in results], [executor for _, executor in results]


def check_output(executors: list[ExecutorStandIn], crowd: Callable[..., Any]) -> None:
    requests = [r for group in crowd().values() for r in group]
    plain = {r.request_id: without_drafting(r.tokens, r.py_max_new_tokens) for r in requests}
    assert len(plain) == 64
    for executor in executors:
        assert executor.done == plain


@pytest.mark.parametrize(
    "source",
    [
        {"proposer": "ngram"},
        {"proposer": "suffix"},
        {"proposer": "lookahead"},
        {"proposer": "combine", "options": {"proposers": [{"name": "suffix"}, {"name": "ngram"}]}},
    ],
    ids=lambda s: s["proposer"],
)
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_all_ranks_have_the_same_drafts(source: Any, slow: int | None, made: Any, crowd: Any) -> None:
    with engine_stand_in(ranks=2) as engine:
        (first, second), executors = run(engine.mpi, made, crowd, source, slow)
    assert first == second
    assert len(first) > 20
    assert executors[0].accepted > 100
    check_output(executors, crowd)


@pytest.mark.parametrize("proposer", [Fickle, Late])
@pytest.mark.parametrize("shared", [True, False])
def test_what_differs_by_rank_or_by_the_clock_is_drafted_once(
    proposer: type[Proposer], shared: bool, made: Any, crowd: Any, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: ranks that draft for themselves have other drafts."""
    source = {"proposer": toy(proposer), "containment": HASTY}
    with engine_stand_in(ranks=2) as engine:
        if not shared:
            monkeypatch.setattr(sys.modules["tensorrt_llm._utils"], "mpi_rank", lambda: 0)
            monkeypatch.setattr(sys.modules["tensorrt_llm._utils"], "mpi_broadcast", lambda obj, root: obj)
        (first, second), executors = run(engine.mpi, made, crowd, source)
    assert (first == second) == shared
    assert any(any(drafts.values()) for drafts in first)
    check_output(executors, crowd)


def test_a_proposer_that_cannot_load_leaves_no_rank_waiting(
    made: Any, crowd: Any, toy: Any, caplog: Any
) -> None:
    with engine_stand_in(ranks=2) as engine:
        _, executors = run(engine.mpi, made, crowd, {"proposer": toy(Broken)})
    check_output(executors, crowd)
    assert executors[0].drafted == executors[1].drafted == 0
    assert caplog.text.count("nothing can be drafted") == 1


def test_only_the_first_rank_holds_state(made: Any, crowd: Any) -> None:
    with engine_stand_in(ranks=2) as engine:
        _, executors = run(engine.mpi, made, crowd, {"proposer": "suffix"})
    first, second = (executor.drafter.worker.state for executor in executors)
    assert first is not None
    assert first.driver.requests_held == 0
    assert second is None


def test_a_request_that_the_first_rank_does_not_have_gets_no_draft() -> None:
    """As where ranks serve requests of their own (attention data parallelism), which is not supported."""
    with engine_stand_in(ranks=2) as engine:

        def work(rank: int) -> list[list[int]]:
            return Ranks(2, engine_part).share([1, 2 + rank], None if rank else [[5, 6], [7]])

        assert engine.mpi.run(work) == [[[5, 6], [7]], [[5, 6], []]]


@pytest.mark.parametrize(
    ("ranks", "said", "torchs", "says"),
    [
        (2, 1, 1, "this engine has 2 ranks, and tensor_parallel_size 1 was said"),
        (4, 2, 1, "this engine has 4 ranks, and tensor_parallel_size 2 was said"),
        (1, 2, 1, "this engine has 1 ranks, and tensor_parallel_size 2 was said"),
        (1, 2, 2, "this engine's 2 ranks are not connected by MPI"),
        (1, 1, 2, "this engine has 2 ranks, and tensor_parallel_size 1 was said"),
    ],
)
def test_ranks_that_could_not_draft_the_same_draft_nothing(
    ranks: int, said: int, torchs: int, says: str, made: Any, crowd: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(ranks_module, "_torch_ranks", lambda: torchs)
    with engine_stand_in(ranks=ranks):
        with pytest.raises(UnsupportedError, match=says):
            Ranks(said, engine_part)
        config = made("suffix", tensor_parallel_size=said)
        executor = ExecutorStandIn(config.drafter, config.resource_manager)
        executor.run(crowd())
    check_output([executor], crowd)
    assert executor.drafted == 0
    assert caplog.text.count(says) == 1
