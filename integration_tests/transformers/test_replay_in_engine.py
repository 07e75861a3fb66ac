"""Replay counts exactly what the embedded engine counted when it served the same requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from tiny_heads import begun_head  # noqa: E402
from tiny_model import prompts_of_tiny_model, save_tiny_model  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from spec_plugins.adapters.transformers import Completion, Engine, SamplingParams  # noqa: E402
from spec_plugins.cli import app  # noqa: E402
from spec_plugins.config import Config, load_config  # noqa: E402
from spec_plugins.evaluation.recorded import Recorded, bring_together  # noqa: E402
from spec_plugins.evaluation.replay import Replayed, replay  # noqa: E402
from spec_plugins.evaluation.replay_target import ReplayTarget  # noqa: E402
from spec_plugins.traffic.conversations import Conversation  # noqa: E402
from spec_plugins.traffic.record import Record  # noqa: E402

TOKENS = 60
CUT = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
PATIENT = {"containment": {"time_allowance_ms": 60_000.0}}
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"proposer": "ngram", "num_speculative_tokens": 5},
    "suffix": {"proposer": "suffix", "num_speculative_tokens": 6, "max_draft_nodes": 12},
    "medusa": {"proposer": "medusa", "num_speculative_tokens": 3, "options": {"tree": True}},
    "eagle": {"proposer": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"proposer": "eagle3", "num_speculative_tokens": 3, "options": {"topk": 2}},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Engine:
    # float64: rounding differs between a prefill and a decode, and must not decide between tokens
    return Engine(str(model_dir), max_num_seqs=8, dtype=torch.float64)


@pytest.fixture(scope="module")
def answers(plain: Engine) -> list[Completion]:
    return plain.generate(prompts_of_tiny_model(), CUT)


def record(answers: Sequence[Completion], max_tokens: int = TOKENS) -> Recorded:
    made = []
    for a in answers:
        tokens = np.array(a.prompt_token_ids + a.token_ids, np.int32)
        answered = np.arange(len(tokens)) >= len(a.prompt_token_ids)
        made.append(
            Conversation(tokens, answered, Record(0, max_tokens=max_tokens), a.finish_reason == "stop")
        )
    return bring_together(made)


@pytest.fixture(scope="module")
def target(model_dir: Path, plain: Engine) -> ReplayTarget:
    found = ReplayTarget.open(model_dir, dtype="float64")
    found.loaded = plain.target.model
    return found


def serve(
    plain: Engine, config: Config, params: SamplingParams, prompts: list[list[int]] | None = None
) -> tuple[list[Completion], Any]:
    """The answers, and the counters of the engine that gave them, three at once."""
    engine = Engine(plain.target.model, plain.tokenizer, config, max_num_seqs=3)
    answers = engine.generate(prompts or prompts_of_tiny_model(), params)
    assert engine.driver is not None
    assert not engine.driver.statistics.faults
    return answers, engine.driver.statistics


def differences(result: Replayed, statistics: Any, size: int | None = None) -> list[int]:
    """Replay's counts less the engine's: steps, draft tokens, drafted and accepted at each position."""
    counts, depth = result.counts(size), statistics.positions
    ours = [counts.steps.sum(), counts.draft_tokens.sum(), *counts.drafted.sum(0)[:depth]]
    theirs = [statistics.verify_steps, statistics.draft_tokens, *statistics.drafted_by_position]
    ours += [*counts.accepted.sum(0)[:depth]]
    theirs += [*statistics.accepted_by_position]
    return [int(a - b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("name", SPECS)
def test_replay_counts_what_the_engine_counted(
    model_dir: Path, plain: Engine, answers: list[Completion], target: ReplayTarget, tmp_path: Path, name: str
) -> None:
    spec = {**SPECS[name], **PATIENT}
    if name in ("medusa", "eagle", "eagle3"):
        folder = begun_head(tmp_path / "head", name, model_dir)
        spec["options"] = {**spec.get("options", {}), "model": str(folder)}
    config = load_config(spec)
    served, statistics = serve(plain, config, CUT)
    assert [a.token_ids for a in served] == [a.token_ids for a in answers]
    assert statistics.accepted_tokens > 50
    recorded = record(answers)
    stepped = replay(recorded, config, target, mode="steps", concurrency=3)
    assert not any(differences(stepped, statistics))
    everywhere = replay(recorded, config, target, concurrency=3)
    assert everywhere.mode == "positions"
    # A cache of finished requests is filled at another pace there.
    assert any(differences(everywhere, statistics)) == (name == "suffix")

    # What must differ: another draft length, and other responses.
    if len(everywhere.sizes) > 1:
        assert any(differences(everywhere, statistics, everywhere.sizes[-2]))
    altered = record(answers)
    for i in range(len(altered)):
        response = altered.conversation(i)[altered.prompt_lengths[i] :]
        response[:] = response[::-1].copy()
    assert any(differences(replay(altered, config, target, mode="steps", concurrency=3), statistics))


def test_one_replay_counts_what_engines_with_each_draft_length_do(
    plain: Engine, answers: list[Completion], target: ReplayTarget
) -> None:
    result = replay(record(answers), load_config({**SPECS["ngram"], **PATIENT}), target)
    for length in (1, 2, 4):
        config = load_config({"proposer": "ngram", "num_speculative_tokens": length, **PATIENT})
        statistics = serve(plain, config, CUT)[1]
        assert not any(differences(result, statistics, length))
        assert any(differences(result, statistics, length + 1))


def test_behind_an_end_token_the_engine_knows_more(
    plain: Engine, answers: list[Completion], target: ReplayTarget
) -> None:
    """It verifies what is drafted past the end; what comes there is no part of a response."""
    # Each goes on with what it has said, so that what ends it stands in the prompt, and is drafted.
    prompts = [a.prompt_token_ids + a.token_ids[:40] for a in answers]
    stops = tuple(
        int(t) for t in np.argsort(-np.bincount([t for a in answers for t in a.token_ids[40:]]))[:2]
    )
    config = load_config({**SPECS["ngram"], **PATIENT})
    params = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=stops)
    answers, statistics = serve(plain, config, params, prompts)
    assert sum(a.finish_reason == "stop" for a in answers) > 3
    result = replay(record(answers), config, target)
    counts = result.counts()
    depth = statistics.positions
    found = differences(result, statistics)
    assert not any(found[: 2 + depth])  # steps and drafts are the same
    past = counts.past_end.sum(0)
    assert past.sum() > 0
    assert all(-p <= d <= 0 for p, d in zip(past, found[2 + depth :], strict=True))


def test_the_command_replays_what_generate_wrote(
    model_dir: Path, answers: list[Completion], tmp_path: Path
) -> None:
    path = tmp_path / "traffic.jsonl"
    lines = [
        json.dumps(
            {"prompt_token_ids": a.prompt_token_ids, "token_ids": a.token_ids, "finish_reason": "length"}
        )
        for a in answers
    ]
    path.write_text("\n".join([*lines, "nonsense"]) + "\n")
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app,
        ["replay", str(model_dir), "--traffic", str(path), "--spec", "ngram", "--out", str(out), "--json"],
    )
    assert done.exit_code == 0, done.output
    assert "left out 1 lines: line 13" in done.stderr
    shown = json.loads(done.stdout)
    assert shown == json.loads((out / "replay.json").read_text())
    assert shown["about"]["conversations"] == len(answers)
    assert len(shown["proposers"]["ngram"]["all"]["by_size"]) == 8
    person = CliRunner().invoke(
        app,
        ["replay", str(model_dir), "--traffic", str(path), "--engine", "vllm", "--max-conversations", "5"],
    )
    assert person.exit_code == 0, person.output
    assert "lookahead: what an engine counts with this configuration, 32" not in person.stdout
    assert "5 requests at once" in person.stdout


def test_prompts_without_responses_are_refused_or_answered_once(model_dir: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps(f"{i} and {i}") + "\n" for i in range(8)))
    command = ["replay", str(model_dir), "--traffic", str(path), "--spec", "ngram"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "8 lines of" in refused.stderr
    assert "--generate N" in refused.stderr
    done = CliRunner().invoke(
        app, [*command, "--generate", "6", "--max-new-tokens", "30", "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(
        app, ["replay", str(model_dir), "--traffic", str(out / "answered.jsonl"), "--spec", "ngram", "--json"]
    )
    first, second = (json.loads(d.stdout)["proposers"]["ngram"] for d in (done, again))
    assert first["all"] == second["all"]
    assert first["all"]["requests"] == 6
