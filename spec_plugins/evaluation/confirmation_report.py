"""A confirmation for people: a table, Markdown and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spec_plugins.evaluation.confirmed import Confirmation, Confirmed, Point, Quantiles
from spec_plugins.evaluation.recommendation_reasons import shown
from spec_plugins.evaluation.recommendation_report import markdown_table, write_texts
from spec_plugins.evaluation.recommended import NONE

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COLUMNS", "load_title", "markdown", "row", "sentences", "table", "write"]

COLUMNS = (
    "method", "draft tokens", "predicted", "expected served", "measured", "tokens/s",
    "first token p50, p95, p99, ms", "per token p50, p95, p99, ms", "same answers",
)  # fmt: skip
WHAT = (
    "Predicted: the speed-up of decoding alone, as recommended. Expected served: with the time that plain "
    "decoding spent beside its decode steps, such as prompts. Measured: a request's whole time for each "
    "output token without it, over that with it, paired by request. In brackets: 95 % intervals."
)


def row(point: Point) -> tuple[str, ...]:
    """A method under one load, as :data:`COLUMNS` say."""
    return (
        point.method,
        str(point.draft_tokens or "-"),
        shown(point.predicted) if point.predicted is not None else "-",
        f"{point.expected:.2f}" if point.expected is not None else "-",
        shown(point.measured) if point.measured is not None else "-",
        f"{point.tokens_per_second:,.0f}",
        _milliseconds(point.first_token),
        _milliseconds(point.per_token),
        f"{point.same_answers} of {point.requests}",
    )


def _milliseconds(seconds: Quantiles) -> str:
    return ", ".join(f"{1e3 * s:,.0f}" for s in (seconds.p50, seconds.p95, seconds.p99))


def load_title(of: Confirmed) -> str:
    """A load in words."""
    n = of.points[0].requests
    if of.concurrency is not None:
        return f"{of.concurrency} at once, {n} requests"
    return f"{of.rate or 0:.3g} requests a second, {n} of them"


def table(found: Confirmation) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, title=f"Served in {found.engine}: predicted beside measured")
    out.add_column("method", no_wrap=True)
    for column in (
        "predicted", "expected\nserved", "measured\n(95 %)", "tokens/s", "first token\np50, p95 ms",
        "per token\np50, p95 ms",
    ):  # fmt: skip
        out.add_column(column, justify="right")
    for of in found.at:
        out.add_section()
        out.add_row(f"[bold]{load_title(of)}[/]")
        for point in of.points:
            name = point.method + (f", {point.draft_tokens}" if point.draft_tokens else "")
            predicted = "-" if point.predicted is None else f"{point.predicted.value:.2f}"
            expected, measured, tokens = row(point)[3:6]
            ends = (
                f"{1e3 * of_all.p50:,.0f}, {1e3 * of_all.p95:,.0f}"
                for of_all in (point.first_token, point.per_token)
            )
            out.add_row(f"  {name}", predicted, expected, measured, tokens, *ends)
    return out


def sentences(found: Confirmation) -> Iterator[str]:
    """What it says of the prediction, and what stands against it."""
    if errors := [abs(e) for e in found.errors]:
        yield (
            f"Expected speed-ups are off by {statistics.median(errors):.0%} (median of {len(errors)}), at "
            f"worst by {max(errors):.0%}."
        )
    for of in found.at:
        title = load_title(of)
        if of.concurrency is not None:
            expected, fastest = of.best(predicted=True), of.best(predicted=False)
            if expected.method == fastest.method:
                yield f"{title}: {fastest.method} is the fastest, as expected."
            else:
                near = "within 3 % of it" if of.as_predicted else f"{of.lost - 1:.0%} slower"
                yield (
                    f"{title}: {fastest.method} is the fastest; {expected.method} was expected to be, and is "
                    f"{near}."
                )
        for point in of.points:
            if point.worsens_first_token and point.first_token_ratio is not None:
                yield (
                    f"{title}: with {point.method} the first token takes {shown(point.first_token_ratio)} "
                    "times as long on average."
                )
            if point.failures:
                failed = f"{len(point.failures)} requests failed with {point.method}"
                yield f"{title}: {failed}: {point.failures[0]}"
        if abs(of.plain_again - 1) > 0.03:
            yield (
                f"{title}: plain decoding, served again at the end, took {of.plain_again:.2f} times as "
                "long for a token; the machine drifts, and differences that small say nothing."
            )
        alike = min(p.same_answers for p in of.points[1:]) if len(of.points) > 1 else of.plain_same_answers
        n = of.points[0].requests
        if found.temperature == 0 and min(alike, of.plain_same_answers) < n:
            yield (
                f"{title}: {alike} or more of {n} answers equal plain decoding's, which gave "
                f"{of.plain_same_answers} of them twice alike: rounding differs between batches."
            )
    yield from found.notes


def markdown(found: Confirmation) -> str:
    """For documents."""
    lines = [f"# Served in {found.engine}, predicted beside measured", "", WHAT, ""]
    for of in found.at:
        lines += [f"## {load_title(of)}", ""]
        lines += [*markdown_table(COLUMNS, [row(point) for point in of.points]), ""]
    lines += ["## What it says", "", *(f"- {sentence}" for sentence in sentences(found)), ""]
    how = "sampled" if found.temperature else "greedy"
    lines.append(f"Load by `{found.client}`, {how}; {NONE}: the engine without this project.\n")
    return "\n".join(lines)


def write(found: Confirmation, out: Path) -> list[Path]:
    """Write ``confirmation.json`` and ``confirmation.md`` into a folder; returns their paths.

    Raises:
        ConfigError: it cannot be written.
    """
    texts = {"confirmation.json": found.model_dump_json(indent=1), "confirmation.md": markdown(found)}
    return write_texts(texts, out)
