"""What the benchmarks of engines compute from what they see; no engine runs here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

if not (Path(__file__).parents[1] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are in the checkout only", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import server, sglang_acceptance, sglang_server, soak, vllm_serving, vllm_step_cost
from benchmarks.case import CASES, together
from benchmarks.server import Answer, Block, Environment, Server, Speculated
from benchmarks.vllm_step_engine import Steps
from spec_plugins.errors import SpecPluginsError, UnavailableError
from spec_plugins.evaluation.prompts import agent_replays


def by_word(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A token for each role, each word and the turn of the assistant."""
    words = [w for m in messages for w in (m["role"], *m["content"].split())] + ["assistant"]
    return [sum(map(ord, word)) for word in words]


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("limit", "begins"),
    [(100, 0), (13, 0), (12, 2), (10, 2), (9, 4), (6, 4)],
    ids=["all", "just", "an answer is no beginning", "just two", "the newest", "the newest, just"],
)
def test_a_conversation_loses_its_oldest_turns(limit: int, begins: int) -> None:
    messages = [
        turn("user", "one"), turn("assistant", ""), turn("user", "two"), turn("assistant", "three"),
        turn("user", "a b c d"),
    ]  # fmt: skip
    tokens = vllm_serving.cut(messages, by_word, limit)
    assert tokens == by_word(messages[begins:])
    assert len(tokens) <= limit


def test_a_long_message_keeps_its_end() -> None:
    text = " ".join(f"w{i}" for i in range(1000))
    tokens = vllm_serving.cut([turn("user", "before"), turn("user", text)], by_word, 20)
    assert 10 <= len(tokens) <= 20
    assert tokens[-5:] == by_word([turn("user", text)])[-5:]


def test_agent_turns_are_given_once_and_conversations_in_turn(tmp_path: Path) -> None:
    first = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    longer = [*first, turn("assistant", "d"), turn("user", "e")]
    other = [turn("user", "x"), turn("assistant", "y"), turn("user", "z")]
    cases = {"cases": [{"messages": m} for m in (first, longer, other)]}
    (tmp_path / "agent_replays.json").write_text(json.dumps(cases))
    prompts = agent_replays(tmp_path)
    assert sorted("".join(m["content"] for m in p.messages) for p in prompts) == [
        "a",
        "abc",
        "abcde",
        "x",
        "xyz",
    ]
    assert any(p.messages[0]["content"] == "x" for p in prompts[:3])


def block(seconds: float, tokens: list[int], drafts: int = 0, accepted: int = 0) -> Block:
    return Block(
        [Answer(tokens, "", seconds)],
        seconds,
        Speculated(
            drafts, 4 * drafts, accepted, len(tokens), (drafts, 0.5 * drafts) if drafts else (), 0.1 * drafts
        ),
    )


def test_ratios_are_within_rounds() -> None:
    plain, ours = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]
    blocks = {
        "none": [block(1.0, plain), block(2.0, plain), block(4.0, plain)],
        "theirs": [block(1.0, plain, 2, 3), block(2.0, plain, 2, 3), block(4.0, plain, 2, 3)],
        "ours": [block(0.5, plain, 1, 3), block(1.0, plain, 1, 3), block(2.0, ours, 1, 3)],
    }
    rows = dict(vllm_serving.measured(blocks, {"none": None, "theirs": None, "ours": "theirs"}))
    assert rows["none"] == ["3.0 (1.5–6.0)", "", "", "", "1.00", "", "", ""]
    same_ratio = "2.00 (2.00–2.00)"
    assert rows["ours"] == [
        "6.0 (3.0–12.0)",
        same_ratio,
        same_ratio,
        "4.00",
        "2.00",
        "1.00 .50",
        "8.6%",
        "2/3",
    ]
    assert rows["theirs"][3] == "2.50"


def test_a_metric_is_read_by_position() -> None:
    seen = {
        'a{position="1",x="y"}': 2.0,
        'a{position="0",x="y"}': 3.0,
        'a{position="1",x="z"}': 5.0,
        "b": 1.0,
    }
    assert Server.by_position("a", seen) == (3.0, 7.0)
    assert Server.by_position("c", seen) == ()


def test_ratios_are_put_together_evenly() -> None:
    assert together([0.5, 2.0] * 20).startswith("1.00 (0.")
    assert together([1.25] * 5) == "1.25 (1.25 to 1.25)"


def test_acceptance_that_falls_is_told_from_chance() -> None:
    def slots(*accepted: int) -> list[Speculated]:
        return [Speculated(100, 400, a, 100 + a) for a in accepted]

    difference, low, high = soak.lengths_differ(slots(200, 210, 190, 205), slots(100, 110, 90, 105))
    assert difference == pytest.approx(-1.0)
    assert low < difference < high < -0.5
    difference, low, high = soak.lengths_differ(slots(100, 200, 150), slots(200, 100, 155))
    assert low < 0 < high


def test_memory_is_compared_with_when_it_had_settled() -> None:
    grown = [soak.Slot(60.0, mib, Speculated(), Counter()) for mib in (10, 50, 80, 90, 100, 101, 103)]
    assert soak.growth(grown) == 3


