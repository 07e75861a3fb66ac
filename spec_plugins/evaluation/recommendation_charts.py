"""Charts of a recommendation as SVG, to stand in a page: its fonts are theirs, and its colours, by names of
CSS variables."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from spec_plugins.evaluation.recommended import Crossover, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Style", "acceptance", "speed_ups", "step_parts", "styles"]

COLOURS = 8
"""``--series-0`` and so on, of the page."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 2), (6, 2, 1, 2))
# Stand-ins that matplotlib takes for colours; in the SVG they become variables of CSS.
_VARIABLES = {
    **{f"#0a00{i:02x}": f"series-{i}" for i in range(COLOURS)},
    "#0b0001": "ink",
    "#0b0002": "muted",
    "#0b0003": "grid",
    "#0b0004": "part-plain",
    "#0b0005": "part-verify",
    "#0b0006": "part-draft",
}
_COLOUR = {variable: colour for colour, variable in _VARIABLES.items()}
_INK, _MUTED, _GRID = (_COLOUR[name] for name in ("ink", "muted", "grid"))
_WIDTH = 4.9
"""Inches of 72 units: a unit is a pixel on a small phone."""
_NAME = 18
"""Characters of a method's name beside a bar."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a method's line is drawn, in all charts."""

    variable: str
    dash: tuple[float, ...]

    @property
    def dasharray(self) -> str:
        """For SVG."""
        return " ".join(f"{d:g}" for d in self.dash)


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A line for each method that no other has, for up to 32."""
    return {
        name: Style(f"series-{i % COLOURS}", DASHES[(i + i // COLOURS) % len(DASHES)])
        for i, name in enumerate(methods)
    }


@dataclass(frozen=True, slots=True)
class Bar:
    """Where the time of a mean step goes, in seconds."""

    concurrency: int
    method: str
    plain: float
    verify: float
    """What verifying draft tokens adds; may be below 0 by what step times are uncertain."""
    draft: float | None
    """``None``: not known."""
    tokens: float
    """That a request gets from the step."""


def speed_ups(crossovers: Sequence[Crossover], lines: Mapping[str, Style], asked: Sequence[int]) -> str:
    """Speed-up over concurrency, with bands, a line at 1, and marks where a method stops paying."""
    known = [c for c in crossovers if c.curve]

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import NullLocator

        ends = [n for c in known for n in (c.curve[0][0], c.curve[-1][0])]
        first, last = min(ends), max(ends)
        axes.axhline(1, color=_INK, linewidth=1)
        for c in known:
            at = [n for n, _, _ in c.curve]
            _line(axes, at, [s for _, _, s in c.curve], lines[c.method], [n in asked for n in at])
        stops = sorted(
            (c.expected_from, c.method) for c in known if c.expected_from not in (None, c.curve[0][0])
        )
        for (n, method), up in zip(stops, itertools.cycle((7, -15, 18, -26)), strict=False):
            axes.plot([n], [1], "X", color=_COLOUR[lines[method].variable], markersize=8, zorder=4)
            axes.annotate(str(n), (n, 1), (0, up), textcoords="offset points", ha="center", fontsize=9)
        highest = max(s.value for c in known for _, _, s in c.curve)
        bands = max(s.high or s.value for c in known for _, _, s in c.curve)
        axes.set_ylim(0, max(1.2, min(1.05 * bands, 1.5 * highest)))
        if last > first:
            axes.set_xscale("log", base=2)
        ticks = _apart(sorted({*(n for n in asked if first <= n <= last), first, last}))
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("requests at once")

    return _svg("speed-up", "Speed-up of decoding over concurrency, in times plain decoding", 3.1, draw)


def acceptance(by_position: Mapping[str, Sequence[Interval]], lines: Mapping[str, Style]) -> str:
    """The share of steps whose draft was accepted up to each position."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        for method, found in by_position.items():
            _line(axes, range(1, len(found) + 1), found, lines[method], [True] * len(found))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("position in the draft")

    return _svg("acceptance", "Share of steps in which the draft is accepted up to each position", 2.7, draw)


