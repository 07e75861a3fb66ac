"""SmolLM2-135M-Instruct in float32 on real prompts, in vLLM: greedy output does not change."""

from __future__ import annotations

from typing import Any

import pytest
from offline import MakeEngine, greedy, statistics_of
from real_model import CONTEXT, MODEL, NEEDS_MODEL, real_prompts

pytestmark = [*NEEDS_MODEL, pytest.mark.timeout(1200)]
SETTINGS = {"model": str(MODEL), "max_model_len": CONTEXT, "max_num_seqs": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"k": 8},
    "ngram": {"k": 4},
}
TOKENS = 24


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return real_prompts()


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, texts: list[list[int]]) -> list[list[int]]:
    with make_engine(**SETTINGS) as llm:
        return greedy(llm, texts, TOKENS, ignore_eos=False)


@pytest.mark.parametrize("proposer", CONFIGS)
def test_output_is_the_targets(
    make_engine: MakeEngine, texts: list[list[int]], expected: list[list[int]], proposer: str
) -> None:
    with make_engine(proposer, **SETTINGS, **CONFIGS[proposer]) as llm:
        answers = greedy(llm, texts, TOKENS, ignore_eos=False)
        figures = statistics_of(llm).snapshot()
    assert len(answers) >= 60
    assert answers == expected
    assert figures["accepted_tokens"] > 50
    assert not figures["faults"]
