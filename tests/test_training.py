"""Heads learn from traffic, the same whether training was interrupted or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[train]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[train]'")

from tiny_heads import medusa_heads  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from spec_plugins.adapters.transformers import Engine, SamplingParams  # noqa: E402
from spec_plugins.checkpoints.files import weights_digest  # noqa: E402
from spec_plugins.checkpoints.layouts import read_head  # noqa: E402
from spec_plugins.cli import app  # noqa: E402
from spec_plugins.errors import ConfigError, UnsupportedError  # noqa: E402
from spec_plugins.traffic.conversations import read_traffic  # noqa: E402
from spec_plugins.training import features, session, trainer  # noqa: E402
from spec_plugins.training.beginnings import begin_with  # noqa: E402
from spec_plugins.training.objectives import MedusaObjective  # noqa: E402
from spec_plugins.training.session import HeadPlan, train_head  # noqa: E402
from spec_plugins.training.trainer import Progress, Schedule  # noqa: E402

PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


def some_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 128, 6).tolist() for _ in range(150)]


class Quiet:
    """Watches, and may interrupt."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after, self.shards, self.captured_tokens = stop_after, 0, 0

    def read(self, traffic: Any) -> None:
        pass

    def captured(self, tokens: int, total: int) -> None:
        self.captured_tokens = tokens

    def trained(self, progress: Progress) -> None:
        self.shards += 1
        if self.shards == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def traffic(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tiny model says to 150 prompts."""
    prompts = some_prompts()
    engine = Engine(str(tiny_model_dir), max_num_seqs=50, dtype=torch.float32)
    done = engine.generate(prompts, PARAMS)
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    lines = [
        json.dumps({"prompt_token_ids": p, "token_ids": c.token_ids})
        for p, c in zip(prompts, done, strict=True)
    ]
    path.write_text("\n".join([*lines, "not JSON", '{"prompt": "no answer"}', "[]"]) + "\n")
    return path


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features") / "store"


@pytest.fixture
def plan(
    traffic: Path, tiny_model_dir: Path, captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HeadPlan:
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_SAVES", 0.0)
    return HeadPlan(
        "eagle3", tiny_model_dir, traffic, tmp_path / "head", captured,
        draft_vocab_size=96, positions=3, dtype="float32",
        schedule=Schedule(epochs=3, learning_rate=5e-3, warmup_steps=5, batch_tokens=256),
    )  # fmt: skip


def accepted(plan: HeadPlan, tiny_model_dir: Path) -> float:
    """Tokens a step in the embedded engine, on some of what was trained on."""
    prompts = some_prompts()[:20]
    name = "draft_model" if plan.method == "draft" else plan.method
    patient = {"time_allowance_ms": 60_000.0}
    spec = {
        "proposer": name,
        "containment": patient,
        "options": {"model": str(plan.out)},
        "num_speculative_tokens": 3,
    }
    engine = Engine(str(tiny_model_dir), spec=spec, max_num_seqs=20, dtype=torch.float32)
    answers = engine.generate(prompts, PARAMS)
    plain = Engine(str(tiny_model_dir), max_num_seqs=20, dtype=torch.float32).generate(prompts, PARAMS)
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    return float(np.mean([len(a.token_ids) / a.statistics.verify_steps for a in answers]))


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "draft"])
def test_a_trained_head_is_right_more_often(plan: HeadPlan, tiny_model_dir: Path, method: Any) -> None:
    untrained = dataclasses.replace(
        plan, method=method, out=plan.out / "begun", hidden_size=32,
        schedule=dataclasses.replace(plan.schedule, epochs=1, learning_rate=1e-9),
    )  # fmt: skip
    trained = dataclasses.replace(
        untrained, out=plan.out / "trained", schedule=dataclasses.replace(plan.schedule, epochs=5)
    )
    before, after = (train_head(each, Quiet()).score for each in (untrained, trained))
    assert after.mean_loss < before.mean_loss - 0.01  # of which most is the entropy of so random a target
    if "eagle" in method:  # the others find little in so random a target
        assert accepted(trained, tiny_model_dir) > accepted(untrained, tiny_model_dir) + 0.1
    card = json.loads((trained.out / "training.json").read_text())
    assert card["lines_left_out"] == 3
    assert card["conversations"] == 150
    assert (trained.out / "README.md").read_text().startswith(f"# {method} for ")
    if method == "medusa":
        accuracies = read_head(trained.out).config.accuracies
        assert [row[0] for row in accuracies] == card["held_out_accuracy"]


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "draft"])
def test_a_training_goes_on_from_a_head(plan: HeadPlan, method: Any) -> None:
    short = dataclasses.replace(plan.schedule, epochs=1)
    first = dataclasses.replace(plan, method=method, out=plan.out / "first", hidden_size=32, schedule=short)
    score = train_head(first, Quiet()).score
    still = dataclasses.replace(short, learning_rate=1e-9)
    again = dataclasses.replace(
        first, out=plan.out / "again", begin_with=first.out, schedule=still, draft_vocab_size=96
    )
    assert train_head(again, Quiet()).score.mean_loss == pytest.approx(score.mean_loss, abs=1e-4)
    anew = dataclasses.replace(again, out=plan.out / "anew", begin_with=None)
    assert train_head(anew, Quiet()).score.mean_loss > score.mean_loss + 1e-3  # the control
    digest = weights_digest(first.out)
    assert json.loads((again.out / "training.json").read_text())["begun_with"] == digest
    assert digest[:16] in (again.out / "README.md").read_text()


def test_each_own_lm_head_learns_of_its_position(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    folder = medusa_heads(tmp_path / "own", lm_head="own")
    heads, drafted = begin_with(folder, "medusa", model, ())
    objective = MedusaObjective(heads, model.lm_head.weight.detach(), drafted)
    heard = torch.randn(5, heads.config.hidden_size)
    for position in range(heads.config.num_heads):
        assert torch.equal(objective.logits(heard, position), heads.lm_heads[position](heard))
    assert not torch.equal(objective.logits(heard, 0), objective.logits(heard, 1))


def test_a_head_that_cannot_be_gone_on_from_is_refused(plan: HeadPlan, tmp_path: Path) -> None:
    heads = dataclasses.replace(plan, method="medusa", out=tmp_path / "medusa")
    train_head(dataclasses.replace(heads, schedule=dataclasses.replace(plan.schedule, epochs=1)), Quiet())
    with pytest.raises(UnsupportedError, match=r"begin_with: .*is a head of method 'medusa'"):
        train_head(dataclasses.replace(plan, begin_with=heads.out), Quiet())
    with pytest.raises(ConfigError, match=r"begin_with: .*cannot be loaded"):
        train_head(dataclasses.replace(plan, method="draft", begin_with=tmp_path), Quiet())
    assert not plan.out.exists()


def test_an_interrupted_training_ends_as_one_that_was_not(plan: HeadPlan) -> None:
    whole = dataclasses.replace(plan, out=plan.out / "whole")
    train_head(whole, Quiet())
    halved = dataclasses.replace(plan, out=plan.out / "halved")
    for stop in (5, 9):
        with pytest.raises(KeyboardInterrupt):
            train_head(halved, Quiet(stop_after=stop))
    for name, value in {"positions": 2, "draft_vocab_size": 64}.items():
        with pytest.raises(ConfigError, match=f"other {name}"):
            train_head(dataclasses.replace(halved, **{name: value}), Quiet())
    train_head(halved, Quiet())
    same_weights(whole, halved)
    other = dataclasses.replace(plan, out=plan.out / "other")
    other = dataclasses.replace(other, schedule=dataclasses.replace(plan.schedule, seed=1))
    train_head(other, Quiet())
    with pytest.raises(AssertionError):  # the control: another order of the data shows
        same_weights(whole, other)


def same_weights(a: HeadPlan, b: HeadPlan) -> None:
    ours, theirs = read_head(a.out), read_head(b.out)
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


def test_features_are_captured_once_and_go_on_where_they_stopped(
    plan: HeadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(plan, features=tmp_path / "own")
    ran = []
    original = features._capture
    monkeypatch.setattr(features, "_capture", lambda *a: ran.append(1) or original(*a))

    class Stops(Quiet):
        def captured(self, tokens: int, total: int) -> None:
            if tokens > total / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(plan, Stops())
    before = len(ran)
    done = len(features.FeatureStore(plan.features).paths())
    assert 0 < done == before - 1
    monkeypatch.setattr(session, "train", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_head(plan, Quiet())
    shards = len(features.FeatureStore(plan.features).paths())
    assert len(ran) == shards + 1 > before  # one of them was begun twice
    with pytest.raises(ConfigError, match="other max_length"):
        train_head(dataclasses.replace(plan, max_length=20), Quiet())


def test_features_are_what_the_target_says(plan: HeadPlan, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    train_head(plan, Quiet())
    paths = features.FeatureStore(plan.features).paths()
    assert len(paths) >= features.SHARDS_AT_LEAST  # so that one in twenty conversations is held out
    shard = features.FeatureStore.read(paths[0])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    start, end = shard.offsets[3], shard.offsets[4]
    with torch.no_grad():
        states = model(shard.tokens[None, start:end].long(), output_hidden_states=True).hidden_states
    for found, true in (
        (shard.last[start:end], states[-1][0]),
        (shard.aux[start:end], torch.cat([states[0][0], states[1][0]], -1)),
    ):
        assert torch.allclose(found.float(), true, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is empty"),
        ("nonsense\n", "line 1: Expecting value"),
        ('{"prompt": "a"}\n', "line 1: no 'response'"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "do not end with an answer"),
        ('{"prompt": "a", "token_ids": [5, 4000]}\n', "token_ids that the tokenizer does not have"),
        ('{"prompt": "a", "token_ids": []}\n', "no answer"),
        ('{"messages": [5, {"role": "assistant", "content": "a"}]}\n', "line 1"),
    ],
)
def test_data_without_a_usable_line_is_refused(
    tiny_model_dir: Path, tmp_path: Path, content: str, words: str
) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "traffic.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no line of") as caught:
        read_traffic(path, AutoTokenizer.from_pretrained(tiny_model_dir), 100)
    assert words in str(caught.value)


def test_the_command_trains_says_how_it_went_and_what_to_try(
    traffic: Path, tiny_model_dir: Path, captured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "heads"
    command = [
        "train", "medusa", "--model", str(tiny_model_dir), "--data", str(traffic), "--out", str(out),
        "--draft-vocab-size", "96", "--positions", "2", "--epochs", "1",
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "left out 3 lines: line 151" in done.stderr
    assert "150 conversations" in done.stderr
    assert "epoch 1: held out: accuracy" in done.stderr
    assert '"proposer": "medusa"' in done.stdout
    assert read_head(out).config.target == tiny_model_dir.name
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
    wrong = CliRunner().invoke(app, [*command[:-1], "1", "--layout", "sglang", "--out", str(tmp_path / "b")])
    assert wrong.exit_code == 2
    assert "SGLang has no medusa of its own" in wrong.stderr
    few = CliRunner().invoke(app, [*command, "--max-conversations", "63", "--out", str(tmp_path / "c")])
    assert few.exit_code == 2
    assert "63 conversations are too few" in few.stderr
