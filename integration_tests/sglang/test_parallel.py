"""Two tensor-parallel ranks: the first drafts, and both verify the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_settings import ON_CPU
from speculating import configured, figures_of
from workloads import Prompts, ask, greedy, ids

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_CPU and len(CORES) < 2, reason="needs two processors, one a rank"),
]


def test_tensor_parallel_ranks_agree(
    make_engine: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ON_CPU:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[1]}")
    settings = {"tp_size": 2}
    with make_engine(**settings) as engine:
        expected = ids(ask(engine, prompts, greedy(40)))
    with (
        configured({"proposer": "suffix", "max_draft_nodes": 10}) as algorithm,
        make_engine(speculative_algorithm=algorithm, **settings) as engine,
    ):
        assert ids(ask(engine, prompts, greedy(40))) == expected
        # Ranks that drew for themselves would go on with different texts, and never meet again.
        sampled = ask(engine, prompts, greedy(40, temperature=0.9))
        assert [len(tokens) for tokens in ids(sampled)] == [40] * len(prompts)
        assert ids(ask(engine, prompts, greedy(40))) == expected
        figures = figures_of(engine)
    assert figures["accepted_tokens"] > 100
    assert figures["faults"] == {}
