"""``spec-plugins recommend``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.output import AsJson, console, show_json, show_warning
from spec_plugins.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from spec_plugins.evaluation.recommended import Recommendation, Started
    from spec_plugins.evaluation.step_times import StepTimes

__all__ = ["read_times", "recommend_command"]


def recommend_command(
    replays: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="What `spec-plugins replay --out` wrote, files or folders; several of the same requests.",
        ),
    ],
    times: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="What `spec-plugins calibrate --out` wrote."),
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="How many requests decode at once: numbers with commas. Default: what the traffic says of "
            "itself, where it has times, else the batch sizes that were calibrated."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the result, as HTML, Markdown and JSON.")
    ] = None,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples/--no-examples",
            help="Show the replay's examples in the HTML; it is text of the traffic.",
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Say which method pays at which concurrency, or that none does, from a replay and step times.

    spec-plugins replay path/to/model --traffic traffic.jsonl --engine vllm --out replayed

    spec-plugins calibrate path/to/model --engine vllm --out times.json

    spec-plugins recommend replayed --times times.json --concurrency 1,4,16,32
    """
    from spec_plugins.cli.calibrate import numbers
    from spec_plugins.evaluation import recommendation_page, recommendation_report
    from spec_plugins.evaluation.candidates import read_replays
    from spec_plugins.evaluation.recommendation import recommend

    asked = numbers("--concurrency", concurrency) if concurrency is not None else ()
    read = read_replays(replays)
    found = recommend(read, read_times(times), asked)
    if as_json:
        show_json(found.model_dump(mode="json"))
    else:
        _show(found)
    if out is None:
        return
    paths = recommendation_report.write(found, out)
    try:
        shown = read if examples else replace(read, examples={})
        paths.append(recommendation_page.write(found, shown, out))
    except UnavailableError as error:
        show_warning(str(error))
    for path in paths:
        console(stderr=True).print(f"wrote {path}", markup=False, soft_wrap=True)


def read_times(path: Path) -> StepTimes:
    """A file of ``calibrate --out``; raises :class:`ConfigError`."""
    import pydantic

    from spec_plugins.evaluation.step_times import StepTimes

    try:
        return StepTimes.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, pydantic.ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"--times: {str(path)!r} cannot be used: {first}; give what `spec-plugins calibrate --out` wrote"
        ) from error


def _show(found: Recommendation) -> None:
    from spec_plugins.evaluation import recommendation_report as report

    out = console()

    def say(text: str = "") -> None:
        out.print(text, markup=False, soft_wrap=True)

    def start(started: Started | None) -> None:
        if started is None:
            return
        for line in report.pasted(started, found.engine, str(found.about.get("model"))):
            say(f"    {line}")
        for note in started.notes:
            say(f"  Note: {note}")

    out.print(report.table(found))
    for at in found.at:
        out.print(f"[bold]{report.title(at)}[/]", soft_wrap=True)
        for reason in at.reasons:
            say(f"  {reason}")
        start(at.started)
    say()
    for sentence in report.overall(found):
        say(sentence)
    start(found.overall.started if found.overall else None)
    for sentence in (*report.crossings(found), *found.reasons):
        say(sentence)
    for note in found.notes:
        say(f"Note: {note}")
