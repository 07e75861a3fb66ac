"""Whatever a proposer does inside vLLM, the engine answers as without it, and the fault is counted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import toy_proposers
from offline import greedy, our_warnings, statistics_of

FAULTS: dict[str, set[str]] = {
    "toy-raises": {"raised"},
    "toy-garbage": {"token_out_of_range", "wrong_count", "not_a_draft", "wrong_parents", "over_budget"},
    "toy-sleeps": {"late"},
}


@pytest.fixture(scope="module")
def plain(make_engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Answers without speculation."""
    with make_engine() as llm:
        return greedy(llm, prompts, 60)


@pytest.mark.parametrize("proposer", FAULTS)
def test_the_output_is_that_without_it(
    make_engine: Any, prompts: list[list[int]], plain: list[list[int]], proposer: str
) -> None:
    toy_proposers.register()
    # Faults are not to end in a rest before all kinds have come.
    allowance = 100.0 if proposer == "toy-sleeps" else 60_000.0
    contained = {"time_allowance_ms": allowance, "max_faults": 1000 if proposer == "toy-garbage" else 3}
    with our_warnings() as warnings, make_engine(proposer, fields={"containment": contained}) as llm:
        started = time.monotonic()
        assert greedy(llm, prompts, 60) == plain
        seconds = time.monotonic() - started
        figures = statistics_of(llm).snapshot()
        assert greedy(llm, prompts[:2], 10) == [t[:10] for t in plain[:2]]
    assert set(figures["faults"]) == FAULTS[proposer]
    assert any(proposer in w for w in warnings)
    if proposer == "toy-garbage":
        assert figures["rests"] == 0
    else:
        assert figures["accepted_tokens"] == 0
        assert figures["skipped_steps"] > 0
    if proposer == "toy-raises":
        assert (figures["faults"]["raised"], figures["rests"]) == (3, 1)
    if proposer == "toy-sleeps":
        # It was waited for no longer than allowed, each time that it was asked.
        assert figures["propose_seconds"] < 0.5 * figures["faults"]["late"]
        assert figures["faults"]["late"] <= 1 + seconds / 5
