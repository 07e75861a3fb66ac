"""Confidence intervals of ratios of sums, by a bootstrap over requests.

Requests are drawn anew, not tokens or steps: those of one request resemble each other, and an interval that
took them for independent would be too narrow.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["REQUESTS_AT_LEAST", "accelerated", "ratio_intervals", "resampled"]

Floats = npt.NDArray[np.float64]

REQUESTS_AT_LEAST = 5
"""Of fewer, no interval is given."""
_AT_ONCE = 100


def ratio_intervals(
    numerators: npt.NDArray[np.generic],
    denominators: npt.NDArray[np.generic],
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[Floats, Floats]:
    """Intervals of the sum of each column of one over the sum of the same column of the other.

    Bias-corrected and accelerated (Efron 1987), as ``scipy.stats.bootstrap`` gives by default. All columns
    share the draws, so that figures from one replay can be compared. O(draws · requests · columns).

    Args:
        numerators: ``[requests, columns]``.
        denominators: the same.

    Returns:
        Lower and upper ends, ``[columns]``; NaN for fewer than :data:`REQUESTS_AT_LEAST` requests, or where
        a denominator is 0.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    n, columns = above.shape
    low, high = np.full(columns, np.nan), np.full(columns, np.nan)
    known = below.sum(0) > 0
    if n < REQUESTS_AT_LEAST or not known.any():
        return low, high
    above, below = above[:, known], below[:, known]
    drawn = _ratio(*np.hsplit(resampled(np.hstack([above, below]), draws=draws, seed=seed), 2))
    whole = _ratio(above.sum(0), below.sum(0))
    without = _ratio(above.sum(0) - above, below.sum(0) - below)
    low[known], high[known] = accelerated(drawn, whole, without, level)
    return low, high


def resampled(columns: Floats, *, draws: int = 2000, seed: int = 0) -> Floats:
    """Sums over requests drawn anew, ``[draws, columns]``, of figures ``[requests, columns]``."""
    n, rng = len(columns), np.random.default_rng(seed)
    sums = np.empty((draws, columns.shape[1]))
    for first in range(0, draws, _AT_ONCE):
        k = min(_AT_ONCE, draws - first)
        picks = rng.integers(0, n, (k, n)) + n * np.arange(k)[:, None]
        sums[first : first + k] = np.bincount(picks.ravel(), minlength=k * n).reshape(k, n) @ columns
    return sums


def _ratio(above: Floats, below: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = above / below
    return found


def accelerated(drawn: Floats, whole: Floats, without: Floats, level: float) -> tuple[Floats, Floats]:
    """BCa intervals of figures that any formula makes of sums over requests.

    Args:
        drawn: ``[draws, figures]``: of sums that are :func:`resampled`.
        whole: ``[figures]``.
        without: ``[requests, figures]``: of the sums without each request.
        level: how sure.

    Returns:
        Lower and upper ends, ``[figures]``; NaN where no draw has a figure.
    """
    normal, tail = NormalDist(), (1 - level) / 2
    ends = np.empty((2, drawn.shape[1]))
    for c in range(drawn.shape[1]):
        draws = drawn[~np.isnan(drawn[:, c]), c]
        jackknife = without[~np.isnan(without[:, c]), c]
        if not len(draws):
            ends[:, c] = np.nan
            continue
        share = (np.sum(draws < whole[c]) + np.sum(draws <= whole[c])) / (2 * len(draws))
        away = jackknife.mean() - jackknife if len(jackknife) else np.zeros(1)
        spread = float((away**2).sum())
        bend = float((away**3).sum()) / (6 * spread**1.5) if spread > 1e-30 else 0.0
        quantiles = [tail, 1 - tail]
        if 0 < share < 1:  # otherwise all draws are on one side, and there is nothing to correct by
            bias = normal.inv_cdf(share)
            shifted = [bias + normal.inv_cdf(q) for q in quantiles]
            quantiles = [normal.cdf(bias + z / (1 - bend * z)) for z in shifted]
        ends[:, c] = np.quantile(draws, quantiles)
    return ends[0], ends[1]
