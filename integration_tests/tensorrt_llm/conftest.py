"""Drafters and executors of the stand-in engine. Nothing here is TensorRT-LLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from executor_stand_in import VOCAB, RequestStandIn, engine_stand_in

from spec_plugins import launch
from spec_plugins.adapters.tensorrt_llm import speculation
from spec_plugins.registry import Registration, registry


@pytest.fixture(params=["first", "second", "third"])
def form(request: pytest.FixtureRequest) -> str:
    """Each form that the constructor of the engine's drafters has had."""
    return str(request.param)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in engine, with drafters of the newest form."""
    for module in (launch, speculation):
        monkeypatch.setattr(module, "installed_version", lambda name: None)
    with engine_stand_in() as stand_in:
        yield stand_in


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], str]:
    """Registers a proposer; gives its name."""

    def register(cls: type) -> str:
        name = f"toy-{cls.__name__.lower()}"
        monkeypatch.setitem(
            registry().proposers, name, Registration(name, f"{cls.__module__}:{cls.__name__}", "tests")
        )
        return name

    return register


@pytest.fixture
def made() -> Callable[..., Any]:
    """A drafter's configuration, for the toy target."""

    def make(source: Any, **more: Any) -> Any:
        return speculation.speculative_config(source, "toy", vocab_size=VOCAB, max_seq_len=512, **more)

    return make


@pytest.fixture
def crowd() -> Callable[..., dict[int, list[RequestStandIn]]]:
    """Requests by the step that they join at: different prompts and lengths, all from one seed."""

    def make(requests: int = 64, every: int = 3) -> dict[int, list[RequestStandIn]]:
        chance, arrivals = random.Random(7), {}
        for number in range(requests):
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))]
            made = RequestStandIn(number, prompt, chance.randrange(1, 70))
            arrivals.setdefault(every * (number // 8), []).append(made)
        return arrivals

    return make
