"""Heads in SGLang: what this project's proposers accept is what SGLang's own worker accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_settings import ON_CPU
from offline import MakeEngine
from speculating import configured
from tiny_heads import begun_head
from workloads import Prompts, ask, greedy, ids

if ON_CPU:
    import target_verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ON_CPU, reason="needs the stand-ins: make environment-sglang"),
]

METHOD = "eagle3"
"""Or ``eagle``, which would take as long again."""
TOKENS, LENGTH = 40, 3
CHAIN = {
    "attention_backend": "intel_amx", "speculative_num_steps": LENGTH, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": LENGTH + 1,
}  # fmt: skip


def accepted(answers: Any) -> list[list[int]]:
    """For each request, how many steps accepted no draft token, one, two, …, by SGLang's own counters."""
    found = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    return [row + [0] * (LENGTH + 1 - len(row)) for row in found]


def test_the_plugin_route_accepts_what_sglangs_own_does(
    make_engine: MakeEngine,
    tiny_model: Path,
    prompts: Prompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.runtime_context import override_platform

    folder = begun_head(tmp_path / "head", METHOD, tiny_model)
    fields = {"proposer": METHOD, "num_speculative_tokens": LENGTH, "options": {"model": str(folder)}}
    with configured(fields) as algorithm, make_engine(speculative_algorithm=algorithm) as engine:
        ours = ask(engine, prompts, greedy(TOKENS))
    native = tmp_path / "native"
    command = ["convert", str(folder), "--to", "sglang", "--out", str(native), "--target", str(tiny_model)]
    subprocess.run([Path(sys.executable).with_name("spec-plugins"), *command], check=True, timeout=300)
    monkeypatch.setenv(target_verify.AMX_VARIABLE, "1")
    own = {"speculative_algorithm": METHOD.upper(), "speculative_draft_model_path": str(native), **CHAIN}
    with override_platform(has_amx=True), make_engine(**own) as engine:
        theirs = ask(engine, prompts, greedy(TOKENS))
    assert ids(ours) == ids(theirs)
    steps = [[a["meta_info"]["spec_verify_ct"] for a in answers] for answers in (ours, theirs)]
    assert sum(steps[0]) < 0.95 * TOKENS * len(prompts)
    # Two tokens may be so equally likely that another order of summing chooses the other.
    assert sum(abs(mine - own_ones) for mine, own_ones in zip(*steps, strict=True)) <= 2
    # SGLang's own drafts past an answer's last token, too, and counts what is cut off there.
    by_position = [np.sum(accepted(answers), 0) for answers in (ours, theirs)]
    assert np.abs(by_position[0] - by_position[1]).sum() <= 2 * len(prompts)
