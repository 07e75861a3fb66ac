"""``spec-plugins baseline save`` and ``check``."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.generate import Dtype
from spec_plugins.cli.output import AsJson, console, progress, require, show_error, show_json, show_warning
from spec_plugins.cli.replay import MaxNewTokens, Mode, ModelFolder, Specs, Traffic, provided_by
from spec_plugins.errors import SpecPluginsError

if TYPE_CHECKING:
    from rich.text import Text

    from spec_plugins.evaluation.answered import Answer
    from spec_plugins.evaluation.baseline import Settings
    from spec_plugins.evaluation.baseline_runs import Asker, Checked
    from spec_plugins.evaluation.replay_target import ReplayTarget

__all__ = ["baseline_app"]

baseline_app = typer.Typer(
    no_args_is_help=True,
    help="Keep how much of its drafts a target accepts, and check an updated target against it.",
)

_APART = 1_000_003
"""Between the seeds of two runs: torch's generator on the CPU takes 32 bits, and leaves out the others."""
Device = Annotated[str, typer.Option(help="Where the model is run.")]


@baseline_app.command("save", short_help="Measure a target and keep the result as a baseline.")
def save_command(
    model: ModelFolder,
    traffic: Traffic,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The baseline; must be a new file.")],
    spec: Specs = None,
    requests: Annotated[
        int, typer.Option(min=1, help="How many to take: a sample that keeps the mix.")
    ] = 200,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Of the responses; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the sample, and of responses.")] = 0,
    engine: Annotated[
        str, typer.Option(help="Draft as in this engine: trees, or chains only.")
    ] = "transformers",
    mode: Annotated[Mode, typer.Option(help="How responses are gone through; see replay.")] = Mode.AUTO,
    concurrency: Annotated[
        int, typer.Option(min=1, help="How many requests run at once; matters to suffix.")
    ] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="The engine's longest context. Default: the model's.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the model.")] = Dtype.AUTO,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Have the target answer a sample of the traffic, and keep what proposers would have had accepted.

    spec-plugins baseline save path/to/model --traffic traffic.jsonl --spec ngram --out baseline.json

    Responses that the traffic has are not used. The file holds counts by request, digests and where they come
    from, and no text. It is never overwritten.
    """
    require("transformers", "transformers")
    require("scipy.special", "evaluate")
    from spec_plugins.evaluation import baseline
    from spec_plugins.evaluation.baseline_runs import take
    from spec_plugins.evaluation.demo import configs
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.traffic.reading import TrafficFile

    baseline.check_new(out)
    provides, chosen = provided_by(engine), configs(spec or ())
    target, file, doing = ReplayTarget.open(model, dtype.value, device), TrafficFile(traffic), _Doing()
    settings = baseline.Settings(
        engine=engine, dtype=target.dtype, max_model_len=max_model_len or target.max_model_len,
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, concurrency=concurrency,
        mode=mode.value,
    )  # fmt: skip
    with progress(not as_json, doing.shown):
        taken = take(
            model, target, file, chosen, settings, _asker(target), requests=requests, provides=provides,
            progress=doing,
        )  # fmt: skip
    baseline.write(taken, out)
    if left_out := file.told():
        show_warning(left_out)
    if as_json:
        show_json({"sha256": taken.sha256, **taken.model_dump(mode="json")})
        return
    for name, p in taken.proposers.items():
        console().print(
            f"{name}: {1 + sum(p.accepted) / sum(p.steps):.3f} tokens a step over {len(p.steps)} requests",
            markup=False,
        )
    console(stderr=True).print(f"wrote {out}", markup=False, soft_wrap=True)


@baseline_app.command(
    "check", short_help="Measure an updated target against a baseline: exit code 0, 1 or 2."
)
def check_command(
    bundle: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The baseline.")],
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the updated target.")],
    traffic: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The baseline's traffic. Default: where it was."),
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="The most chance of a false alarm, and of a false pass.")
    ] = 0.01,
    tolerance: Annotated[float, typer.Option(help="The share of tokens a step that may be lost.")] = 0.02,
    head: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Where a head of the baseline lies now, if it was moved; may be given several times.",
        ),
    ] = None,
    device: Device = "cpu",
    junit: Annotated[Path | None, typer.Option(dir_okay=False, help="A file for JUnit XML.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="A file for the result, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an updated target as the baseline was measured, on the same requests, and compare.

    spec-plugins baseline check baseline.json --model path/to/model --junit results.xml

    Exit code 0: pass. 1: a proposer regressed. 2: cannot tell, or nothing could be measured; says why.
    """
    try:
        checked = _check(bundle, model, traffic, alpha, tolerance, head or (), device, not as_json)
        _tell(checked, junit, out, as_json)
    except (SpecPluginsError, typer.Exit):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:  # Python's own exit code, 1, would say that it regressed
        traceback.print_exc()
        show_error(f"nothing could be checked: {type(error).__name__}: {error}")
        raise typer.Exit(2) from error
    from spec_plugins.evaluation.gate_report import EXIT_CODES

    raise typer.Exit(EXIT_CODES[checked.verdict])


def _check(
    bundle: Path,
    model: Path,
    traffic: Path | None,
    alpha: float,
    tolerance: float,
    heads: Sequence[Path],
    device: str,
    shown: bool,
) -> Checked:
    require("transformers", "transformers")
    require("scipy.special", "evaluate")
    from spec_plugins.evaluation.baseline import read
    from spec_plugins.evaluation.baseline_runs import check
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.traffic.reading import TrafficFile

    baseline = read(bundle)
    target = ReplayTarget.open(model, baseline.settings.dtype, device)
    file, doing = TrafficFile(traffic or Path(baseline.provenance.traffic)), _Doing()
    with progress(shown, doing.shown):
        return check(
            baseline, model, target, file, _asker(target), alpha=alpha, tolerance=tolerance, heads=heads,
            provides=provided_by(baseline.settings.engine), progress=doing,
        )  # fmt: skip


def _tell(checked: Checked, junit: Path | None, out: Path | None, as_json: bool) -> None:
    from spec_plugins.evaluation import gate_report

    data = gate_report.as_json(checked)
    if out is not None:
        gate_report.write_text("--out", out, json.dumps(data, indent=1) + "\n")
    if junit is not None:
        gate_report.write_text("--junit", junit, gate_report.junit(checked))
    if as_json:
        show_json(data)
        return
    say = console().print
    say(gate_report.table(checked))
    for name in checked.comparisons:
        say(f"{name}: {gate_report.reason(checked, name)}.", markup=False, soft_wrap=True)
    for note in gate_report.notes(checked):
        say(f"{note[0].upper()}{note[1:]}.", markup=False, soft_wrap=True)


def _asker(target: ReplayTarget) -> Asker:
    def asker(settings: Settings) -> Answer:
        from spec_plugins.adapters.transformers import Engine, SamplingParams

        def ask(prompts: Sequence[list[int]]) -> list[tuple[list[int], str]]:
            params = [
                SamplingParams(
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    seed=(settings.seed * _APART + i) % 2**32,
                )
                for i in range(len(prompts))
            ]
            answers = Engine(target.model).generate(prompts, params)
            return [(a.token_ids, a.finish_reason) for a in answers]

        return ask

    return asker


class _Doing:
    """What is being done, for those who watch."""

    def __init__(self) -> None:
        self._words = "reading"

    def __call__(self, doing: str, done: int, total: int) -> None:
        self._words = f"{doing}: {done:,} of {total:,}"

    def shown(self) -> Text:
        from rich.text import Text

        return Text(self._words)