def test_a_step_costs_what_both_methods_take() -> None:
    def steps(*propose: float) -> Steps:
        return Steps(list(propose), [1.0] * len(propose), drafted=2 * len(propose), generated=len(propose))

    ran = {"theirs": [steps(1, 3, 8), steps(9, 9, 9)], "ours": [steps(1, 1, 4), steps(19, 19, 999)]}
    theirs, ours = vllm_step_cost.measured(ran)
    assert theirs == ["theirs", "6 (2–10)", "1 (1–1)", "", "8 (4–11)", "2.0", "1.0", "6"]
    # Within a repeat: a median of 2 µs to 4, and of 20 to 10.
    assert ours[3].startswith("1.25 ")


def test_acceptance_length_counts_neither_prefill_nor_what_was_not_drafted() -> None:
    told = [
        ([5] * 9, {"spec_verify_ct": 4, "spec_num_proposed_drafts": 44}),
        ([6] * 3, {"spec_verify_ct": 1, "spec_num_proposed_drafts": 6}),
    ]
    seen = sglang_acceptance.Seen.of(told)
    assert seen.acceptance_length == 10 / 5
    assert seen.nodes == 11


def test_draft_sizes_as_sglang_counts_them() -> None:
    flags, variables = sglang_server.algorithm("suffix", 8, 11, tree=False)
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {
        "--speculative-algorithm": "SPEC_SUFFIX",
        "--speculative-num-steps": "8",
        "--speculative-num-draft-tokens": "12",
    }
    assert json.loads(variables["SPEC_PLUGINS_CONFIG"]) == {"options": {"tree": False}}
    assert sglang_server.algorithm("ngram", 4)[1] == {}


@pytest.mark.parametrize("modules", [("arctic_inference",), ()])
def test_a_plug_in_is_beside_what_does_the_same(modules: Sequence[str], tmp_path: Path) -> None:
    env = Environment(tmp_path, {}, frozenset({"spec_plugins.adapters.vllm", *modules}))
    compared, left_out = vllm_step_cost.pairs(env)
    names = [("vLLM ngram", "plug-in ngram"), ("vLLM suffix", "plug-in suffix")]
    assert [(own.name, plug_in.name) for own, plug_in in compared] == names[: 1 + len(modules)]
    assert len(left_out) == 1 - len(modules)
    own, plug_in = (vllm_step_cost.engine_settings(v, tmp_path, [1, 16]) for v in compared[0])
    spec = {key: s.pop("speculative_config") for key, s in (("own", own), ("plug-in", plug_in))}
    assert spec["own"]["num_speculative_tokens"] == spec["plug-in"]["num_speculative_tokens"]
    assert plug_in.pop("additional_config") == {"spec_plugins": {"options": {"min_ngram": 2, "max_ngram": 4}}}
    assert own == plug_in


VLLM = """
import numpy as np
from types import SimpleNamespace as Some
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

class LLM:
    def __init__(self, **settings):
        print("not an answer")
        assert settings == {"model": "tiny"}, "no such model"

    def generate(self, prompts, how, use_tqdm):
        runner, n = GPUModelRunner(), len(prompts)
        lengths = np.array([len(p["prompt_token_ids"]) for p in prompts])
        steps = [(0, n), (lengths - 1, n), (lengths, n), (lengths + 2, n), (lengths, 1)]
        for computed, rows in steps:
            computed = computed + 0 * lengths
            runner.input_batch = Some(num_computed_tokens_cpu=computed, num_prompt_tokens=lengths)
            runner._update_states(None)
            runner.propose_draft_token_ids(None, [[1, 2]] * rows, None)

SamplingParams = Some
"""
RUNNER = """
class GPUModelRunner:
    def _update_states(self, scheduler_output): pass
    def propose_draft_token_ids(self, scheduler_output, sampled, more): return [[7] * 5 for _ in sampled]
"""


@pytest.fixture
def engine_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with something that looks like vLLM."""
    runner = tmp_path / "vllm" / "v1" / "worker" / "gpu_model_runner.py"
    runner.parent.mkdir(parents=True)
    runner.write_text(RUNNER)
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return Environment(tmp_path, {}, frozenset())


def test_steps_count_in_which_the_whole_batch_decodes(
    engine_environment: Environment, tmp_path: Path
) -> None:
    engine = vllm_step_cost.Engine("tiny", engine_environment, {"model": "tiny"}, tmp_path)
    with engine:
        steps = [engine.run([[1, 2, 3]] * 4, 2, 9), engine.run([[1, 2, 3]], 1, 9)]
    assert [len(s.propose) for s in steps] == [len(s.update) for s in steps] == [4, 3]
    assert [(s.drafted, s.generated) for s in steps] == [(4 * 2 * 5, 4 * 2 * 2), (3 * 5, 3 * 2)]
    assert engine.process is not None
    assert engine.process.returncode == 0
    assert "not an answer" in engine.log.read_text()


def test_an_engine_that_does_not_start_says_why(engine_environment: Environment, tmp_path: Path) -> None:
    engine = vllm_step_cost.Engine("tiny", engine_environment, {"model": "huge"}, tmp_path)
    with pytest.raises(SpecPluginsError, match=r"vLLM \(tiny\) ended with 1(.|\n)*no such model"), engine:
        pass


def test_a_missing_environment_names_what_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_PLUGINS_VLLM_BIN", str(tmp_path))
    with pytest.raises(UnavailableError, match="make environment-vllm"):
        server.environment("vllm")


def test_cases_of_engines_run_by_name_only() -> None:
    assert {name for name, case in CASES.items() if case.needs} >= {
        "sglang-acceptance",
        "sglang-soak",
        "vllm-serving",
        "vllm-soak",
        "vllm-step-cost",
    }
