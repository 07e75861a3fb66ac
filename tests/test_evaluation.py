"""The comparison behind `make demo`: what it measures, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'spec-plugins[evaluate]'")

from spec_plugins import ConfigError  # noqa: E402
from spec_plugins.adapters.transformers import comparison_runner, load_model  # noqa: E402
from spec_plugins.config import load_config  # noqa: E402
from spec_plugins.evaluation import comparison, demo, prompts, report  # noqa: E402
from spec_plugins.traffic.reading import TrafficFile  # noqa: E402


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    problems = [{"task_id": i, "prompt": f"the cat {i} sat on the mat that"} for i in range(4)]
    questions = [
        {"category": category, "turns": [f"{category} {i}", "and then"]}
        for category in ("math", "art")
        for i in (1, 2)
    ]
    (folder / "humaneval.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (folder / "mtbench.jsonl").write_text("\n".join(map(json.dumps, questions)))
    said = [{"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"}]
    long = [{"role": "user", "content": "word " * 5000}]
    cases = {"cases": [{"messages": said}, {"messages": long}]}
    (folder / "agent_replays.json").write_text(json.dumps(cases))
    return folder


def test_prompts_alternate_between_sets_and_categories(data: Path) -> None:
    mixed = prompts.interleaved(prompts.humaneval(data), prompts.mtbench(data))
    assert [p.tag for p in mixed] == ["humaneval", "mtbench"] * 4
    assert [p.messages[0]["content"] for p in mixed[1::2]] == ["math 1", "art 1", "math 2", "art 2"]


def test_prompts_as_a_traffic_file(data: Path, tmp_path: Path) -> None:
    file = TrafficFile(prompts.write_traffic(data, tmp_path / "out" / "prompts.jsonl", each=3))
    records = list(file)
    assert not file.faults
    assert not any(r.answered for r in records)
    tags = [r.tags[0] for r in records]
    assert tags == ["humaneval", "mtbench", "agent"] + ["humaneval", "mtbench"] * 2
    assert max(len(line) for line in file.path.read_text().splitlines()) < 1000


def test_missing_prompts_name_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make data"):
        prompts.humaneval(tmp_path)


@pytest.fixture
def results(tiny_model_dir: Path, data: Path) -> dict[str, comparison.Measured]:
    model, tokenizer = load_model(tiny_model_dir, dtype=torch.float64)
    seen: list[float] = []
    configs = {"none": None, "ngram": load_config("ngram"), "suffix": load_config("suffix")}
    measured = comparison.compare(
        {name: comparison_runner.EmbeddedRunner(model, tokenizer, c) for name, c in configs.items()},
        prompts.interleaved(prompts.humaneval(data), prompts.mtbench(data))[:3],
        max_new_tokens=12, seconds=600, progress=lambda share, done: seen.append(done),
    )  # fmt: skip
    assert seen == [0, 1, 2, 3]
    return measured


def test_every_configuration_sees_every_prompt(results: dict[str, comparison.Measured]) -> None:
    assert list(results) == ["none", "ngram", "suffix"]
    for measured in results.values():
        assert measured.tags == ["humaneval", "mtbench", "humaneval"]
        assert measured.identical == [True] * 3
        # A forward for every token after the first, less what was accepted.
        accepted = measured.statistics.get("accepted_tokens", 0)
        warm_up = 3 if measured.config else 0  # its steps are in the statistics too
        assert accepted <= sum(measured.tokens) - 3 - sum(measured.forwards) + warm_up
    assert sum(results["none"].forwards) == sum(results["none"].tokens) - 3


def test_time_is_kept(tiny_model_dir: Path, data: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, dtype=torch.float64)
    runner = comparison_runner.EmbeddedRunner(model, tokenizer, None)
    measured = comparison.compare({"none": runner}, prompts.humaneval(data), max_new_tokens=4, seconds=1e-9)
    assert len(measured["none"].seconds) == 1


def test_changed_output_is_told(results: dict[str, comparison.Measured]) -> None:
    results["ngram"].identical[1] = False
    figures = report.as_json(results, {})
    assert figures["proposers"]["ngram"]["all"]["identical"] == 2
    assert figures["proposers"]["ngram"]["by_tag"]["mtbench"]["identical"] == 0
    assert "2/3" in report.markdown(figures)


def test_summaries_add_up() -> None:
    base = comparison.Measured("none", None, ["a", "b"], [2.0, 6.0], [11, 31], [10, 30], [True, True])
    fast = comparison.Measured("x", None, ["a", "b"], [1.0, 3.0], [11, 31], [5, 10], [True, True])
    summary = fast.summary(base)
    assert summary["speedup"] == 2.0
    assert summary["tokens_per_forward"] == pytest.approx(40 / 15)
    assert summary["tokens_per_second"] == pytest.approx(42 / 4)
    assert fast.summary(base, "a")["tokens_per_forward"] == 2.0


def test_demo_writes_all_three(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 6)
    figures: dict[str, Any] = demo.run(tiny_model_dir, data, tmp_path / "out", minutes=0.001)
    assert set(figures["proposers"]) == {"none", *demo.CONFIGS}
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["proposers"].keys() == figures["proposers"].keys()
    assert "| none |" in (tmp_path / "out" / "comparison.md").read_text()
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "prompts.jsonl").read_text().count("\n") == 4 + 4 + 1
