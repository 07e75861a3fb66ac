"""An update of the target that costs acceptance is caught, an identical one never is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner, Result

from spec_plugins import ConfigError
from spec_plugins.cli import app

pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")

from spec_plugins.evaluation import gate

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
DEPTH = 4

# ------------------------------------------------------------------------------------------- statistics


def simulated(n: int, harm: float, rng: np.random.Generator) -> tuple[Longs, Longs, Longs, Longs]:
    """Steps and accepted tokens of ``n`` requests, before an update and after it.

    Each request has its own rate of acceptance, which the update lowers by a share ``harm`` and changes by
    chance; its responses have other lengths and, given the rate, independent steps.
    """
    before = rng.beta(2.5, 2.5, n)
    after = np.clip(before * (1 - harm) + rng.normal(0, 0.05, n), 0, 1)
    found = []
    for rates in (before, after):
        length = np.minimum(rng.lognormal(4.5, 0.8, n), 512) + 2
        powers = np.stack([rates**k for k in range(1, DEPTH + 1)])
        mean = powers.sum(0)
        variance = ((2 * np.arange(1, DEPTH + 1) - 1) @ powers) - mean**2
        steps = np.maximum(1, np.round(length / (1 + mean)))
        accepted = mean * steps + rng.normal(0, 1, n) * np.sqrt(np.maximum(variance, 0) * steps)
        found += [steps.astype(np.int64), np.clip(np.round(accepted), 0, DEPTH * steps).astype(np.int64)]
    return found[0], found[1], found[2], found[3]


def true_loss(harm: float) -> float:
    s0, a0, s1, a1 = (of.sum() for of in simulated(300_000, harm, np.random.default_rng(99)))
    return float(1 - (1 + a1 / s1) / (1 + a0 / s0))


def by_tokens(s0: Longs, a0: Longs, s1: Longs, a1: Longs, tolerance: float) -> float:
    """What not to do: the p-value of a test that takes draft tokens for independent, and pairs nothing."""
    kept, rates = 1 - tolerance, [a.sum() / (DEPTH * s.sum()) for s, a in ((s0, a0), (s1, a1))]
    errors = [DEPTH * (p * (1 - p) / (DEPTH * s.sum())) ** 0.5 for p, s in zip(rates, (s0, s1), strict=True)]
    distance = (1 + DEPTH * rates[1]) - kept * (1 + DEPTH * rates[0])
    return NormalDist().cdf(float(distance / np.hypot(errors[1], kept * errors[0])))


@pytest.mark.parametrize("n", [12, 40])
def test_false_alarms_and_false_passes_are_as_rare_as_promised(n: int) -> None:
    """At the edge, where the true loss is just the tolerance, and errors are the likeliest."""
    edge, rng, times = true_loss(0.1), np.random.default_rng(n), 2500
    assert 0.05 < edge < 0.1
    p: dict[str, list[float]] = {"regressed": [], "passed": [], "by tokens": []}
    for _ in range(times):
        s0, a0, s1, a1 = simulated(n, 0.1, rng)
        found = gate.compare((s0, a0), (s1, a1), edge)
        p["regressed"].append(found.p_regressed)
        p["passed"].append(found.p_passed)
        p["by tokens"].append(by_tokens(s0, a0, s1, a1, edge))
    for alpha in (0.01, 0.05):
        rates = {name: float(np.mean(np.array(of) <= alpha)) for name, of in p.items()}
        noise = 3 * (alpha * (1 - alpha) / times) ** 0.5
        assert rates["regressed"] <= alpha + noise, rates
        assert rates["passed"] <= alpha + noise, rates
        assert rates["by tokens"] > 5 * alpha, rates


def test_several_proposers_raise_no_more_false_alarms_than_one() -> None:
    edge, rng, times, alpha = true_loss(0.1), np.random.default_rng(1), 700, 0.05
    any_of_four, uncorrected = 0, 0
    for _ in range(times):
        found = {}
        for name in "abcd":
            s0, a0, s1, a1 = simulated(30, 0.1, rng)
            found[name] = gate.compare((s0, a0), (s1, a1), edge)
        verdicts = gate.judge(found, alpha)
        any_of_four += gate.overall([v for v, _ in verdicts.values()]) == "regressed"
        uncorrected += any(c.p_regressed <= alpha for c in found.values())
    noise = 3 * (alpha * (1 - alpha) / times) ** 0.5
    assert any_of_four / times <= alpha + noise
    assert uncorrected / times > 0.12


def test_what_is_clear_is_told_and_what_is_not_says_how_many_would_tell() -> None:
    rng, told = np.random.default_rng(2), {"regressed": 0, "pass": 0}
    for _ in range(100):
        for verdict, harm, n in (("regressed", 0.35, 100), ("pass", -0.25, 100)):
            s0, a0, s1, a1 = simulated(n, harm, rng)
            found = {"x": gate.compare((s0, a0), (s1, a1))}
            told[verdict] += gate.judge(found)["x"][0] == verdict
    assert min(told.values()) > 90, told
    # With as many requests as are asked for, given the truth, it decides about as often as it says.
    loss = true_loss(0.2)
    s0, a0, s1, a1 = simulated(20_000, 0.2, rng)
    whole = gate.compare((s0, a0), (s1, a1))
    small = gate.Comparison(
        50, whole.before, whole.after, np.log1p(-loss), whole.error * (20_000 / 50) ** 0.5, 0.02, 1, 1, False
    )
    needed = small.requests_needed(0.01)
    assert needed is not None
    assert 50 < needed < 500
    decided = 0
    for _ in range(300):
        s0, a0, s1, a1 = simulated(needed, 0.2, rng)
        decided += gate.compare((s0, a0), (s1, a1)).p_regressed <= 0.01
    assert 0.7 < decided / 300 < 0.93
    assert (
        gate.Comparison(50, 2, 1.96, np.log(0.98), 0.01, 0.02, 0.5, 0.5, False).requests_needed(0.01) is None
    )


def test_equal_counts_pass_and_all_alike_is_certain() -> None:
    s0, a0, *_ = simulated(20, 0, np.random.default_rng(3))
    for tolerance in (0.0, 0.02):
        same = gate.compare((s0, a0), (s0, a0), tolerance)
        assert (same.loss, same.error, same.unchanged) == (0, 0, True)
        assert gate.judge({"x": same})["x"][0] == "pass"
    ten = np.full(20, 10), np.full(20, 10)
    none = np.full(20, 20), np.full(20, 0)
    worse = gate.compare(ten, none)
    assert worse.loss == pytest.approx(0.5)
    assert gate.judge({"x": worse})["x"][0] == "regressed"
    assert gate.judge({"x": gate.compare(none, ten)})["x"][0] == "pass"


def test_verdicts_together() -> None:
    assert gate.overall(["pass", "pass"]) == "pass"
    assert gate.overall(["pass", "cannot tell"]) == "cannot tell"
    assert gate.overall(["cannot tell", "regressed", "pass"]) == "regressed"
    assert gate._holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])


def test_too_few_requests_and_settings_out_of_range_are_refused() -> None:
    s0, a0, *_ = simulated(12, 0, np.random.default_rng(4))
    nothing = np.zeros(3, np.int64)
    with pytest.raises(ConfigError, match="9 have a step"):
        gate.compare(*[(np.append(s0[:9], nothing), np.append(a0[:9], nothing))] * 2)
    with pytest.raises(ConfigError, match="tolerance: 1 is out of range"):
        gate.compare((s0, a0), (s0, a0), 1)
    with pytest.raises(ConfigError, match=r"alpha: 0\.5 is out of range"):
        gate.judge({"x": gate.compare((s0, a0), (s0, a0))}, 0.5)


# ------------------------------------------------------------------------------------- the whole command

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

LINES = 40
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "that", "was", "but", "no", "one", "saw", "it", "go")


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("traffic") / "prompts.jsonl", np.random.default_rng(0)
    prompts = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(LINES)]
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return path


@pytest.fixture(scope="module")
def draft(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is the target itself: all that it drafts is accepted."""
    return shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture(scope="module")
