"""Heads in vLLM: what this project's proposers accept is what vLLM's own implementations accept."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offline import MakeEngine, ask, greedy, statistics_of
from tiny_heads import VOCAB, begun_head

TOKENS, LENGTH = 40, 3


def accepted_by_position(llm: Any) -> tuple[int, list[int]]:
    """Drafts, and how many of their tokens were accepted at each position, by vLLM's own counters."""
    found = {m.name: m for m in llm.get_metrics()}
    drafts = found["vllm:spec_decode_num_drafts"].value
    return drafts, list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values)


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, prompts: list[list[int]]) -> list[list[int]]:
    with make_engine(enable_prefix_caching=False) as llm:
        return greedy(llm, prompts, TOKENS)


@pytest.mark.parametrize("method", ["eagle3", "eagle", pytest.param("medusa", marks=pytest.mark.contract)])
def test_the_plugin_route_accepts_what_vllms_own_does(
    make_engine: MakeEngine,
    tiny_model: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
    method: str,
) -> None:
    # vLLM's Medusa does not load a reduced vocabulary.
    folder = begun_head(tmp_path / "head", method, tiny_model, VOCAB if method == "medusa" else 96)
    with make_engine(method, k=LENGTH, options={"model": str(folder)}, enable_prefix_caching=False) as llm:
        assert greedy(llm, prompts, TOKENS) == expected
        ours = accepted_by_position(llm)
        assert not statistics_of(llm).snapshot()["faults"]
    assert ours[1][0] > 20
    assert ours[1][-1] > 5
    version = importlib.metadata.version("vllm")
    if method == "medusa" and not version.startswith("0.32"):
        return  # removed from vLLM
    native = tmp_path / "native"
    command = ["convert", str(folder), "--to", "vllm", "--out", str(native), "--target", str(tiny_model)]
    subprocess.run([Path(sys.executable).with_name("spec-plugins"), *command], check=True, timeout=300)
    config = {"method": method, "model": str(native), "num_speculative_tokens": LENGTH}
    with make_engine(speculative_config=config, enable_prefix_caching=False) as llm:
        assert greedy(llm, prompts, TOKENS) == expected
        theirs = accepted_by_position(llm)
    # vLLM's own drafts where only an answer's last token is missing, too, and counts what is cut off.
    ends = theirs[0] - ours[0]
    assert 0 <= ends <= len(prompts)
    differences = [t - o for t, o in zip(theirs[1], ours[1], strict=True)]
    assert all(0 <= d <= ends for d in differences)
    assert sum(differences) <= 3


def test_drawn_drafts_under_a_grammar_say_no_probabilities(
    make_engine: MakeEngine,
    tiny_model: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM cuts a draft at the first token that the grammar forbids: were the draft's distribution known to
    its sampler, what is forbidden would be missing from the output."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    seen: dict[str, list[bool]] = {"free": [], "bound": []}

    def hand_over(runner: Any, ids: list[str], drafts: Any, vocab_size: int) -> None:
        for request, probs, count in zip(ids, drafts.probs, drafts.counts, strict=True):
            params = runner.requests[request].sampling_params
            seen["free" if params.structured_outputs is None else "bound"] += [probs is not None] * bool(
                count
            )
        original(runner, ids, drafts, vocab_size)

    folder = begun_head(tmp_path / "head", "medusa", tiny_model)
    grammar = StructuredOutputsParams(regex="[a-z]{30}")
    each = [
        SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=20, structured_outputs=grammar),
    ]
    with make_engine(
        "medusa",
        k=2,
        options={"model": str(folder)},
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as llm:
        from spec_plugins.adapters.vllm import runner_state  # numba comes with it, after vLLM

        original = runner_state._hand_over_probabilities
        monkeypatch.setattr(runner_state, "_hand_over_probabilities", hand_over)
        answers = ask(llm, prompts[:2], each)
    assert re.fullmatch("[a-z]+", answers[1].outputs[0].text)
    assert all(seen["free"])
    assert not any(seen["bound"])
    assert min(map(len, seen.values())) > 3
