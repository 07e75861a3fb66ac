"""The model of step time that is fitted to measured cells.

A step of B requests, each with q tokens (its draft and the last committed token) over a context of c, takes

    fixed + request·B + drafting·[q > 1] + drafting_request·B·[q > 1]
          + context_request·B·c + context_token·B·q·c + f(B·q)

with ``f`` a line in pieces that never falls: flat where weights are read, a rise where a kernel takes another
tile or a larger CUDA graph, then linear in the tokens. All coefficients are non-negative, so more of anything
takes no less time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

__all__ = ["BEYOND", "LEVEL", "Fit", "fit_model"]

Floats = npt.NDArray[np.float64]

BEYOND = 1.25
"""How far past the measured range a fit is trusted, as a factor; its interval is doubled there."""
LEVEL = 0.9
"""Of intervals."""


class Fit(BaseModel):
    """The model of step time, and how well it does."""

    knots: list[int]
    """Where ``f`` bends, in tokens of a step (batch·q); outside of them it is flat."""
    coefficients: dict[str, float]
    """Seconds: of each term in the module's formula, and ``f`` from each knot to the next, a token."""
    residuals: list[float]
    """Fit over median, less 1, of each cell."""
    held_out: list[float | None]
    """The same, by a fit without any cell of that batch and q; ``None`` at the corners, where that would be
    extrapolation."""

    def seconds(self, batch: float, q: float, context: float) -> float:
        """What the fit says, without looking at the range that it was made from."""
        return float(self.of(np.array([[batch, q, context]], np.float64))[0])

    def of(self, points: Floats) -> Floats:
        """The same of many: rows of batch, q and context."""
        found: Floats = _terms(points, self.knots) @ np.array(list(self.coefficients.values()))
        return found

    @property
    def error(self) -> float:
        """The relative error of :data:`LEVEL` of unseen cells, twice the largest of few."""
        errors = np.sort(np.abs([e for e in self.held_out if e is not None]))
        rank = math.ceil((len(errors) + 1) * LEVEL)
        if not len(errors):
            return 1.0
        return float(errors[rank - 1] if rank <= len(errors) else 2 * errors[-1])

    def summary(self) -> dict[str, float]:
        """Median and worst relative errors, of the cells and of cells held out; NaN where there are none."""
        out: dict[str, float] = {}
        for name, errors in (("residual", self.residuals), ("held_out", self.held_out)):
            found = np.abs([e for e in errors if e is not None])
            out[f"median_{name}"] = float(np.median(found)) if len(found) else math.nan
            out[f"worst_{name}"] = float(found.max()) if len(found) else math.nan
        return out


_TERMS = ("fixed", "request", "drafting", "drafting_request", "context_request", "context_token")
_DRAFTING_TERMS, _CONTEXT_TERMS = slice(2, 4), slice(4, 6)


def _terms(points: Floats, knots: Sequence[int]) -> Floats:
    """``[points, terms]``: what the coefficients are of, for rows of batch, q and context."""
    batch, q, context = points.T
    tokens, drafts = batch * q, (q > 1).astype(np.float64)
    columns = [np.ones_like(batch), batch, drafts, batch * drafts, batch * context, tokens * context]
    columns += [np.clip(tokens, a, b) - a for a, b in itertools.pairwise(knots)]
    return np.stack(columns, 1)


def fit_model(
    batch: Sequence[int], q: Sequence[int], context: Sequence[float], seconds: Sequence[float]
) -> Fit:
    """The best of several sets of knots, by how well a (batch, q) is told that was held out.

    Args:
        batch, q, context, seconds: ``[cells]``, the last one medians. Contexts that lie close together count
            as one, and then nothing is told of what a context costs.
    """
    points = np.array([batch, q, context], np.float64).T
    medians = np.array(seconds, np.float64)
    one_context = points[:, 2].max() <= 1.25 * points[:, 2].min()
    few_widths = len({width for width in q if width > 1}) < 2
    tokens = np.unique(points[:, 0] * points[:, 1]).astype(np.int64)
    # Other contexts of the same (batch, q) would give it away.
    groups = [(points[:, :2] == pair).all(1) for pair in np.unique(points[:, :2], axis=0)]
    inner = [group for group in groups if _inside(points[group], points[~group])]
    best: tuple[float, Fit] | None = None
    for knots in _knots(tokens):
        terms = _terms(points, knots)
        # What could not be told from the other terms.
        if one_context:
            terms[:, _CONTEXT_TERMS] = 0.0
        if few_widths:
            terms[:, _DRAFTING_TERMS] = 0.0
        solved = _solve(terms, medians)
        residuals = terms @ solved / medians - 1
        held_out = np.full(len(points), np.nan)
        for group in inner:
            without = _solve(terms[~group], medians[~group])
            held_out[group] = terms[group] @ without / medians[group] - 1
        score = float(np.nanmean(np.abs(held_out))) if inner else float(np.abs(residuals).mean())
        if best is None or score < best[0]:
            names = [*_TERMS, *(f"{a} to {b} tokens" for a, b in itertools.pairwise(knots))]
            found = Fit(
                knots=knots,
                coefficients=dict(zip(names, solved.tolist(), strict=True)),
                residuals=residuals.tolist(),
                held_out=[None if math.isnan(e) else e for e in held_out.tolist()],
            )
            best = score, found
    assert best is not None
    return best[1]


def _inside(points: Floats, others: Floats) -> bool:
    """Whether batch, q and tokens of some cells lie in the range of the others'."""
    if not len(others):
        return False
    (mine, theirs) = (np.column_stack([p[:, :2], p[:, 0] * p[:, 1]]) for p in (points, others))
    return bool(((mine >= theirs.min(0)) & (mine <= theirs.max(0))).all())


def _knots(tokens: npt.NDArray[np.int64]) -> list[list[int]]:
    """Sets of knots, from a single line to a bend at every second doubling, every doubling and all tokens."""
    low, high = int(tokens[0]), int(tokens[-1])
    if low == high:
        return [[low, low + 1]]
    sets = [[low, high]]
    for factor in (4.0, 2.0, math.sqrt(2)):
        inner = low * factor ** np.arange(1, 64)
        # At tokens that were measured, since nothing is known between them.
        near = {int(tokens[np.abs(np.log(tokens / k)).argmin()]) for k in inner[inner < high]}
        sets.append(sorted({low, *near, high}))
    unique = [*dict.fromkeys(tuple(s) for s in [*sets, tokens.tolist()])]
    # Past the last knot it goes on as before.
    return [[*s[:-1], math.ceil(s[-1] * BEYOND)] for s in unique]


def _solve(terms: Floats, medians: Floats) -> Floats:
    """Non-negative coefficients with the least sum of squared relative errors."""
    from scipy.optimize import nnls

    scaled = terms / medians[:, None]
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1.0  # so that columns of like size are solved for
    found, _ = nnls(scaled / sizes, np.ones(len(medians)), maxiter=100 * terms.shape[1])
    coefficients: Floats = found / sizes
    return coefficients