def step_parts(bars: Sequence[Bar]) -> str:
    """Stacked bars, one a method and concurrency, with the tokens that a step gives behind it."""

    def draw(axes: Axes) -> None:
        # A gap where another concurrency begins.
        at, y = [], 0.0
        for i, bar in enumerate(bars):
            y += 1.5 if i and bar.concurrency != bars[i - 1].concurrency else float(i > 0)
            at.append(y)
        left = [0.0] * len(bars)
        for part in ("plain", "verify", "draft"):
            width = [max(0.0, getattr(bar, part) or 0.0) * 1e3 for bar in bars]
            axes.barh(at, width, 0.72, left=left, color=_COLOUR[f"part-{part}"], zorder=2)
            left = [a + b for a, b in zip(left, width, strict=True)]
        for y, end, bar in zip(at, left, bars, strict=True):
            axes.annotate(
                f"{bar.tokens:.2f}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.set_yticks(at, [f"{_short(bar.method)}, {bar.concurrency}" for bar in bars])
        axes.tick_params("y", length=0, labelcolor=_INK)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("milliseconds a step")

    height = 0.9 + 0.24 * len(bars) + 0.12 * len({bar.concurrency for bar in bars})
    return _svg("step-parts", "Where the time of a step goes, in milliseconds", height, draw)


def _short(name: str) -> str:
    name = "".join(c if c.isprintable() else "�" for c in name)
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _apart(ticks: Sequence[int]) -> list[int]:
    """Those whose figures do not run into each other on a logarithmic axis; the first and last stay."""
    kept = [ticks[0]]
    for n in ticks[1:-1]:
        if n >= 1.25 * kept[-1] and ticks[-1] >= 1.25 * n:
            kept.append(n)
    return kept if len(ticks) == 1 else [*kept, ticks[-1]]


def _line(axes: Axes, x: Sequence[int], y: Sequence[Interval], style: Style, marked: Sequence[bool]) -> None:
    """Values with their band, and dots at some of them."""
    colour = _COLOUR[style.variable]
    bounded = [
        (at, s.low, s.high) for at, s in zip(x, y, strict=True) if s.low is not None and s.high is not None
    ]
    if bounded:
        at, low, high = zip(*bounded, strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0)
        if len(bounded) == 1:
            axes.vlines(at, low, high, color=colour, linewidth=3, alpha=0.4)
    axes.plot(
        x, [s.value for s in y], color=colour, linewidth=1.8, marker="o", markersize=4, zorder=3,
        linestyle=(0, style.dash) if style.dash else "-", markevery=list(marked),
    )  # fmt: skip


def _svg(name: str, described: str, height: float, draw: Any) -> str:
    """A chart as an ``svg`` element. ``name`` is before all its ids, which a page has only once."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    looks: Any = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "lines.scale_dashes": False,
        "font.size": 10, "text.color": _INK, "axes.labelcolor": _MUTED, "axes.edgecolor": _MUTED,
        "xtick.color": _MUTED, "ytick.color": _MUTED, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "grid.linewidth": 0.6,
    }  # fmt: skip
    with mpl.rc_context(looks):
        figure = Figure((_WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        return _inlined(figure, name, described)


def _inlined(figure: Figure, name: str, described: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    svg = ElementTree.fromstring(file.getvalue().decode())
    for parent in list(svg.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata"):
                parent.remove(child)
    for element in svg.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            plain = key.rpartition("}")[2]
            ours = f"{name}-{value}" if plain == "id" else value
            element.set(plain, re.sub(r"^#(?=[a-z])|(?<=url\()#", f"#{name}-", ours))
    for key in ("width", "height", "version"):
        svg.attrib.pop(key, None)
    svg.set("role", "img")
    svg.set("aria-label", described)
    text = ElementTree.tostring(svg, "unicode")
    return re.sub(r"#0[ab]00[0-9a-f]{2}", lambda found: f"var(--{_VARIABLES[found[0]]})", text)
