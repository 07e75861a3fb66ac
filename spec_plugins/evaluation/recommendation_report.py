"""A recommendation for people: a table, Markdown, and lines to paste."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.recommendation_reasons import shown
from spec_plugins.evaluation.recommended import (
    CANNOT_TELL,
    NONE,
    AtConcurrency,
    Interval,
    Option,
    Recommendation,
    Started,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "crossings", "markdown", "markdown_table", "overall", "pasted", "rests_on", "table", "title", "verdict",
    "write", "write_texts",
]  # fmt: skip

COLUMNS = ("method", "draft tokens", "speed-up", "tokens/s", "tokens a step", "verdict", "takes")
NOTE = (
    "Speed-up is that of decoding, for each request and in all; tokens/s are those of all requests together. "
    "In brackets: 95 % intervals, over requests and step times. Step times: {how}."
)


def _row(option: Option) -> tuple[str, ...]:
    return (
        option.method,
        str(option.draft_tokens or "-"),
        shown(option.speed_up),
        _whole(option.tokens_per_second),
        f"{option.tokens_per_step.value:.2f}",
        verdict(option),
        option.effort,
    )


def verdict(option: Option) -> str:
    """What is known of a method, and what it would take; empty for plain decoding."""
    told: str = "" if option.method == NONE else option.verdict
    if option.more_requests:
        told += f" without {option.more_requests:,} more requests"
    return told


def _whole(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:,.0f}"
    return f"{interval.value:,.0f} ({interval.low:,.0f}–{interval.high:,.0f})"


def title(at: AtConcurrency) -> str:
    """One concurrency, and what is chosen there."""
    requests = f"{at.concurrency} request{'s' if at.concurrency > 1 else ''} at once"
    if at.choice == NONE:
        return f"{requests}: none, decode plainly"
    if at.choice == CANNOT_TELL:
        return f"{requests}: cannot tell"
    chosen = next(o for o in at.options if o.method == at.choice)
    return f"{requests}: {chosen.method} with {chosen.draft_tokens} draft tokens"


def table(found: Recommendation) -> Table:
    """For a terminal of 80 columns: the ranking at each concurrency."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, title=f"What pays in {found.engine}: predicted, nothing was served")
    out.add_column("method", no_wrap=True)
    for column in ("draft\ntokens", "speed-up\n(95 %)", "tokens/s\n(95 %)", "verdict"):
        out.add_column(column, justify="right")
    for at in found.at:
        out.add_section()
        out.add_row(f"[bold]{at.concurrency} at once[/]")
        for option in at.options:
            method, *row = _row(option)[:4]
            chosen = option.method == at.choice
            out.add_row(f"{'→ ' if chosen else '  '}{method}", *row, _row(option)[5])
    return out


def crossings(found: Recommendation) -> Iterator[str]:
    """Where each method stops paying, a sentence each."""
    for c in found.crossovers:
        if not c.curve:
            continue
        last = c.curve[-1][0]
        if c.not_sure_from == c.curve[0][0] and c.expected_from == c.not_sure_from:
            yield f"{c.method} is not expected to pay from {c.curve[0][0]} to {last} requests at once."
        elif c.not_sure_from is None:
            yield f"{c.method} pays up to {last} requests at once, the most that was calibrated."
        else:
            expected = (
                f"expected to stop at {c.expected_from}" if c.expected_from else "expected to go on paying"
            )
            surely = f", surely at {c.sure_from}" if c.sure_from else ""
            yield f"{c.method} pays for sure below {c.not_sure_from} requests at once, {expected}{surely}."


def overall(found: Recommendation) -> Iterator[str]:
    """One configuration for the whole of the traffic."""
    if found.overall is None:
        return
    at_once = found.overall.concurrencies
    told = ", ".join(f"{m} with {n} draft tokens {shown(s)}" for m, n, s in found.overall.options)
    yield (
        f"Over the traffic's own concurrency, {min(at_once)} to {max(at_once)} requests at once: "
        f"{found.overall.choice}. Speed-ups with one configuration for all of it: {told}."
    )


def pasted(started: Started, engine: str, model: str) -> list[str]:
    """Lines for a shell, or what stands against it."""
    if started.file:
        return started.file.splitlines()
    if started.flags:
        variables = [f"export {name}={shlex.quote(value)}" for name, value in started.environment.items()]
        return [*variables, shlex.join(started.flags)]
    spec = shlex.quote(json.dumps(dict(started.config)))
    if engine == "transformers":
        return [f"spec-plugins generate {shlex.quote(model)} --spec {spec}"]
    return [f"spec-plugins args {engine} {spec}"]


def markdown(found: Recommendation) -> str:
    """For documents: all that the table has, reasons, crossovers and flags."""
    lines = [f"# What pays in {found.engine}", ""]
    lines += [*(f"{sentence}\n" for sentence in overall(found))]
    if found.overall is not None and found.overall.started is not None:
        lines += _fenced(found.overall.started, found)
    for at in found.at:
        how = ", ".join(dict.fromkeys(o.step_times for o in at.options))
        lines += [f"## {title(at)}", "", *markdown_table(COLUMNS, [_row(o) for o in at.options]), ""]
        lines += [NOTE.format(how=how), "", *(f"- {reason}" for reason in at.reasons), ""]
        if at.started is not None:
            lines += _fenced(at.started, found)
    if found.crossovers:
        lines += ["## Where it stops", "", *(f"- {sentence}" for sentence in crossings(found)), ""]
    lines += ["## What else", "", *(f"- {reason}" for reason in found.reasons), ""]
    lines += ["## What this rests on", "", f"- {rests_on(found)}", *(f"- {n}" for n in found.notes), ""]
    return "\n".join(lines)


def _fenced(started: Started, found: Recommendation) -> list[str]:
    lines = ["```", *pasted(started, found.engine, str(found.about.get("model"))), "```", ""]
    return [*lines, *(f"- {note}" for note in started.notes), *[""][: len(started.notes)]]


def rests_on(found: Recommendation) -> str:
    """Which requests, model, engine and machine, in a sentence."""
    setting, about = found.setting, found.about
    hardware = ", ".join(
        str(part) for part in (*setting.hardware.get("gpus", ()), setting.hardware.get("processor")) if part
    )
    return (
        f"{found.requests} recorded requests of {about.get('traffic')} for {about.get('model')}, "
        f"{found.mean_context:.0f} tokens of context on average; step times of {setting.engine} "
        f"{setting.engine_version} in {setting.dtype} on {hardware or 'an unnamed machine'}"
        f"{', with ' + shlex.join(setting.flags) if setting.flags else ''}."
    )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def write(found: Recommendation, out: Path) -> list[Path]:
    """Write ``recommendation.json`` and ``recommendation.md`` into a folder; returns their paths.

    Raises:
        ConfigError: it cannot be written.
    """
    texts = {"recommendation.json": found.model_dump_json(indent=1), "recommendation.md": markdown(found)}
    return write_texts(texts, out)


def write_texts(texts: Mapping[str, str], out: Path) -> list[Path]:
    """Write files into a folder, each whole or not at all; returns and raises as :func:`write`."""
    paths = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            unfinished = out / f"{name}.part"
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, out / name)
            paths.append(out / name)
    except OSError as error:
        raise ConfigError(f"--out: {str(out)!r} cannot be written: {error}") from error
    return paths
