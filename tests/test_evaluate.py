"""`spec-plugins evaluate`: three commands as one, in the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from repeating_traffic import write_traffic
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")

from spec_plugins.cli import app, evaluate
from spec_plugins.config import load_config
from spec_plugins.evaluation.recommended import Recommendation
from spec_plugins.evaluation.step_times import StepTimes

NGRAM = '{"proposer": "ngram", "num_speculative_tokens": 3}'


def test_replay_calibrate_recommend(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_PLUGINS_CACHE", str(tmp_path / "cache"))
    traffic, out = tmp_path / "traffic.jsonl", tmp_path / "out"
    write_traffic(traffic)
    command = ["evaluate", str(tiny_model_dir), "--traffic", str(traffic), "--report", str(out)]
    command += ["--concurrency", "1,2", "--spec", NGRAM, "--steps", "6"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    found = Recommendation.model_validate_json((out / "recommendation.json").read_text())
    assert [at.concurrency for at in found.at] == [1, 2]
    assert {o.method for o in found.at[0].options} == {"ngram", "none"}
    assert "<svg" in (out / "report.html").read_text()
    times = StepTimes.model_validate_json((out / "times.json").read_text())
    assert {c.q for c in times.cells} == {1, 2, 3, 4}
    contexts = {c.context for c in times.cells}
    assert min(contexts) < found.mean_context < max(contexts)
    shown = " ".join(done.output.split())
    for title in ("1 of 3: what is accepted", "2 of 3: how long steps take", "3 of 3: what pays"):
        assert title in shown
    failed = CliRunner().invoke(app, [*command, "--concurrency", "1,x"])
    assert failed.exit_code == 2
    assert "--concurrency: '1,x' cannot be used" in " ".join(failed.output.split())


def test_what_is_calibrated_holds_what_is_drafted() -> None:
    chain = load_config({"proposer": "ngram", "num_speculative_tokens": 5})
    tree = load_config({"proposer": "suffix", "num_speculative_tokens": 4, "max_draft_nodes": 12})
    assert evaluate._draft_tokens([chain]) == [0, 1, 2, 4, 5]
    assert evaluate._draft_tokens([chain, tree]) == [0, 1, 2, 4, 8, 12]
