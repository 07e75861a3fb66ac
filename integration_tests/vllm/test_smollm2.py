"""SmolLM2-135M-Instruct in float32 on real prompts, in vLLM: greedy output does not change."""

from __future__ import annotations

import pytest
from offline import MakeEngine, greedy, statistics_of
from real_model import (
    CONTEXT,
    MODEL,
    NEEDS_MODEL,
    assert_all_were_accepted,
    every_method,
    real_prompts,
)

pytestmark = [*NEEDS_MODEL, pytest.mark.timeout(1200)]
SETTINGS = {"model": str(MODEL), "max_model_len": CONTEXT, "max_num_seqs": 16}
TOKENS = 24


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return real_prompts()


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, texts: list[list[int]]) -> list[list[int]]:
    with make_engine(**SETTINGS) as llm:
        return greedy(llm, texts, TOKENS, ignore_eos=False)


def test_output_is_the_targets(
    make_engine: MakeEngine, texts: list[list[int]], expected: list[list[int]]
) -> None:
    fields = every_method(trees=False)
    options, k = fields["options"], fields["num_speculative_tokens"]
    with make_engine("combine", **SETTINGS, k=k, options=options) as llm:
        answers = greedy(llm, texts, TOKENS, ignore_eos=False)
        figures = statistics_of(llm).snapshot()
    assert len(answers) >= 60
    assert answers == expected
    assert_all_were_accepted(figures)
