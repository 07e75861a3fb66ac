"""Greedy answers are SGLang's own, under every setting that changes how requests are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from speculating import configured, figures_of
from tiny_heads import begun_head
from workloads import WORKLOADS, Prompts

pytestmark = pytest.mark.slow
Expected = dict[str, Any]

TINY_POOL = {"max_total_tokens": 420, "chunked_prefill_size": 32}
"""So few tokens of KV cache that requests are retracted; prompts in several parts."""
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "suffix trees": ({"proposer": "suffix", "max_draft_nodes": 12}, {"page_size": 1}),
    "suffix, tiny pool": ({"proposer": "suffix"}, {"page_size": 1, **TINY_POOL}),
    "lookahead": (
        {"proposer": "lookahead", "num_speculative_tokens": 4, "options": {"window": 3, "ngram": 4}},
        {"page_size": 4},
    ),
    "combine, overlap": (
        {
            "proposer": "combine",
            "max_draft_nodes": 12,
            "options": {
                "mode": "merged",
                "proposers": ["suffix", {"name": "eagle3", "options": {"topk": 2, "max_draft_nodes": 6}}],
            },
        },
        {"page_size": 16, "disable_overlap_schedule": False},
    ),
}


@pytest.fixture(scope="module", params=list(ENGINES))
def speculating(
    request: pytest.FixtureRequest,
    make_engine: Any,
    tiny_model: Path,
    prompts: Prompts,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, Expected]]:
    """An engine, and what SGLang answers by itself with the same settings."""
    fields, settings = ENGINES[request.param]
    for part in fields.get("options", {}).get("proposers", ()):
        if isinstance(part, dict):
            folder = tmp_path_factory.mktemp("heads") / "eagle3"
            part["options"]["model"] = str(begun_head(folder, "eagle3", tiny_model))
    with make_engine(**settings) as engine:
        expected = {name: ask(engine, prompts) for name, ask in WORKLOADS.items()}
    if settings.get("disable_overlap_schedule") is False or "max_total_tokens" in settings:
        # SGLang forgets a request's penalties when it retracts it, and with speculation it retracts others.
        # With overlap it applies them late, by how much depends on what else runs.
        del expected["penalties"]
    with configured(fields) as algorithm, make_engine(speculative_algorithm=algorithm, **settings) as engine:
        yield engine, expected
        statistics = figures_of(engine)
        assert statistics["faults"] == {}
        assert statistics["accepted_tokens"] > 100


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_answers_are_sglangs_own(speculating: tuple[Any, Expected], prompts: Prompts, name: str) -> None:
    engine, expected = speculating
    if name not in expected:
        pytest.skip("needs an SGLang whose penalties hold with overlap and retraction")
    assert WORKLOADS[name](engine, prompts) == expected[name]


def test_drafts_were_accepted_and_nothing_is_left(
    speculating: tuple[Any, Expected], prompts: Prompts
) -> None:
    """The KV pool is as at the start, and the proposer holds no request."""
    engine, _ = speculating
    before = figures_of(engine)["accepted_tokens"]
    answers = engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    )
    counted = [a["meta_info"] for a in answers]
    assert (
        sum(m["spec_num_correct_drafts"] for m in counted) == figures_of(engine)["accepted_tokens"] - before
    )
    for meta in counted:
        assert meta["spec_num_proposed_drafts"] == sum(meta["spec_plugins_draft_tokens"])
        assert len(meta["spec_plugins_draft_tokens"]) >= 60
        assert meta["spec_accept_rate"] == pytest.approx(
            meta["spec_num_correct_drafts"] / max(1, meta["spec_num_proposed_drafts"])
        )
    assert figures_of(engine)["requests_held"] == 0
    assert engine.flush_cache().success
    state = engine.get_server_info()["internal_states"][0]
    assert state["spec_plugins"]["kv_tokens_used"] == 0
