"""What a confirmation consists of; kept as JSON."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from spec_plugins.evaluation.recommended import NONE, SAME, Interval
from spec_plugins.evaluation.step_times import Setting

__all__ = ["Confirmation", "Confirmed", "Point", "Quantiles"]


class Quantiles(BaseModel):
    """Seconds that half, 95 % and 99 % of requests stayed within."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Quantiles:
        """Of seconds by request."""
        p50, p95, p99 = np.quantile(seconds, [0.5, 0.95, 0.99]) if len(seconds) else [np.nan] * 3
        return cls(p50=float(p50), p95=float(p95), p99=float(p99))


class Point(BaseModel):
    """One method served under one load."""

    method: str
    """``none``: plain decoding, the engine without this project."""
    draft_tokens: int
    config: dict[str, Any] | None
    requests: int
    predicted: Interval | None
    """Speed-up of decoding, as recommended; ``None`` for plain decoding, and where the loop is open."""
    expected: float | None
    """The same with what plain decoding spent on other things than decode steps, such as prompts."""
    measured: Interval | None
    """A request's whole time for each output token without it, over that with it; paired by request."""
    tokens_per_second: float
    """Output tokens of all requests together, over the whole run."""
    first_token: Quantiles
    """Time to first token."""
    first_token_ratio: Interval | None
    """The mean of it, over that of plain decoding."""
    per_token: Quantiles
    """Time per output token after the first."""
    same_answers: int
    """Answers equal to plain decoding's; rounding differs between batches, see the note."""
    failures: list[str]
    """What went wrong, a line a failed request."""

    @property
    def error(self) -> float | None:
        """Expected over measured, less 1."""
        if self.expected is None or self.measured is None:
            return None
        return self.expected / self.measured.value - 1

    @property
    def worsens_first_token(self) -> bool:
        """Whether the mean time to first token is surely longer by more than 5 %."""
        ratio = self.first_token_ratio
        return ratio is not None and ratio.low is not None and ratio.low > 1.05


class Confirmed(BaseModel):
    """What was served under one load."""

    concurrency: int | None
    """Of a closed loop; ``None``: an open one."""
    rate: float | None
    """Requests a second, of an open loop."""
    points: list[Point]
    """Plain decoding first."""
    plain_again: float
    """Plain decoding's time for each token when it was served again at the end, over that at the begin."""
    plain_same_answers: int
    """How many answers it gave twice alike."""

    def best(self, predicted: bool) -> Point:
        """The fastest, as it was expected or measured; plain decoding where nothing is faster."""

        def value(point: Point) -> float:
            if point.method == NONE:
                return 1.0
            if predicted:
                return point.expected or 0.0
            return point.measured.value if point.measured is not None else 0.0

        return max(self.points, key=value)

    @property
    def lost(self) -> float:
        """How much slower than the fastest measured one is that which was expected to be: 1 is not at all."""
        expected, fastest = self.best(predicted=True), self.best(predicted=False)
        return _speed_up(fastest) / _speed_up(expected)

    @property
    def as_predicted(self) -> bool:
        """Whether the best method is the one expected, or within 3 % of it."""
        return self.lost <= SAME


def _speed_up(point: Point) -> float:
    return 1.0 if point.measured is None else point.measured.value


class Confirmation(BaseModel):
    """What was predicted beside what was measured; kept as JSON."""

    version: Literal[1] = 1
    engine: str
    client: str
    """What made the load."""
    setting: Setting
    """Of the calibration, and of the servers."""
    about: dict[str, Any]
    """Of the replay."""
    temperature: float
    at: list[Confirmed]
    notes: list[str]

    @property
    def errors(self) -> list[float]:
        """Expected over measured less 1, of all points that have both."""
        return [e for of in self.at for p in of.points if (e := p.error) is not None]
