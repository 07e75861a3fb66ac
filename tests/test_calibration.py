"""Calibration: which steps are noted, what is kept, and when it is measured anew."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from misbehaving_proposers import FakeClock, ints
from typer.testing import CliRunner

from spec_plugins.cli import app
from spec_plugins.config import Config, load_config
from spec_plugins.driver import Driver
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.evaluation import calibration, calibration_cache
from spec_plugins.evaluation.calibration import Plan, calibrate
from spec_plugins.evaluation.comparison import machine
from spec_plugins.proposer import Target
from spec_plugins.proposers import calibration as proposer_module
from spec_plugins.registry import registry

for module in ("scipy", "torch", "transformers"):
    pytest.importorskip(module, reason=f"needs {module}: pip install 'spec-plugins[evaluate,transformers]'")

# -------------------------------------------------------------------------------------------- the proposer

TOKENS = np.tile(np.arange(64, dtype=np.int32), (8, 1))


class Noting:
    """A driver around the proposer, on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *lengths: int, depth: int = 8) -> None:
        self.clock, self.file = FakeClock(), folder / "samples"
        monkeypatch.setattr(time, "perf_counter", self.clock)
        options = {"draft_tokens": list(lengths), "samples": str(self.file)}
        target = Target(128, 64, 8, num_speculative_tokens=depth)
        self.driver = Driver(registry().create("calibration", options), target, Config())

    def step(
        self,
        lengths: dict[str, int],
        prompts: int = 10,
        seconds: float = 1.0,
        limits: Sequence[int] | None = None,
    ) -> list[int]:
        """Ask for drafts after so much time; returns how many each request got."""
        self.clock.now += seconds
        n = len(lengths)
        drafts = self.driver.propose(
            list(lengths), TOKENS, np.arange(n, dtype=np.int32), ints(*lengths.values()),
            prompt_lengths=np.full(n, prompts, np.int32), limits=None if limits is None else ints(*limits),
        )  # fmt: skip
        assert not self.driver.statistics.faults
        return drafts.counts.tolist()

    @property
    def noted(self) -> list[tuple[float, ...]]:
        lines = self.file.read_text().splitlines()
        return [tuple(float(word) for word in line.split(",")) for line in lines]


@pytest.fixture
def noting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Noting]:
    return lambda *lengths, **more: Noting(tmp_path, monkeypatch, *lengths, **more)


def test_steps_of_decoding_are_noted(noting: Callable[..., Noting]) -> None:
    it = noting(3)
    assert it.step({"a": 11, "b": 21}) == [3, 3]
    it.step({"a": 12, "b": 22}, seconds=0.25)
    it.step({"b": 24, "a": 13}, seconds=0.5)  # rows may move, and drafts be accepted
    assert it.noted == [(2, 3, 16.0, 0.25), (2, 3, 17.0, 0.5)]


def test_other_steps_are_not_noted(noting: Callable[..., Noting]) -> None:
    it = noting(3)
    it.step({"a": 10})  # at its prompt
    it.step({"a": 11})
    it.step({"a": 12, "b": 11})  # one joined, after a prefill
    it.step({"a": 13})  # one left
    it.step({}), it.step({"a": 14})  # idle
    it.step({"a": 15}, limits=[1])
    it.step({"a": 16, "b": 12})
    it.step({"a": 17, "b": 13}, limits=[3, 1])  # of two lengths
    it.step({"a": 18, "b": 14})
    it.driver.finish(["a"])
    it.step({"a": 19, "b": 15})  # gone, and come back under its name
    assert [(n, drafted, c) for n, drafted, c, _ in it.noted] == [(1, 3, 14.0), (2, 3, 14.0)]


