"""A recommendation as one HTML file: nothing is loaded, nothing runs in it, and it can be printed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation import recommendation_charts as charts
from spec_plugins.evaluation import recommendation_report as report
from spec_plugins.evaluation.candidates import Replays
from spec_plugins.evaluation.recommended import NONE, AtConcurrency, Interval, Option, Recommendation

__all__ = ["page", "write"]

NAME = "report.html"
TEMPLATE = "recommendation_page.html.jinja"


def page(found: Recommendation, replays: Replays) -> str:
    """The page.

    Args:
        found: what pays.
        replays: those that it rests on, for what is accepted by position, and examples.

    Raises:
        UnavailableError: matplotlib or jinja2 is not installed.
    """
    _require("matplotlib", "jinja2")
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    asked = [at.concurrency for at in found.at]
    methods = dict.fromkeys(
        [*(o.method for at in found.at for o in at.options if o.method != NONE), *replays.by_position]
    )
    lines, bars = charts.styles(list(methods)), list(_bars(found.at))

    def chart(draw: Callable[[], str], *needed: Any) -> Markup:
        # Ours, and all text in it escaped.
        return Markup(draw()) if all(needed) else Markup("")

    text: str = environment.from_string(template).render(
        found=found,
        model=str(found.about.get("model")),
        chosen={at.concurrency: _chosen(at) for at in found.at},
        pasted=lambda started: "\n".join(report.pasted(started, found.engine, str(found.about.get("model")))),
        verdict=report.verdict,
        whole=_whole,
        fixed=_fixed,
        percent=_percent,
        ms=lambda seconds: f"{round(seconds * 1e3, 2) + 0.0:,.2f}",  # never −0.00
        rests_on=report.rests_on(found),
        overall=list(report.overall(found)),
        crossings=list(report.crossings(found)),
        curves={c.method: [p for p in c.curve if p[0] in asked] for c in found.crossovers},
        by_position=replays.by_position,
        examples=replays.examples,
        lines=lines,
        bars=bars,
        speed_up_chart=chart(
            lambda: charts.speed_ups(found.crossovers, lines, asked), any(c.curve for c in found.crossovers)
        ),
        acceptance_chart=chart(lambda: charts.acceptance(replays.by_position, lines), replays.by_position),
        parts_chart=chart(lambda: charts.step_parts(bars), bars),
    )
    return text


def write(found: Recommendation, replays: Replays, out: Path) -> Path:
    """Write ``report.html`` into a folder; returns its path. Raises as :func:`page`, and
    :class:`~spec_plugins.errors.ConfigError` where it cannot be written."""
    (path,) = report.write_texts({NAME: page(found, replays)}, out)
    return path


def _require(*modules: str) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"{NAME} needs {error.name!r}, which is not installed: pip install 'spec-plugins[evaluate]'"
            ) from error


def _chosen(at: AtConcurrency) -> Option | None:
    """``None``: it cannot be told."""
    return next((o for o in at.options if o.method == at.choice), None)


def _bars(at: Sequence[AtConcurrency]) -> list[charts.Bar]:
    found = []
    for one in at:
        plain = one.plain_step.value
        for o in one.options:
            if o.method != NONE:
                added, draft = (o.step_ratio - 1) * plain, o.draft_seconds
                found.append(
                    charts.Bar(one.concurrency, o.method, plain, added, draft, o.tokens_per_step.value)
                )
    return found


def _fixed(interval: Interval, digits: int = 2) -> tuple[str, str]:
    """A figure, and its interval, which may be empty."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:,.{digits}f}", ""
    return f"{interval.value:,.{digits}f}", f"{interval.low:,.{digits}f}–{interval.high:,.{digits}f}"


def _whole(interval: Interval) -> tuple[str, str]:
    return _fixed(interval, 0)


def _percent(share: Interval) -> tuple[str, str]:
    low, high = (None if end is None else 100 * end for end in (share.low, share.high))
    return _fixed(Interval(value=100 * share.value, low=low, high=high), 1)
