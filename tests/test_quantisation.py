"""Quantised targets: both gains and their product, and answers of the target as it is served."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spec_plugins.cli import app, evaluate
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError, SpecPluginsError, UnavailableError
from spec_plugins.evaluation import answered, calibration, quantisation
from spec_plugins.evaluation.quantisation import BothGains, Quantisation, gains, without_quantising
from spec_plugins.evaluation.recommended import AtConcurrency, Interval, Option, Recommendation
from spec_plugins.evaluation.replay_target import ReplayTarget
from spec_plugins.evaluation.step_times import Cell, Setting, StepTimes
from spec_plugins.proposer import Need

for module in ("scipy", "torch", "transformers"):
    pytest.importorskip(module, reason=f"needs {module}: pip install 'spec-plugins[evaluate,transformers]'")

SETTING = Setting(engine="vllm", engine_version="1", spec_plugins_version="0", model="m", dtype="float32")
ONE = Interval.of(1.0, 1.0, 1.0)
NGRAM = '{"proposer": "ngram", "num_speculative_tokens": 3}'


def step_times(seconds: float, seed: int, spread: float = 0.05, steps: int = 40) -> StepTimes:
    """Plain steps of 1 and 4 requests at two contexts: so many seconds for each request, but for noise."""
    rng = np.random.default_rng(seed)
    cells = [
        Cell(
            batch=b, q=1, context=c, mean_context=c,
            seconds=(seconds * b * (1 + c / 1000) * (1 + spread * rng.standard_normal(steps))).tolist(),
        )
        for b in (1, 4)
        for c in (200, 400)
    ]  # fmt: skip
    return StepTimes(setting=SETTING, cells=cells)


def option(method: str, draft_tokens: int, speed_up: Interval) -> Option:
    return Option(
        method=method, draft_tokens=draft_tokens, config=None, verdict="pays", speed_up=speed_up,
        tokens_per_second=ONE, tokens_per_step=ONE, drafted_per_step=0, drafts_in=0, step_ratio=1,
        draft_seconds=0, step_times="measured", effort="", effort_rank=0,
    )  # fmt: skip


def recommended(choices: dict[int, tuple[str, list[Option]]]) -> Recommendation:
    at = [
        AtConcurrency(
            concurrency=c, choice=choice, options=options, plain_step=ONE, token_cost=0, bound="latency",
            started=None, reasons=[],
        )
        for c, (choice, options) in choices.items()
    ]  # fmt: skip
    return Recommendation(
        engine="vllm", setting=SETTING, about={}, requests=40, mean_context=300.0, at=at, overall=None,
        crossovers=[], reasons=[], notes=[],
    )  # fmt: skip


NONE = option("none", 0, ONE)
SUFFIX = option("suffix", 4, Interval.of(1.5, 1.4, 1.7))


def one(choice: str, *options: Option, quantised: StepTimes, unquantised: StepTimes) -> BothGains:
    found = gains(recommended({4: (choice, list(options))}), quantised, unquantised)
    (at,) = found.at
    return at


# --------------------------------------------------------------------------------------------- the figures


def test_both_gains_and_their_product() -> None:
    quantised, unquantised = step_times(0.01, 0, spread=0.0), step_times(0.018, 1, spread=0.0)
    exact = one("suffix", NONE, SUFFIX, quantised=quantised, unquantised=unquantised)
    assert exact.unquantised_step.value == pytest.approx(0.018 * 4 * 1.3)
    assert exact.quantised_step.value == pytest.approx(0.01 * 4 * 1.3)
    assert (exact.method, exact.draft_tokens, exact.sure) == ("suffix", 4, True)
    assert exact.quantising.value == pytest.approx(1.8)
    assert exact.speculation == SUFFIX.speed_up
    # With exact step times the product has the interval of speculation alone.
    for ours, factor in zip(
        (exact.both.value, exact.both.low, exact.both.high), (1.5, 1.4, 1.7), strict=True
    ):
        assert ours == pytest.approx(1.8 * factor)


def test_intervals_hold_both_errors() -> None:
    quantised, unquantised = step_times(0.01, 0), step_times(0.018, 1)
    at = one("suffix", SUFFIX, NONE, quantised=quantised, unquantised=unquantised)
    assert None not in (at.quantising.low, at.quantising.high, at.both.low, at.both.high)
    assert at.quantising.low < 1.8 < at.quantising.high
    steps = [math.log(s.high / s.value) for s in (at.unquantised_step, at.quantised_step)]
    gain = math.log(at.quantising.high / at.quantising.value)
    assert gain == pytest.approx(math.hypot(*steps))
    assert min(steps) > 0
    assert math.log(at.both.value / at.both.low) == pytest.approx(math.hypot(gain, math.log(1.5 / 1.4)))
    assert math.log(at.both.high / at.both.value) == pytest.approx(math.hypot(gain, math.log(1.7 / 1.5)))


def test_the_interval_of_equal_targets_holds_1() -> None:
    """A control: as often as it says, over pairs of calibrations; and a real gain is told from it."""
    pairs = [(step_times(0.01, 2 * i), step_times(0.01, 2 * i + 1)) for i in range(150)]
    found = [one("none", NONE, quantised=q, unquantised=u).quantising for q, u in pairs]
    held = sum(g.low <= 1 <= g.high for g in found)
    assert 134 <= held <= 150
    told = [
        one("none", NONE, quantised=q, unquantised=step_times(0.0106, 999 + i)).quantising
        for i, (q, _) in enumerate(pairs[:50])
    ]
    assert sum(g.low > 1 for g in told) >= 45
    same = one("none", NONE, quantised=pairs[0][0], unquantised=pairs[0][0])
    assert same.quantising.value == same.both.value == 1.0


def test_what_is_not_known_is_not_told() -> None:
    times = step_times(0.01, 0)
    unsure = option("suffix", 4, Interval.of(1.5, math.nan, math.nan))
    at = one("cannot tell", unsure, NONE, quantised=times, unquantised=step_times(0.02, 1))
    assert (at.method, at.sure) == ("suffix", False)
    assert at.quantising.low is not None
    assert (at.both.low, at.both.high) == (None, None)
    assert at.both.value == pytest.approx(1.5 * at.quantising.value)
    few = one("suffix", SUFFIX, quantised=times, unquantised=step_times(0.02, 1, steps=7))
    assert few.quantising.low is few.both.low is None
    with pytest.raises(ConfigError, match="concurrency 2: no step without drafts was measured"):
        gains(recommended({2: ("none", [NONE])}), times, times)


def test_plain_decoding_gains_what_quantising_does() -> None:
    at = one("none", NONE, SUFFIX, quantised=step_times(0.01, 0), unquantised=step_times(0.02, 1))
    assert at.speculation == ONE
    assert at.both == at.quantising


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    choices = {1: ("suffix", [SUFFIX, NONE]), 4: ("cannot tell", [SUFFIX, NONE])}
    found = gains(recommended(choices), step_times(0.01, 0, 0.0), step_times(0.018, 1, 0.0))
    paths = quantisation.write(found, tmp_path)
    assert [p.name for p in paths] == ["quantisation.json", "quantisation.md"]
    assert Quantisation.model_validate_json(paths[0].read_text()) == found
    text = paths[1].read_text()
    assert (
        "| 1 | 23.40 | 13.00 | 1.80 (1.80–1.80) | suffix, 4 | 1.50 (1.40–1.70) | 2.70 (2.52–3.06) |" in text
    )
    assert "suffix, 4 (cannot tell)" in text
    assert quantisation.table(found).row_count == 2


# ------------------------------------------------------------------------------------------- its arguments


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--quantization", "fp8", "--enforce-eager"], ["--enforce-eager"]),
        (["--max-model-len", "64", "-q=fp8"], ["--max-model-len", "64"]),
        (["-q", "fp8", "--quantization_config", "{}", "--seed=1"], ["--seed=1"]),
        (["--torchao-config", "int8wo"], []),
        (["--kv-cache-dtype", "fp8", "--quantizations"], ["--kv-cache-dtype", "fp8", "--quantizations"]),
    ],
)
def test_what_quantises_is_left_out(given: list[str], left: list[str]) -> None:
    assert without_quantising(given) == tuple(left)


def altered(model: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a model with other fields in its configuration."""
    shutil.copytree(model, folder)
    about = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, **fields}))
    return folder