def test_lengths_come_in_blocks(noting: Callable[..., Noting]) -> None:
    it = noting(0, 1, 4, 8)
    counts = [it.step({"a": 11 + i})[0] for i in range(40)]
    blocks = [counts[i : i + 4] for i in range(0, 40, 4)]
    assert all(sorted(block) == [0, 1, 4, 8] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 3
    assert [n for _, n, _, _ in it.noted] == counts[:-1]


def test_the_file_is_new_and_has_an_end(
    noting: Callable[..., Noting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(proposer_module, "MAX_SAMPLES", 5)
    it = noting(0)
    for i in range(20):
        it.step({"a": 11 + i})
    assert len(it.noted) == 5
    assert stat.S_IMODE(it.file.stat().st_mode) == 0o600
    before = it.file.read_text()
    with pytest.raises(ConfigError, match=r"options\.samples: .* cannot be made"):
        noting(0)
    assert it.file.read_text() == before


def test_without_a_file_it_drafts(tmp_path: Path) -> None:
    driver = Driver(registry().create("calibration"), Target(128, 64, 8, num_speculative_tokens=5), Config())
    one = ints(0), ints(11)
    assert {int(driver.propose(["a"], TOKENS, *one).counts[0]) for _ in range(6)} == {0, 5}
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_does_not_fit_is_refused(noting: Callable[..., Noting]) -> None:
    with pytest.raises(ConfigError, match=r"options\.draft_tokens: 9 is more than num_speculative_tokens 8"):
        noting(0, 9)


# ------------------------------------------------------------------------------------------- the measuring


@dataclass
class ToyEngine:
    """Takes (B, q, context) to a time, and notes steps as the proposer does."""

    started: int = 0
    waves: list[int] = field(default_factory=list)
    most: int = 99
    """Requests that it can run at once."""
    interrupt_at: int = -1

    @contextmanager
    def serving(
        self, model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]
    ) -> Iterator[calibration.Answer]:
        self.started += 1
        rng = np.random.default_rng(0)
        samples = Path(config.options["samples"])

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            n = min(len(prompts), self.most)
            assert batch >= len(prompts)
            assert len({tuple(p[:8]) for p in prompts}) == len(prompts)
            with samples.open("a") as file:
                for i in range(tokens - 1):
                    if len(self.waves) == self.interrupt_at and i == 6:
                        self.interrupt_at = -1
                        raise KeyboardInterrupt
                    q = 1 + config.options["draft_tokens"][i % len(config.options["draft_tokens"])]
                    context = len(prompts[0]) + i
                    seconds = (1e-2 + 1e-3 * n * q) * (1 + 0.01 * rng.standard_normal())
                    file.write(f"{n},{q - 1},{context},{seconds:.7f}\n")
                file.write("1,0,99,5.0\n" if n > 1 else "")  # the last one runs alone
            self.waves.append(n)
            return [[0] * tokens for _ in prompts]

        yield answer


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    made = ToyEngine()
    monkeypatch.setattr(calibration, "_adapter", lambda engine: made)
    return made


@pytest.fixture
def plan(tiny_model_dir: Path) -> Plan:
    return Plan(str(tiny_model_dir), "transformers", (1, 2, 4), (0, 3), (64,), steps=12)


def sizes(times: Any) -> set[tuple[int, int, int]]:
    return {(c.batch, c.q, c.context) for c in times.cells}


def test_every_cell_is_measured_once(toy: ToyEngine, plan: Plan, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []

    def tell(done: float, left: float, words: str) -> None:
        told.append((done, words))

    times = calibrate(plan, cache=tmp_path, progress=tell)
    assert sizes(times) == {(b, q, 64) for b in (1, 2, 4) for q in (1, 4)}
    for cell in times.cells:
        assert 12 <= cell.steps <= 40
        assert cell.median == pytest.approx(1e-2 + 1e-3 * cell.batch * cell.q, rel=0.02)
        assert abs(cell.mean_context - 64) < 8
    assert times.seconds(3, 2, 64).seconds == pytest.approx(16e-3, rel=0.03)
    # First one that does not count, then all sizes in turn, there and back.
    assert toy.waves[:7] == [4, 1, 2, 4, 4, 2, 1]
    assert (told[0], told[-1]) == ((0.0, "starting transformers"), (1.0, "fitting"))
    assert [done for done, _ in told] == sorted(done for done, _ in told)

    assert calibrate(plan, cache=tmp_path) == times
    assert toy.started == 1
    more = calibrate(replace(plan, batch_sizes=(2, 8)), cache=tmp_path)
    assert sizes(more) == sizes(times) | {(8, 1, 64), (8, 4, 64)}
    assert toy.started == 2
    assert toy.waves[7:] == [8, 8, 8]
    again = calibrate(plan, again=True, cache=tmp_path)
    assert toy.started == 3
    assert sizes(again) == sizes(times)


def test_an_interrupted_run_goes_on(toy: ToyEngine, plan: Plan, tmp_path: Path) -> None:
    toy.interrupt_at = 5
    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, cache=tmp_path)
    (kept,) = tmp_path.glob("*.json")
    found = json.loads(kept.read_text())
    assert {c["batch"] for c in found["cells"]} == {1, 2, 4}
    steps = sum(c["steps"] for c in found["cells"])
    before = len(toy.waves)
    times = calibrate(plan, cache=tmp_path)
    assert times.fit is not None
    assert all(c.steps >= 12 for c in times.cells)
    assert len(toy.waves) - before < before
    assert sum(c.steps for c in times.cells) > steps
    assert [p.name for p in tmp_path.iterdir()] == [kept.name]


def test_what_the_engine_cannot_run_is_said(toy: ToyEngine, plan: Plan, tmp_path: Path) -> None:
    toy.most = 3
    with pytest.raises(UnsupportedError, match="4 requests of 64 tokens never ran at once in transformers"):
        calibrate(plan, cache=tmp_path)
    assert sizes(calibrate(replace(plan, batch_sizes=(1, 2)), cache=tmp_path)) >= {(2, 1, 64)}


def test_another_setting_is_measured_anew(
    toy: ToyEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(plan.model).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    cache, plan = tmp_path / "cache", replace(plan, model=str(model), batch_sizes=(1, 2))

    def starts(plan: Plan = plan) -> int:
        before = toy.started
        calibrate(plan, cache=cache)
        return toy.started - before

    assert starts() == 1
    model = model.rename(tmp_path / "elsewhere")
    plan = replace(plan, model=str(model))
    assert starts(plan) == 0  # the same model in another place
    assert starts(replace(plan, dtype="float32")) == 1
    assert starts(replace(plan, arguments=("--enforce-eager",))) == 1
    assert starts(replace(plan, engine="vllm")) == 1
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "63")
        assert starts(plan) == 1
    with monkeypatch.context() as patch:
        patch.setattr(calibration_cache, "installed_version", lambda engine: "0.0.1")
        assert starts(plan) == 1
    here = machine()
    for change in ({"processor": "another"}, {"cores": 4096}):
        with monkeypatch.context() as patch:
            patch.setattr(calibration_cache, "machine", lambda change=change: {**here, **change})
            assert starts(plan) == 1
    with monkeypatch.context() as patch:
        patch.setattr(calibration_cache, "_gpus", lambda: ["a GPU"])
        assert starts(plan) == 1
    assert starts(plan) == 0
    weights = next(model.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert starts(plan) == 1
    for file in cache.iterdir():
        file.write_text("{}")  # of another version of this project, say
    assert starts(plan) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_sizes": (0, 1)}, "batch_sizes: 0 cannot be used; give numbers from 1 to 4096"),
        ({"draft_tokens": (-1,)}, "draft_tokens: -1 cannot be used"),
        ({"draft_tokens": ()}, "draft_tokens: nothing cannot be used"),
        ({"contexts": (4,)}, "contexts: 4 cannot be used"),
    ],
)
def test_plans_that_cannot_be(plan: Plan, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(plan, **change)


def test_models_that_are_none(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: 'no/such' is neither a folder nor"):
        calibrate(replace(plan, model="no/such"), cache=tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json that says vocab_size"):
        calibrate(replace(plan, model=str(tmp_path)), cache=tmp_path)


# --------------------------------------------------------------------------------------- the command line


@pytest.fixture
def command(
    toy: ToyEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    monkeypatch.setenv("SPEC_PLUGINS_CACHE", str(tmp_path / "cache"))
    sizes = ["--batch-sizes", "1,4", "--draft-tokens", "0,3", "--steps", "4"]
    return lambda *more: CliRunner().invoke(app, ["calibrate", plan.model, *sizes, *more])


def test_the_command_shows_and_writes(command: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    shown = command("--context", "64", "--out", str(out))
    assert shown.exit_code == 0, shown.output
    assert "3 draft tokens" in shown.stdout
    assert "Model of step time: off by " in shown.stdout
    printed = command("--context", "64", "--json")
    assert json.loads(printed.stdout) == json.loads(out.read_text())
    assert len(json.loads(printed.stdout)["cells"]) == 4
    assert list((tmp_path / "cache" / "calibrations").glob("transformers-*.json"))


def test_contexts_that_the_model_takes(command: Callable[..., Any]) -> None:
    found = json.loads(command("--json").stdout)
    assert {c["context"] for c in found["cells"]} == {128}  # of 256


def test_an_interrupt_is_told(command: Callable[..., Any], toy: ToyEngine) -> None:
    toy.interrupt_at = 2
    done = command("--context", "64")
    assert done.exit_code == 130
    assert "the same command goes on there" in done.stderr
    assert command("--context", "64").exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "tensorrt-llm"], "TensorRT-LLM cannot be calibrated in this version; use --engine"),
        (["--engine", "vlm"], "did you mean 'vllm'?"),
        (["--context", "64;128"], "--context: '64;128' cannot be used; give numbers with commas"),
    ],
)
def test_the_command_refuses(command: Callable[..., Any], words: list[str], says: str) -> None:
    done = command(*words)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_the_embedded_engine_takes_no_flags(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enforce-eager: the embedded engine takes no flags"):
        calibrate(Plan(str(tiny_model_dir), "transformers", arguments=("--enforce-eager",)), cache=tmp_path)


def test_the_options_go_by_flags() -> None:
    from spec_plugins.launch import prepare

    fields = {"proposer": "calibration", "num_speculative_tokens": 4, "options": {"draft_tokens": [0, 4]}}
    for engine in ("vllm", "sglang"):
        assert prepare(engine, load_config(fields)).route == "plugin"
