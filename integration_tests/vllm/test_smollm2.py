"""SmolLM2-135M-Instruct in float32 on real prompts, in vLLM: greedy output does not change."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from offline import greedy, statistics_of

MODEL = Path(os.environ.get("SPEC_PLUGINS_MODEL", "missing"))
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs the model: `make model`, and SPEC_PLUGINS_MODEL set to it"
    ),
]
CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"k": 8},
    "ngram": {"k": 4},
}
TOKENS = 24
MakeEngine = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """64 prompts: HumanEval, MT-bench and agents."""
    from transformers import AutoTokenizer

    from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench

    data = MODEL.parent.parent / "data"
    chosen = [list(p.messages) for p in [*humaneval(data)[:32], *mtbench(data)[:24]]]
    chosen += [[dict(p.messages[-1], role="user")] for p in agent_replays(data)[:8]]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rendered = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in chosen
    ]
    return [ids[-700:] for ids in rendered]


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, texts: list[list[int]]) -> list[list[int]]:
    with make_engine(model=str(MODEL), max_model_len=1024, max_num_seqs=16) as llm:
        return greedy(llm, texts, TOKENS, ignore_eos=False)


@pytest.mark.parametrize("proposer", CONFIGS)
def test_output_is_the_targets(
    make_engine: MakeEngine, texts: list[list[int]], expected: list[list[int]], proposer: str
) -> None:
    settings = {"model": str(MODEL), "max_model_len": 1024, "max_num_seqs": 16, **CONFIGS[proposer]}
    with make_engine(proposer, **settings) as llm:
        answers = greedy(llm, texts, TOKENS, ignore_eos=False)
        figures = statistics_of(llm).snapshot()
    assert len(answers) >= 60
    assert answers == expected
    assert figures["accepted_tokens"] > 50
    assert not figures["faults"]