def test_refusals(tiny_model_dir: Path, tmp_path: Path) -> None:
    other = altered(tiny_model_dir, tmp_path / "other", vocab_size=64)
    quantised = altered(tiny_model_dir, tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    traffic = tmp_path / "prompts.jsonl"
    traffic.write_text('"a"\n')

    def says(unquantised: Path, model: Path = tiny_model_dir, *more: str) -> str:
        command = ["evaluate", str(model), "--traffic", str(traffic), "--report", str(tmp_path / "out")]
        done = CliRunner().invoke(app, [*command, "--unquantised", str(unquantised), *more])
        assert done.exit_code == 2
        assert not (tmp_path / "out").exists()
        return " ".join(done.output.replace("│", " ").split())

    assert "does not exist" in says(tmp_path / "nowhere")
    assert "has vocab_size 64 and" in says(other)
    assert "is the target itself, and no argument quantises it" in says(tiny_model_dir)
    assert "has a quantization_config itself" in says(quantised)
    assert "has a quantization_config itself" in says(quantised, quantised)


# ------------------------------------------------------------------------- the target as it is served


class Up:
    """A server that is up for the time of a ``with``."""

    up = False

    def __enter__(self) -> Up:
        self.up = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.up = False

    def get(self, path: str) -> tuple[int, str]:
        assert path == "/v1/models"
        return 200, '{"data": [{"id": "m", "max_model_len": 120}]}'

    def failure(self, what: str) -> SpecPluginsError:
        return SpecPluginsError(f"the server {what}")


class StandIn:
    """An engine's server that repeats prompts, and one for calibration with twice the time unquantised."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.calibrated: list[tuple[str, tuple[str, ...], list[int]]] = []
        self.tokens: list[int] = []
        self.ends = "length"
        self._lock = threading.Lock()

    def server(self, *given: Any) -> Any:
        self.started.append(given)
        return Up()

    def complete(
        self, running: Any, prompts: Sequence[Sequence[int]], tokens: int, ignore_eos: bool
    ) -> list[tuple[list[int], str]]:
        assert running.up
        assert not ignore_eos
        with self._lock:
            self.tokens.append(tokens)
        return [((list(p) * 20)[: min(tokens, 30)], self.ends) for p in prompts]

    @contextlib.contextmanager
    def serving(
        self, model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]
    ) -> Iterator[calibration.Answer]:
        lengths = list(config.options["draft_tokens"])
        self.calibrated.append((model, tuple(arguments), lengths))
        plain = 0.01 if "--quantization" in arguments else 0.02

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            with Path(config.options["samples"]).open("a") as file:
                for i in range(tokens):
                    drafted, at = lengths[i % len(lengths)], len(prompts[0]) + i
                    seconds = plain + 1e-5 * len(prompts) * drafted
                    file.write(f"{len(prompts)},{drafted},{at},{seconds:.7f}\n")
            return [[0] * tokens for _ in prompts]

        yield answer


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    made = StandIn()
    monkeypatch.setenv("SPEC_PLUGINS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(answered, "_server_of", lambda engine: made)
    monkeypatch.setattr(calibration, "_adapter", lambda engine: made)
    return made


def test_one_command(stand_in: StandIn, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The served target answers with the engine's arguments; the unquantised one runs without the one."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rng = np.random.default_rng(0)
    asked = [rng.integers(10, 120, 6).tolist() * 2 for _ in range(11)] + [list(range(8, 108))]
    lines = [{"prompt_token_ids": p, "token_ids": [9, 9], "cache_salt": "t"} for p in asked]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = ["evaluate", str(tiny_model_dir), "--traffic", str(prompts), "--report", str(out)]
    command += ["--engine", "vllm", "--concurrency", "1,2", "--spec", NGRAM, "--steps", "8"]
    command += ["--generate", "12", "--max-new-tokens", "40", "--unquantised", str(tiny_model_dir)]
    command += ["--dtype", "float32", "--quantization", "fp8", "--enforce-eager"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"

    arguments = ("--quantization", "fp8", "--enforce-eager")
    ((model, config, dtype, given),) = stand_in.started
    assert (model, config, dtype, tuple(given)) == (str(tiny_model_dir), None, "float32", arguments)
    assert sorted(stand_in.tokens) == [19, *[40] * 11]  # where the context ends before
    kept = [json.loads(line) for line in (out / "answered.jsonl").read_text().splitlines()]
    assert sorted(k["prompt_token_ids"] for k in kept) == sorted(asked)
    assert all(k["token_ids"] == (k["prompt_token_ids"] * 20)[: len(k["token_ids"])] for k in kept)
    assert all((k["finish_reason"], k["cache_salt"]) == ("length", "t") for k in kept)
    replayed = json.loads((out / "replay.json").read_text())
    assert replayed["about"]["response_tokens"] == 11 * 30 + 19

    folder = str(tiny_model_dir)
    assert stand_in.calibrated == [
        (folder, arguments, [0, 1, 2, 3]),
        (folder, ("--enforce-eager",), [0]),
    ]
    found = Quantisation.model_validate_json((out / "quantisation.json").read_text())
    recommendation = Recommendation.model_validate_json((out / "recommendation.json").read_text())
    assert [at.concurrency for at in found.at] == [1, 2]
    for at, of in zip(found.at, recommendation.at, strict=True):
        assert at.quantising.value == pytest.approx(2.0)
        assert at.method == of.choice == "ngram"
        assert at.both.value == pytest.approx(2 * of.options[0].speed_up.value)
    assert (found.quantised.flags, found.unquantised.flags) == (arguments, ("--enforce-eager",))
    plain = StepTimes.model_validate_json((out / "times_unquantised.json").read_text())
    assert {c.q for c in plain.cells} == {1}
    shown = " ".join(done.output.split())
    for title in (
        "1 of 5: what the target answers",
        "2 of 5: what is accepted",
        "5 of 5: what quantising gains",
    ):
        assert title in shown


def test_how_answers_end(stand_in: StandIn) -> None:
    for stand_in.ends in ("stop", "length"):
        with answered.answering("vllm", "m", "auto", [], 10) as (ask, longest):
            assert longest == 120
            assert ask([[5, 6], [7]]) == [([5, 6] * 5, stand_in.ends), ([7] * 10, stand_in.ends)]
    stand_in.ends = "abort"
    with (
        answered.answering("vllm", "m", "auto", [], 10) as (ask, _),
        pytest.raises(SpecPluginsError, match=r"gave up a request \(abort\)"),
    ):
        ask([[5]])


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answered, "installed_version", lambda engine: None)
    with (
        pytest.raises(UnavailableError, match="vLLM is not installed here"),
        answered.answering("vllm", "m", "auto", [], 10),
    ):
        pass


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_servers_are_asked(engine: str) -> None:
    server = importlib.import_module(f"spec_plugins.adapters.{engine}.server")
    posted: list[tuple[str, dict[str, Any]]] = []
    answers: dict[str, Any] = {
        "vllm": {
            "choices": [
                {"index": 1, "token_ids": [7], "finish_reason": "stop"},
                {"index": 0, "token_ids": [5, 6], "finish_reason": "length"},
            ]
        },
        "sglang": [
            {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "length", "length": 2}}},
            {"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop", "matched": 7}}},
        ],
    }

    @contextlib.contextmanager
    def post(path: str, body: dict[str, Any]) -> Iterator[io.StringIO]:
        posted.append((path, body))
        yield io.StringIO(json.dumps(answers[engine]))

    models = '{"data": [{"id": "the model"}]}'
    running = SimpleNamespace(post=post, get=lambda path: (200, models))
    for past_the_end in (True, False):
        found = server.complete(running, [[1, 2], [3]], 9, past_the_end)
        assert found == [([5, 6], "length"), ([7], "stop")]
        path, body = posted.pop()
        if engine == "vllm":
            assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [[1, 2], [3]], 9)
            assert (body["model"], body["temperature"], body["ignore_eos"]) == ("the model", 0, past_the_end)
        else:
            assert (path, body["input_ids"]) == ("/generate", [[1, 2], [3]])
            assert body["sampling_params"] == {
                "temperature": 0, "max_new_tokens": 9, "ignore_eos": past_the_end
            }  # fmt: skip


def test_states_of_weights_that_the_engine_quantises(capsys: pytest.CaptureFixture[str]) -> None:
    def config(name: str, *needs: Need) -> Any:
        return SimpleNamespace(proposer=name, create_proposer=lambda: SimpleNamespace(needs=frozenset(needs)))

    specs = [config("ngram"), config("eagle3", Need.AUX_HIDDEN_STATES)]
    evaluate._warn_of_states("vllm", specs, ["--seed", "1"])
    evaluate._warn_of_states("vllm", specs[:1], ["-q", "fp8"])
    assert capsys.readouterr().err == ""
    evaluate._warn_of_states("vllm", specs, ["-q", "fp8"])
    assert "Warning: eagle3: replayed with hidden states of the weights" in capsys.readouterr().err


# ------------------------------------------------------------------- what heads see of a quantised target

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}},
}


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is not None, reason="it can be loaded")
def test_states_of_a_target_that_transformers_cannot_load(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = altered(tiny_model_dir, tmp_path / "w8a8", quantization_config=W8A8)
    says = r"quantised by compressed-tensors, which transformers cannot load here \(.*\); replay heads with"
    with pytest.raises(ConfigError, match=says) as raised:
        _ = ReplayTarget.open(folder).model
    assert "\n" not in str(raised.value)
    target = ReplayTarget.open(folder, stand_in=tiny_model_dir)
    assert target.model.name_or_path == str(tiny_model_dir)
    assert target.stood_in
    own = ReplayTarget.open(tiny_model_dir, stand_in=folder)
    assert own.model.name_or_path == str(tiny_model_dir)
    assert not own.stood_in

    traffic = tmp_path / "prompts.jsonl"
    traffic.write_text('"the cat"\n')
    command = ["replay", str(folder), "--traffic", str(traffic), "--generate", "1", "--spec", NGRAM]
    for more, message in (
        ([], "replay heads with --unquantised"),
        (["--unquantised"], "is not what it says"),
    ):
        done = CliRunner().invoke(app, [*command, *more, *[str(tiny_model_dir)][: len(more)]])
        assert done.exit_code == 2, done.output
        assert message in " ".join(done.output.split())


def test_a_method_that_transformers_does_not_know(tiny_model_dir: Path, tmp_path: Path) -> None:
    """It would load the numbers as they are."""
    folder = altered(tiny_model_dir, tmp_path / "odd", quantization_config={"quant_method": "odd"})
    with pytest.raises(ConfigError, match=r"quantised by odd.*does not know that method"):
        _ = ReplayTarget.open(folder).model
