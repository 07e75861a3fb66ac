"""How long a step of an engine takes: what was measured, and what a model fitted to that says of the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, computed_field

from spec_plugins.errors import UnsupportedError
from spec_plugins.evaluation.step_fit import BEYOND, Fit, fit_model

__all__ = ["Cell", "Estimate", "Setting", "StepTimes"]

CELLS_AT_LEAST = 4
STEPS_AT_LEAST = 8
"""Of fewer, quartiles say little."""
_NORMAL = 1.645
"""Half of a 90 % interval, in standard errors."""


class Setting(BaseModel):
    """What step times hold for. Other settings have other times."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: str
    engine_version: str | None
    spec_plugins_version: str
    model: str
    """A digest of its configuration and weights, and nothing of where it lies."""
    dtype: str
    flags: tuple[str, ...] = ()
    """The engine's, as the user gave them."""
    variables: dict[str, str] = {}
    """Environment variables that say how it computes."""
    hardware: dict[str, Any] = {}


class Cell(BaseModel):
    """The steps of one batch size, width and context."""

    model_config = ConfigDict(extra="ignore")
    batch: Annotated[int, Field(ge=1)]
    q: Annotated[int, Field(ge=1)]
    """Tokens a request that the target takes in: its draft tokens and one more."""
    context: Annotated[int, Field(ge=1)]
    """The one asked for, in tokens a request."""
    mean_context: float
    """The one had, over requests and steps."""
    seconds: list[float]
    """Of each step, without what drafting took."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def steps(self) -> int:
        """How many were measured."""
        return len(self.seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def median(self) -> float:
        """Seconds."""
        return float(np.median(self.seconds))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(low), float(high)


class Estimate(NamedTuple):
    """A step's time, in seconds."""

    seconds: float
    low: float
    """Of the 90 % interval."""
    high: float
    how: Literal["measured", "fitted", "extrapolated"]

    @property
    def half_95(self) -> float:
        """Half of the 95 % interval."""
        return (self.high - self.low) / 2 * 1.96 / _NORMAL


class StepTimes(BaseModel):
    """Step times of one engine with one model on one machine; kept as JSON."""

    version: Literal[1] = 1
    setting: Setting
    cells: list[Cell]
    fit: Fit | None = None
    """``None`` where there are fewer than four cells."""

    @classmethod
    def of(cls, setting: Setting, cells: Sequence[Cell]) -> StepTimes:
        """Fit a model to cells. Some 10 ms for 50 of them. Needs scipy."""
        kept = sorted((c for c in cells if c.seconds), key=lambda c: (c.context, c.batch, c.q))
        if len(kept) < CELLS_AT_LEAST:
            return cls(setting=setting, cells=kept)
        rows = [(c.batch, c.q, c.mean_context, c.median) for c in kept]
        return cls(setting=setting, cells=kept, fit=fit_model(*zip(*rows, strict=True)))

    def seconds(self, batch: int, q: int, context: float) -> Estimate:
        """How long a step takes.

        Args:
            batch: requests that decode in it.
            q: tokens of each: its draft tokens and one more.
            context: tokens that each has so far, the mean over requests.

        Raises:
            UnsupportedError: further out of the measured range than can be told; names what to measure.
        """
        if self.fit is None:
            raise UnsupportedError(
                f"step times: {len(self.cells)} cells are too few for a model; measure more batch sizes or "
                "draft lengths"
            )
        inside = self._covers(batch, q, context)
        fitted = self.fit.seconds(batch, q, context)
        error = self.fit.error * (1 if inside else 2)
        how: Literal["measured", "fitted", "extrapolated"] = "fitted" if inside else "extrapolated"
        if same := [c for c in self.cells if (c.batch, c.q) == (batch, q)]:
            # Their medians count; the fit only carries them to this context.
            at = [c.mean_context for c in same]
            off = [c.median / self.fit.seconds(batch, q, c.mean_context) for c in same]
            fitted *= float(np.interp(context, at, off))
            if inside and min(c.steps for c in same) >= STEPS_AT_LEAST:
                error = float(np.interp(context, at, [_median_error(c) for c in same]))
                how = "measured"
        return Estimate(fitted, fitted * max(0.0, 1 - error), fitted * (1 + error), how)

    def _covers(self, batch: int, q: int, context: float) -> bool:
        """Whether all of it lies in the measured range."""
        ranges = self._ranges
        inside = True
        # Without a second context nothing is known of what a context costs.
        contexts = {c.context for c in self.cells}
        for name, value, option in (
            ("batch", batch, "--batch-sizes"),
            ("q", q, "--draft-tokens"),
            ("batch·q", batch * q, "--batch-sizes and --draft-tokens"),
            ("context", context, "--context"),
        ):
            low, high = ranges[name]
            least = 0.0 if name == "context" and len(contexts) > 1 else low / BEYOND
            if not least <= value <= high * BEYOND:
                raise UnsupportedError(
                    f"{name} {value:g} is out of the measured range, {low:g} to {high:g}; calibrate with "
                    f"{option} that hold it"
                )
            # Contexts are never met to the token.
            slack = 0.1 * high if name == "context" else 0.0
            inside &= low - slack <= value <= high + slack
        return inside

    @functools.cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        return _ranges(self.cells)


def _ranges(cells: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    columns: dict[str, Sequence[float]] = {
        "batch": [c.batch for c in cells],
        "q": [c.q for c in cells],
        "batch·q": [c.batch * c.q for c in cells],
        "context": [c.mean_context for c in cells],
    }
    return {name: (min(values), max(values)) for name, values in columns.items()}


def _median_error(cell: Cell) -> float:
    """Half the interval of a cell's median, relative."""
    low, high = cell.quartiles
    return _NORMAL * 0.929 * (high - low) / math.sqrt(cell.steps) / cell.median
