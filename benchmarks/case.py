"""What a case is, and how it measures."""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CACHE", "CASES", "Case", "Context", "Result", "alternate", "case", "spread", "together"]

CACHE = Path(os.environ.get("SPEC_PLUGINS_CACHE", Path.home() / ".cache" / "spec-plugins"))


@dataclass(frozen=True)
class Context:
    """What every case is given."""

    model: Path
    data: Path
    quick: bool
    """A short run, to see that a case works; its figures are not for publication."""
    say: Callable[[str], None]
    """Tells the person waiting how far the case is."""


@dataclass
class Result:
    """A table of figures."""

    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    """What to say of the machine beside what every case says, such as an engine's version."""


@dataclass(frozen=True)
class Case:
    """A named comparison."""

    name: str
    summary: str
    run: Callable[[Context], Result]
    needs: str | None = None
    """An environment beside the core one; such a case runs only by name."""


CASES: dict[str, Case] = {}


def case(
    name: str, *, needs: str | None = None
) -> Callable[[Callable[[Context], Result]], Callable[[Context], Result]]:
    """Register a function as a case; the first line of its docstring is its summary."""

    def register(function: Callable[[Context], Result]) -> Callable[[Context], Result]:
        CASES[name] = Case(name, (function.__doc__ or "").strip().splitlines()[0], function, needs)
        return function

    return register


def alternate(variants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn in a rotating order, after one run each that is not counted."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        variants[name]()
    for r in range(repeats):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            gc.collect()
            started = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def together(ratios: Sequence[float], draws: int = 4000) -> str:
    """Geometric mean, and its 95% bootstrap interval over the ratios."""
    chance, logs = random.Random(0), [math.log(ratio) for ratio in ratios]
    drawn = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(draws))
    middle, low, high = statistics.fmean(logs), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]
    return f"{math.exp(middle):.2f} ({math.exp(low):.2f} to {math.exp(high):.2f})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
