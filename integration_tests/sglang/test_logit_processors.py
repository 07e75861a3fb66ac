"""Processors of logits that requests bring along."""

from __future__ import annotations

from typing import Any

import pytest
from speculating import configured
from workloads import Prompts, ask, greedy, ids

pytestmark = pytest.mark.slow


def test_custom_logit_processors_are_heeded(make_engine: Any, prompts: Prompts) -> None:
    """Beside requests without, which draft."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    banned = [12, 22, 67, 78]
    some, n = prompts[:8], 8
    asked = [greedy(40, **({"custom_params": {"token_ids": banned}} if i % 2 else {})) for i in range(n)]
    hot = [{**p, "temperature": 1.0} for p in asked]
    processors = [DisallowedTokensLogitsProcessor.to_str() if i % 2 else None for i in range(n)]

    def answers(engine: Any, params: Any) -> Any:
        return ask(engine, some, params, custom_logit_processor=processors)

    settings = {"enable_custom_logit_processor": True}
    with make_engine(**settings) as engine:
        expected = ids(answers(engine, asked))
    with (
        configured({"proposer": "suffix"}) as algorithm,
        make_engine(speculative_algorithm=algorithm, **settings) as engine,
    ):
        found, sampled = answers(engine, asked), answers(engine, hot)
    assert ids(found) == expected
    drafted = [sum(a["meta_info"]["spec_plugins_draft_tokens"]) for a in found]
    assert [d > 0 for d in drafted] == [True, False] * 4
    for given in (ids(found), ids(sampled)):
        assert any(set(banned) & set(tokens) for tokens in given[::2])
        assert not any(set(banned) & set(tokens) for tokens in given[1::2])
