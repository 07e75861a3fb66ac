"""Step times: the fitted model tells what it was not shown, and refuses what it cannot tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from spec_plugins.errors import UnsupportedError

pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")

from spec_plugins.evaluation import step_fit
from spec_plugins.evaluation.step_times import Cell, Setting, StepTimes

SETTING = Setting(engine="toy", engine_version="1", spec_plugins_version="0", model="m", dtype="float32")
BATCHES, WIDTHS, CONTEXTS = (1, 2, 4, 8, 16), (1, 2, 3, 5, 9), (128, 1024)
UNSEEN = [(b, q, c) for b in (3, 6, 12) for q in (1, 2, 4, 6, 8) for c in (100, 500, 900)]
Truth = Callable[[float, float, float], float]


def gpu(batch: float, q: float, context: float) -> float:
    """Flat up to 32 tokens, then linear; a part per request, one for drafting, one per token of context."""
    tokens = batch * q
    return 5e-3 + 1e-4 * batch + 3e-4 * (q > 1) + 2e-7 * batch * context + 6e-5 * max(0.0, tokens - 32)


def cpu(batch: float, q: float, context: float) -> float:
    """A rise past 8 tokens, as of a kernel's next tile, and cost that is linear from the first."""
    tokens = batch * q
    return 20e-3 + 8e-4 * tokens + 15e-3 * min(1.0, max(0.0, tokens - 8) / 4) + 1e-6 * tokens * context


def cells(
    truth: Truth, noise: float = 0.03, steps: int = 40, contexts: tuple[int, ...] = CONTEXTS
) -> list[Cell]:
    rng = np.random.default_rng(0)
    return [
        Cell(
            batch=b, q=q, context=c, mean_context=c + 1.5,
            seconds=(truth(b, q, c + 1.5) * (1 + noise * rng.standard_normal(steps))).tolist(),
        )
        for c in contexts for b in BATCHES for q in WIDTHS
    ]  # fmt: skip


def errors(times: StepTimes, truth: Truth) -> list[float]:
    return [abs(times.seconds(*point).seconds / truth(*point) - 1) for point in UNSEEN]


@pytest.mark.parametrize("truth", [gpu, cpu])
def test_what_was_not_measured_is_told(truth: Truth) -> None:
    times = StepTimes.of(SETTING, cells(truth))
    found = errors(times, truth)
    assert np.median(found) < 0.01
    assert max(found) < 0.1
    estimates = [times.seconds(*point) for point in UNSEEN]
    assert {e.how for e in estimates} == {"fitted"}
    held = [e.low <= truth(*point) <= e.high for e, point in zip(estimates, UNSEEN, strict=True)]
    assert np.mean(held) >= 0.85
    assert times.fit is not None
    summary = times.fit.summary()
    assert summary["median_residual"] < 0.01
    assert summary["median_residual"] <= summary["median_held_out"] < 0.02


