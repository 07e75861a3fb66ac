"""Whether an update of the target costs acceptance: a test that seldom cries wolf.

What is compared is tokens a step, R = sum of tokens / sum of steps over all requests, before the update (R0)
and after it (R1), on the same prompts. The loss is 1 - R1 / R0, and the question has two sides:

- *regressed*: the loss is more than the tolerance, and chance gives such counts in at most ``alpha`` of cases
  where it is not. With several proposers, the chance that *any* of them is called so wrongly is at most
  ``alpha`` (Holm 1979).
- *pass*: the loss is less than the tolerance, and chance gives such counts in at most ``alpha`` of cases
  where it is not. The whole passes where every proposer does, which needs no correction: it is wrong only if
  the worst of them passes wrongly (an intersection-union test, Berger 1982).
- else it *cannot tell*: absence of evidence is not a pass.

Requests are the unit, not tokens or steps. Those of one request resemble each other, and a test that takes
them for independent calls an update a regression far more often than it says. Requests are paired: each is
compared with itself, so that what makes one prompt easier than another cancels. An updated target says
something else, and so the responses of a pair differ; how much acceptance varies between two responses to
one prompt is what the test has to see through, and it learns that from the pairs themselves.

The test is Student's on ln(R1 / R0) with the standard error of a jackknife that leaves out one pair at a
time. In simulations with 10 to 200 requests it held its level of 0.01 within noise, where the bootstrap (of
percentiles, and studentised) and sign flips erred up to 2.5 times as often with 10 or 20 requests. It has no
chance in it: the same counts give the same verdict.

An identical target gives identical counts: the loss is 0 and so is the standard error, and that passes.

It cannot see what is rarer than some 5 in the number of requests: of kinds of traffic that make up a share s,
the sample has none with probability (1 - s) ^ requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError

__all__ = ["REQUESTS_AT_LEAST", "Comparison", "Verdict", "compare", "judge", "overall"]

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Verdict = Literal["pass", "regressed", "cannot tell"]

REQUESTS_AT_LEAST = 10
"""Of fewer no test is made: a standard error of them says too little."""
POWER = 0.8
"""With which chance the number of requests that is asked for is enough."""
_HOPELESS = 100


@dataclass(frozen=True, slots=True)
class Comparison:
    """One proposer before and after an update."""

    requests: int
    """That had a step before or after."""
    before: float
    """Tokens a step, the target's own included."""
    after: float
    log_ratio: float
    error: float
    """Standard error of ``log_ratio``; 0 where all requests changed alike, or none did."""
    tolerance: float
    p_regressed: float
    """How likely so much loss is, or more, where the true loss is the tolerance; not corrected."""
    p_passed: float
    """How likely so little loss is, or less, where the true loss is the tolerance."""
    unchanged: bool
    """Whether the counts of every request are the same."""

    @property
    def loss(self) -> float:
        """Share of tokens a step that is lost; negative: a gain."""
        return _lost(self.log_ratio)

    def interval(self, level: float) -> tuple[float, float]:
        """Of the loss."""
        reach = _quantile(self.requests, (1 + level) / 2) * self.error
        return _lost(self.log_ratio + reach), _lost(self.log_ratio - reach)

    def requests_needed(self, alpha: float) -> int | None:
        """How many in all would decide with a chance of :data:`POWER`, if the loss is what it seems.

        ``None``: more than a hundred times as many, since the loss is nearly the tolerance.
        """
        distance = abs(self.log_ratio - math.log1p(-self.tolerance))
        reach = _quantile(self.requests, 1 - alpha) + NormalDist().inv_cdf(POWER)
        if distance * math.sqrt(_HOPELESS) <= reach * self.error:
            return None
        return max(self.requests + 1, math.ceil(self.requests * (reach * self.error / distance) ** 2))


def compare(before: tuple[Longs, Longs], after: tuple[Longs, Longs], tolerance: float = 0.02) -> Comparison:
    """Compare counts of the same requests.

    Args:
        before: steps and accepted draft tokens, ``[n]`` each.
        after: the same of the updated target, in the same order.
        tolerance: the share of tokens a step that may be lost.

    Raises:
        ConfigError: fewer than :data:`REQUESTS_AT_LEAST` requests had a step; a tolerance that is none.
    """
    from scipy.special import stdtr

    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance: {tolerance} is out of range; set it to at least 0 and less than 1")
    counts = np.stack([before[0] + before[1], before[0], after[0] + after[1], after[0]], 1).astype(float)
    counts = counts[(counts > 0).any(1)]
    n = len(counts)
    if n < REQUESTS_AT_LEAST or not counts.sum(0).all():
        raise ConfigError(
            f"requests: {n} have a step that decodes, and a test needs at least {REQUESTS_AT_LEAST}; "
            "take a baseline over more, or over longer responses"
        )
    whole, unchanged = counts.sum(0), bool(np.array_equal(counts[:, :2], counts[:, 2:]))
    found = float(_log_ratio(whole))
    without = _log_ratio(whole - counts)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    edge = math.log1p(-tolerance)
    if error == 0:
        p_regressed, p_passed = (0.0, 1.0) if found < edge else (1.0, 0.0)
    else:
        away = (found - edge) / error
        p_regressed, p_passed = float(stdtr(n - 1, away)), float(stdtr(n - 1, -away))
    return Comparison(
        n, whole[0] / whole[1], whole[2] / whole[3], found, error, tolerance, p_regressed, p_passed, unchanged
    )


def _lost(log_ratio: float) -> float:
    return 0.0 - math.expm1(log_ratio)  # and not -0.0


def _quantile(requests: int, level: float) -> float:
    """Of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(requests - 1, level))


def _log_ratio(sums: Floats) -> Floats:
    """From tokens and steps before, tokens and steps after, ``[..., 4]``."""
    logs: Floats = np.log(sums)
    found: Floats = logs[..., 2] - logs[..., 3] - logs[..., 0] + logs[..., 1]
    return found


def judge(comparisons: Mapping[str, Comparison], alpha: float = 0.01) -> dict[str, tuple[Verdict, float]]:
    """The verdict on each proposer, and ``p_regressed`` corrected for how many there are.

    Raises:
        ConfigError: an ``alpha`` that is none.
    """
    if not 0 < alpha < 0.5:
        raise ConfigError(f"alpha: {alpha} is out of range; set it to more than 0 and less than 0.5")
    corrected = dict(zip(comparisons, _holm([c.p_regressed for c in comparisons.values()]), strict=True))
    verdicts: dict[str, tuple[Verdict, float]] = {}
    for name, c in comparisons.items():
        verdict: Verdict = "cannot tell"
        if c.p_passed <= alpha:
            verdict = "pass"
        elif corrected[name] <= alpha:
            verdict = "regressed"
        verdicts[name] = verdict, corrected[name]
    return verdicts


def _holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values, step down."""
    order = np.argsort(p, kind="stable")
    steps = np.array(p)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(a) for a in adjusted]


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of all proposers: one that regressed is enough, and all must pass."""
    if "regressed" in verdicts:
        return "regressed"
    return "cannot tell" if "cannot tell" in verdicts else "pass"