def tuned(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target after a few steps of training."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("tuned") / "tuned")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser, tokens = torch.optim.AdamW(model.parameters(), 3e-3), torch.randint(4, 128, (8, 32))
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    return folder


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["baseline", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def spec(draft: Path) -> str:
    return json.dumps(
        {"proposer": "draft_model", "num_speculative_tokens": 4, "options": {"model": str(draft)}}
    )


@pytest.fixture(scope="module")
def saved(tiny_model_dir: Path, draft: Path, traffic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "baseline.json"
    done = run(
        "save", tiny_model_dir, "--traffic", traffic, "--spec", "ngram", "--spec", spec(draft), "--requests",
        30, "--max-new-tokens", 24, "--out", path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return path


def test_an_identical_target_passes(saved: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    done = run(
        "check", saved, "--model", moved, "--junit", tmp_path / "junit.xml", "--out", tmp_path / "o.json"
    )
    assert done.exit_code == 0, done.output
    assert "all 30 requests have the counts that they had" in done.stdout
    assert "All 30 responses are the baseline's." in done.stdout
    assert "byte for byte" in done.stdout
    data = json.loads((tmp_path / "o.json").read_text())
    assert (data["verdict"], data["changed_responses"]) == ("pass", 0)
    assert data["proposers"]["draft_model"]["tokens_a_step"] > 4
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert {key: suite.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "2", "failures": "0", "errors": "0",
    }  # fmt: skip


def test_a_slightly_tuned_target_is_caught(saved: Path, tuned: Path, tmp_path: Path) -> None:
    done = run("check", saved, "--model", tuned, "--junit", tmp_path / "junit.xml", "--json")
    assert done.exit_code == 1, done.output
    data = json.loads(done.stdout)
    found = data["proposers"]["draft_model"]
    assert (data["verdict"], found["verdict"]) == ("regressed", "regressed")
    assert found["loss"] > 0.1
    assert found["loss_interval"][0] > 0.02
    assert data["changed_responses"] > 15
    cases = {c.get("name"): c for c in ElementTree.parse(tmp_path / "junit.xml").getroot().iter("testcase")}
    failure = cases["draft_model"].find("failure")
    assert failure is not None
    assert "more than the tolerance of 2.0%" in str(failure.get("message"))
    assert cases["ngram"].find("failure") is None or data["proposers"]["ngram"]["verdict"] == "regressed"


def test_an_identical_target_passes_20_of_20_and_other_samples_raise_no_alarm(
    tiny_model_dir: Path, traffic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_plugins.cli.baseline import _asker
    from spec_plugins.config import load_config
    from spec_plugins.evaluation.baseline import Settings
    from spec_plugins.evaluation.baseline_runs import check, take
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.traffic.reading import TrafficFile

    target, file = ReplayTarget.open(tiny_model_dir), TrafficFile(traffic)
    tokenizer = target.tokenizer()
    monkeypatch.setattr(target, "tokenizer", lambda: tokenizer)  # read once
    configs = {"ngram": load_config("ngram", num_speculative_tokens=4)}
    verdicts, changed = [], 0
    for i in range(20):
        settings = Settings(max_model_len=256, max_new_tokens=6, temperature=0.7 * (i % 2), seed=i)
        taken = take(tiny_model_dir, target, file, configs, settings, _asker(target), requests=12)
        verdicts.append(check(taken, tiny_model_dir, target, file, _asker(target)).verdict)
        if i % 4 == 1:  # sampled, and now with other seeds
            other = taken.model_copy(update={"settings": settings.model_copy(update={"seed": 100 + i})})
            found = check(other, tiny_model_dir, target, file, _asker(target))
            assert found.verdict != "regressed"
            changed += found.changed_responses
    assert verdicts == ["pass"] * 20
    assert changed > 30


def test_nothing_is_overwritten(saved: Path, tiny_model_dir: Path, traffic: Path) -> None:
    from spec_plugins.evaluation import baseline

    before = saved.read_bytes()
    done = run("save", tiny_model_dir, "--traffic", traffic, "--spec", "ngram", "--out", saved)
    assert done.exit_code == 2
    assert "never overwritten" in done.stderr
    with pytest.raises(ConfigError, match="never overwritten"):
        baseline.write(baseline.read(saved), saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    assert not saved.stat().st_mode & 0o222


def changed(saved: Path, to: Path, change: Callable[[Any], Any]) -> Path:
    data = json.loads(saved.read_text())
    change(data)
    to.write_text(json.dumps(data))
    return to


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["proposers"]["ngram"]["accepted"].__setitem__(3, 7), "was changed after it was saved"),
        (lambda d: d["settings"].update(seed=5), "was changed after it was saved"),
        (lambda d: d["provenance"].update(model="better"), "was changed after it was saved"),
        (lambda d: d.pop("sha256"), "cannot be read as one"),
        (lambda d: d.update(format="spec-plugins baseline 9"), "no baseline of this version"),
        (lambda d: d["requests"]["lines"].pop(), "not as many of everything"),
        (lambda d: d["proposers"].clear(), "no baseline of this version"),
    ],
)
def test_a_bundle_that_was_changed_is_refused(
    saved: Path, tiny_model_dir: Path, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    done = run("check", changed(saved, tmp_path / "b.json", change), "--model", tiny_model_dir)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("Error:") == 1


def test_what_is_no_bundle_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    for text in ("", "[]", '{"sha256": 1}', "\x00"):
        (tmp_path / "b.json").write_text(text)
        done = run("check", tmp_path / "b.json", "--model", tiny_model_dir)
        assert done.exit_code == 2
        assert "baseline: " in done.stderr


def test_other_traffic_is_refused(saved: Path, tiny_model_dir: Path, traffic: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(traffic.read_text() + '{"prompt": "one more"}\n')
    done = run("check", saved, "--model", tiny_model_dir, "--traffic", other)
    assert done.exit_code == 2
    assert "is not the file of the baseline" in done.stderr


def test_a_head_may_move_and_must_be_the_same(
    saved: Path, draft: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.move(draft, tmp_path / "moved"))
    try:
        done = run("check", saved, "--model", tiny_model_dir)
        assert done.exit_code == 2
        assert "is missing" in done.stderr
        assert run("check", saved, "--model", tiny_model_dir, "--head", moved).exit_code == 0
        (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + "\n")
        assert "is missing" in run("check", saved, "--model", tiny_model_dir, "--head", moved).stderr
        shutil.copytree(moved, draft)
        done = run("check", saved, "--model", tiny_model_dir)
        assert done.exit_code == 2
        assert "is not the one" in done.stderr
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(tiny_model_dir, draft)


def test_too_few_requests_are_refused(tiny_model_dir: Path, traffic: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(traffic.read_text().splitlines(True)[:9]))
    for path, more in ((few, ()), (traffic, ("--requests", 5))):
        done = run(
            "save", tiny_model_dir, "--traffic", path, "--spec", "ngram", *more, "--out", tmp_path / "b.json"
        )
        assert done.exit_code == 2
        assert "a baseline needs at least 10" in done.stderr
    assert not (tmp_path / "b.json").exists()


def test_a_request_that_cannot_be_asked_any_more_is_told(
    saved: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    shorter = shutil.copytree(tiny_model_dir, tmp_path / "shorter")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    done = run("check", saved, "--model", shorter)
    assert done.exit_code == 2
    assert "requests cannot be asked of this target" in done.stderr


def test_a_crash_is_no_regression(saved: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugins.evaluation import baseline_runs

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(baseline_runs, "check", fails)
    done = run("check", saved, "--model", tiny_model_dir)
    assert done.exit_code == 2
    assert "nothing could be checked: MemoryError: no more" in done.stderr
    # What Python, and so CI, makes of an error that nobody expects:
    monkeypatch.setattr(baseline_runs, "take", fails)
    save = ["baseline", "save", str(tiny_model_dir), "--traffic", str(saved), "--out", str(saved) + "2"]
    assert CliRunner().invoke(app, save).exit_code == 1


def test_no_text_of_the_traffic_is_in_the_bundle(saved: Path) -> None:
    assert "cat" not in saved.read_text()


# ------------------------------------------------------------------------------------------ the example


def test_commands_of_the_ci_example_exist() -> None:
    import shlex

    yaml = pytest.importorskip("yaml", reason="needs pyyaml: pip install 'spec-plugins[yaml]'")
    path = Path(__file__).resolve().parent.parent / "examples" / "ci" / "check_acceptance.yml"
    if not path.is_file():
        pytest.skip("needs the checkout: examples are not in the wheel")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    lines = [x for s in steps for x in s.get("run", "").replace("\\\n", " ").splitlines()]
    commands = [shlex.split(x)[1:] for x in lines if x.startswith("spec-plugins ")]
    assert any(words[:2] == ["baseline", "check"] for words in commands)
    for words in commands:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
