"""SmolLM2-135M-Instruct in float32 on real prompts: greedy output does not change."""

from __future__ import annotations

from typing import Any

import pytest
from real_model import MODEL, NEEDS_MODEL, assert_all_were_accepted, every_method

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from spec_plugins.adapters.transformers import (  # noqa: E402
    Engine,
    SamplingParams,
    load_model,
)
from spec_plugins.evaluation import demo  # noqa: E402
from spec_plugins.evaluation.prompts import humaneval, mtbench  # noqa: E402

pytestmark = NEEDS_MODEL
PARAMS = SamplingParams(max_new_tokens=40)
CONFIGS = {**demo.CONFIGS, "merged": {
    "proposer": "combine", "num_speculative_tokens": 6, "max_draft_nodes": 12,
    "options": {"proposers": ["suffix", "ngram"], "mode": "merged"},
}}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_model(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    data = MODEL.parent.parent / "data"
    return [list(p.messages) for p in [*humaneval(data)[:20], *mtbench(data)[:10]]]


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, Any], prompts: list[Any]) -> list[list[int]]:
    engine = Engine(*loaded, max_num_seqs=6)
    return [a.token_ids for a in engine.generate(prompts, PARAMS)]


def test_plain_equals_transformers(
    loaded: tuple[Any, Any], prompts: list[Any], expected: list[list[int]]
) -> None:
    model, tokenizer = loaded
    for i in (0, 19, 20, 29):
        ids = tokenizer.apply_chat_template(
            prompts[i], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = model.generate(ids, max_new_tokens=PARAMS.max_new_tokens, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == expected[i]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_proposer_leaves_output_as_it_is(
    loaded: tuple[Any, Any], prompts: list[Any], expected: list[list[int]], name: str
) -> None:
    # Long, so that no loaded machine makes a good proposer late.
    spec = {**CONFIGS[name], "containment": {"time_allowance_ms": 60_000.0}}
    engine = Engine(*loaded, spec, max_num_seqs=6)
    answers = engine.generate(prompts, PARAMS)
    assert [a.token_ids for a in answers] == expected
    assert engine.driver is not None
    assert engine.driver.statistics.acceptance_length > 1.1
    assert not engine.driver.statistics.faults


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_trained_proposers_leave_output_as_it_is(
    loaded: tuple[Any, Any], prompts: list[Any], expected: list[list[int]], trees: bool
) -> None:
    spec = {**every_method(trees), "containment": {"time_allowance_ms": 60_000.0}}
    engine = Engine(*loaded, spec, max_num_seqs=6)
    answers = engine.generate(prompts[::3], SamplingParams(max_new_tokens=24))
    assert [a.token_ids for a in answers] == [tokens[:24] for tokens in expected[::3]]
    assert engine.driver is not None
    assert_all_were_accepted(engine.driver.statistics.snapshot())