@pytest.mark.parametrize("truth", [gpu, cpu])
def test_a_straight_line_would_not_do(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a model of the wrong shape is found out by its residuals, held out and not."""
    right = StepTimes.of(SETTING, cells(truth))
    sets = step_fit._knots
    monkeypatch.setattr(step_fit, "_knots", lambda tokens: sets(tokens)[:1])
    wrong = StepTimes.of(SETTING, cells(truth))
    assert right.fit is not None
    assert wrong.fit is not None
    assert len(wrong.fit.knots) == 2
    assert max(errors(wrong, truth)) > 0.1 > max(errors(right, truth))
    for figure in ("median_residual", "worst_residual", "median_held_out"):
        assert wrong.fit.summary()[figure] > 2 * right.fit.summary()[figure]
    assert wrong.fit.error > 2 * right.fit.error


def test_more_of_anything_takes_no_less_time() -> None:
    fit = StepTimes.of(SETTING, cells(gpu, noise=0.3, steps=3)).fit
    assert fit is not None
    assert min(fit.coefficients.values()) >= 0
    for b, q, c in itertools.product((1, 3, 9, 15), (1, 2, 4, 7), (50, 400, 1000)):
        here = fit.seconds(b, q, c)
        assert here > 0
        for more in ((b + 1, q, c), (b, q + 1, c), (b, q, c + 50)):
            assert fit.seconds(*more) >= here * (1 - 1e-9)


def test_what_was_measured_is_taken_as_it_was() -> None:
    """Whatever the fit says: one cell is twice what its neighbours let expect."""
    measured = cells(gpu, noise=0.01)
    odd = next(c for c in measured if (c.batch, c.q, c.context) == (4, 3, 128))
    odd.seconds = [2 * s for s in odd.seconds]
    times = StepTimes.of(SETTING, measured)
    found = times.seconds(4, 3, odd.mean_context)
    assert found.how == "measured"
    assert found.seconds == pytest.approx(odd.median)
    assert found.low < odd.median < found.high < 1.05 * odd.median
    # Between the two contexts that were measured it lies between the two.
    ends = odd.median, next(c for c in measured if (c.batch, c.q, c.context) == (4, 3, 1024)).median
    assert min(ends) < times.seconds(4, 3, 576).seconds < max(ends)


def test_how_far_it_goes() -> None:
    times = StepTimes.of(SETTING, cells(gpu))
    inside, beyond = times.seconds(14, 9, 1000), times.seconds(18, 9, 1000)
    assert (inside.how, beyond.how) == ("fitted", "extrapolated")
    assert beyond.seconds == pytest.approx(gpu(18, 9, 1000), rel=0.05)
    assert (beyond.high - beyond.low) / beyond.seconds > 1.9 * (inside.high - inside.low) / inside.seconds
    assert times.seconds(4, 3, 0).how == "extrapolated"
    with pytest.raises(
        UnsupportedError, match=r"batch 64 is out of the measured range, 1 to 16.*--batch-sizes"
    ):
        times.seconds(64, 1, 128)
    with pytest.raises(UnsupportedError, match=r"q 17 is out of the measured range, 1 to 9.*--draft-tokens"):
        times.seconds(1, 17, 128)
    with pytest.raises(UnsupportedError, match=r"context 4000 is out .*--context"):
        times.seconds(4, 3, 4000)


def test_one_context_says_nothing_of_others() -> None:
    times = StepTimes.of(SETTING, cells(gpu, contexts=(128,)))
    assert times.fit is not None
    assert times.fit.coefficients["context_request"] == times.fit.coefficients["context_token"] == 0
    assert times.seconds(3, 4, 130).seconds == pytest.approx(gpu(3, 4, 130), rel=0.05)
    for context in (20, 500):
        with pytest.raises(UnsupportedError, match="context"):
            times.seconds(3, 4, context)


def test_one_draft_length_does_not_say_that_all_cost_the_same() -> None:
    times = StepTimes.of(SETTING, [c for c in cells(cpu) if c.q in (1, 9)])
    assert times.seconds(16, 5, 128).seconds < 0.75 * times.seconds(16, 9, 128).seconds


def test_batch_times_q_has_a_range_too() -> None:
    """16 requests with 9 tokens each are not told from (1, 9) and (16, 1)."""
    corner = [c for c in cells(gpu) if c.batch == 1 or c.q == 1]
    with pytest.raises(UnsupportedError, match="batch·q 144"):
        StepTimes.of(SETTING, corner).seconds(16, 9, 500)


def test_too_few_cells_are_no_model() -> None:
    few = StepTimes.of(SETTING, cells(gpu)[:3])
    assert few.fit is None
    with pytest.raises(UnsupportedError, match="3 cells are too few"):
        few.seconds(1, 1, 128)
    # Four are one, whose interval says how little that is.
    four = StepTimes.of(SETTING, [c for c in cells(gpu)[:25] if c.batch in (1, 2) and c.q in (1, 3)])
    assert four.fit is not None
    unseen = [abs(e) for e in four.fit.held_out if e is not None]
    assert len(unseen) == 2
    found = four.seconds(1, 2, 128)
    assert found.high - found.low == pytest.approx(4 * max(unseen) * found.seconds)


def test_json_holds_all_of_it() -> None:
    times = StepTimes.of(SETTING, cells(cpu))
    again = StepTimes.model_validate_json(times.model_dump_json())
    assert again == times
    assert again.seconds(3, 4, 500) == times.seconds(3, 4, 500)
    cell = times.model_dump(mode="json")["cells"][0]
    assert (cell["batch"], cell["q"], cell["context"], cell["steps"]) == (1, 1, 128, 40)
    assert cell["quartiles"][0] < cell["median"] < cell["quartiles"][1]


def test_cells_without_steps_are_left_out() -> None:
    measured = cells(gpu)
    measured[7].seconds = []
    times = StepTimes.of(SETTING, measured)
    assert len(times.cells) == len(measured) - 1
    assert times.fit is not None
    assert not any(math.isnan(r) for r in times.fit.residuals)
