"""How many requests run at once, from when they arrived and how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError

__all__ = ["Concurrency", "littles_law", "overlap"]


@dataclass(frozen=True, slots=True, eq=False)
class Concurrency:
    """How many requests run at once, over time."""

    shares: npt.NDArray[np.float64]
    """``[most + 1]``: the share of the time in which 0, 1, 2, … run."""

    @property
    def mean(self) -> float:
        """Over all time, idle time included."""
        return float(self.shares @ np.arange(len(self.shares)))

    def quantile(self, share: float) -> int:
        """So many or fewer run for this share of the time in which any do."""
        busy = np.cumsum(self.shares[1:])
        if not len(busy) or busy[-1] <= 0:
            return 0
        return int(np.searchsorted(busy, share * busy[-1] * (1 - 1e-12))) + 1


def overlap(arrived: Sequence[float], seconds: Sequence[float]) -> Concurrency:
    """Count exactly, from the first arrival to the last end.

    Args:
        arrived: when each request came, in seconds.
        seconds: how long each took, queueing included; a log without durations: what they would take at the
            speed that is planned for.

    Raises:
        ConfigError: none is given, or as many of one as not of the other, or one took less than no time.
    """
    starts, lasted = np.asarray(arrived, np.float64), np.asarray(seconds, np.float64)
    if len(starts) != len(lasted) or not len(starts) or (lasted < 0).any():
        raise ConfigError(
            f"seconds: {len(lasted)} durations for {len(starts)} arrivals; give one of 0 or more for each"
        )
    moments = np.concatenate([starts, starts + lasted])
    changes = np.repeat([1, -1], len(starts))
    order = np.lexsort((changes, moments))  # at the same moment, one goes before the next comes
    running, spans = np.cumsum(changes[order])[:-1], np.diff(moments[order])
    shares = np.bincount(np.maximum(running, 0), weights=spans)
    return Concurrency(shares / max(float(shares.sum()), 1e-300))


def littles_law(arrived: Sequence[float], seconds: float) -> float:
    """The mean number that runs at once, where each takes ``seconds`` on average: their rate times that.

    Raises:
        ConfigError: fewer than two arrivals, or all at one moment.
    """
    moments = np.asarray(arrived, np.float64)
    span = float(np.ptp(moments)) if len(moments) > 1 else 0.0
    if span <= 0:
        raise ConfigError(
            f"arrived: {len(moments)} arrivals within {span:g} s give no rate; give two or more over time"
        )
    return (len(moments) - 1) / span * seconds
