"""``spec-plugins calibrate``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.cli.output import AsJson, console, require, show_json, show_table
from spec_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from spec_plugins.evaluation.step_times import StepTimes

__all__ = ["calibrate_command", "numbers"]

RUNS_IN = ("transformers", "vllm", "sglang")


def calibrate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of the model, or the name of one that is downloaded.")],
    engine: Annotated[str, typer.Option(help=f"Which engine: {', '.join(RUNS_IN)}.")] = "transformers",
    batch_sizes: Annotated[
        str, typer.Option(help="How many requests run at once: numbers with commas.")
    ] = "1,2,4,8,16",
    draft_tokens: Annotated[
        str, typer.Option(help="Draft tokens of each request: numbers with commas; 0 is plain decoding.")
    ] = "0,1,2,4,8",
    contexts: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Tokens that each request has so far, on average: numbers with commas. Default: 128,1024, "
            "as far as the model takes them.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to measure of each, at least.")] = 40,
    dtype: Annotated[str, typer.Option(help="Number format, as the engine names it.")] = "auto",
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="A file for the result, as JSON.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is in the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how long an engine's steps take, by batch size and draft length.

    spec-plugins calibrate path/to/model --engine vllm --batch-sizes 1,4,16 --max-model-len 4096

    Starts the engine with a proposer that drafts throw-away tokens, and lets it do nothing else. Arguments
    that are not named here go to the engine: give those that you serve with. What was measured is kept, and
    measured once for each engine, version, model, number format, machine and arguments; after Ctrl-C the same
    command goes on from there.
    """
    from spec_plugins.support import ENGINES, find_engine

    key = find_engine(engine)
    if key not in RUNS_IN:
        raise UnsupportedError(
            f"{ENGINES[key].title} cannot be calibrated in this version; use --engine {' or '.join(RUNS_IN)}"
        )
    require("scipy.optimize", "evaluate")
    require(f"spec_plugins.adapters.{ENGINES[key].package}.calibration_runner", f"evaluate,{key}")
    from spec_plugins.evaluation.calibration import Plan, calibrate
    from spec_plugins.evaluation.calibration_cache import cache_folder

    plan = Plan(
        model, key, numbers("--batch-sizes", batch_sizes), numbers("--draft-tokens", draft_tokens),
        numbers("--context", contexts) if contexts else (), dtype, tuple(context.args), steps,
    )  # fmt: skip
    try:
        with _Shown() as shown:
            times = calibrate(plan, again=again, progress=shown)
    except KeyboardInterrupt:
        console(stderr=True).print(
            f"Interrupted. What was measured is kept in {cache_folder()}; the same command goes on there.",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(130) from None
    if out is not None:
        _write(out, times.model_dump_json(indent=1))
    if as_json:
        show_json(times.model_dump(mode="json"))
    else:
        _show(times)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Those that an option lists; raises :class:`ConfigError`."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name}: {text!r} cannot be used; give numbers with commas, as in 1,4,16"
        ) from None


def _write(out: Path, text: str) -> None:
    try:
        unfinished = out.with_name(f"{out.name}.part")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        raise ConfigError(f"--out: {str(out)!r} cannot be written: {error}") from error


def _show(times: StepTimes) -> None:
    widths = sorted({c.q for c in times.cells})
    by_row: dict[tuple[int, int], dict[int, str]] = {}
    for c in times.cells:
        low, high = c.quartiles
        by_row.setdefault((c.context, c.batch), {})[c.q] = f"{c.median * 1e3:.2f} ±{(high - low) * 500:.2f}"
    show_table(
        ("context", "requests", *(f"{q - 1} draft tokens" for q in widths)),
        [(str(c), str(b), *(row.get(q, "-") for q in widths)) for (c, b), row in by_row.items()],
    )
    say = console().print
    say("Milliseconds a step: median, and half the distance of the quartiles.")
    if times.fit is None:
        say("Too few cells for a model of step time: measure more batch sizes or draft lengths.")
        return
    errors = times.fit.summary()
    text = "Model of step time: off by {median_residual:.1%} in the median, {worst_residual:.1%} at worst"
    if not math.isnan(errors["median_held_out"]):
        text += "; where it has not seen the cell, {median_held_out:.1%} and {worst_held_out:.1%}"
    say(text.format(**errors) + ".", soft_wrap=True)


class _Shown:
    """Progress on stderr: a bar for people, nothing elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        shown = console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"), console=shown, disable=not shown.is_terminal, transient=True,
        )  # fmt: skip
        self._task: Any = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, done: float, left: float, words: str) -> None:
        told = (
            ""
            if math.isnan(left)
            else f"about {left / 60:.0f} min left"
            if left > 90
            else f"{left:.0f} s left"
        )
        self._bar.update(self._task, completed=done, description=words, left=told)
