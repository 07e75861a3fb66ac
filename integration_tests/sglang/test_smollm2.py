"""SmolLM2-135M-Instruct in float32 on real prompts, in SGLang: greedy output does not change."""

from __future__ import annotations

import pytest
from offline import MakeEngine
from real_model import (
    CONTEXT,
    MODEL,
    NEEDS_MODEL,
    assert_all_were_accepted,
    every_method,
    real_prompts,
)
from speculating import configured, figures_of
from workloads import ask, greedy, ids

pytestmark = [*NEEDS_MODEL, pytest.mark.timeout(1200)]
SETTINGS = {
    "model_path": str(MODEL), "context_length": CONTEXT, "max_total_tokens": 16 * CONTEXT,
    "max_running_requests": 16,
}  # fmt: skip
TOKENS = 24


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return real_prompts()


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, texts: list[list[int]]) -> list[list[int]]:
    with make_engine(**SETTINGS) as engine:
        return ids(ask(engine, texts, greedy(TOKENS, ignore_eos=False)))


def test_output_is_the_targets(
    make_engine: MakeEngine, texts: list[list[int]], expected: list[list[int]]
) -> None:
    with (
        configured(every_method(trees=True)) as algorithm,
        make_engine(**SETTINGS, speculative_algorithm=algorithm) as engine,
    ):
        answers = ids(ask(engine, texts, greedy(TOKENS, ignore_eos=False)))
        figures = figures_of(engine)
    assert len(answers) >= 60
    assert answers == expected
    assert_all_were_accepted(figures)
