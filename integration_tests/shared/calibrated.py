"""What calibration must give in every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spec_plugins.evaluation import calibration
from spec_plugins.evaluation.calibration import Plan, calibrate

BATCHES, LENGTHS, STEPS = (1, 3), (0, 3), 8


def check_calibration(
    engine: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Cells of two batch sizes and two widths, all that were asked for and no other.

    Returns prompts and answers of two waves, for comparison with those of a plain engine.
    """
    asked: list[tuple[list[list[int]], list[list[int]]]] = []
    real = calibration._adapter(engine)

    class Watched:
        @staticmethod
        @contextmanager
        def serving(*given: Any) -> Iterator[calibration.Answer]:
            with real.serving(*given) as answer:

                def watched(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
                    asked.append(([list(p) for p in prompts], answer(prompts, tokens)))
                    return asked[-1][1]

                yield watched

    monkeypatch.setattr(calibration, "_adapter", lambda _: Watched)
    plan = Plan(str(model), engine, BATCHES, LENGTHS, (64,), "float32", arguments, STEPS)
    times = calibrate(plan, cache=cache)
    assert [(c.batch, c.q, c.context) for c in times.cells] == [
        (b, n + 1, 64) for b in BATCHES for n in LENGTHS
    ]
    for cell in times.cells:
        assert STEPS <= cell.steps <= 4 * STEPS
        assert abs(cell.mean_context - 64) < 12
        assert all(0 < s < 60 for s in cell.seconds)
    assert times.seconds(2, 3, 64).seconds > 0
    waves = asked[1:]
    assert {len(prompts) for prompts, _ in waves} == set(BATCHES)
    # In a step with drafts nearly all are rejected, so that tokens are steps: none was left out but the ends.
    tokens = sum(len(answers[0]) for _, answers in waves)
    assert sum(c.steps for c in times.cells) > 0.6 * tokens
    return waves[:2]
