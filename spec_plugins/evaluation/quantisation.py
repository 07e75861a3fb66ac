"""What quantising a target gains, what speculation gains on the quantised target, and both together.

For C requests that decode together, with step times T without drafts,

    gain by quantising = T_unquantised(C, 1) / T_quantised(C, 1),

speculation gains S on the quantised target, as :mod:`spec_plugins.evaluation.speed_up` has it, and both
together their product: the time for each token of the unquantised target without speculation, over that of
the quantised one with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel

from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.calibration_cache import model_config
from spec_plugins.evaluation.recommendation_reasons import shown
from spec_plugins.evaluation.recommendation_report import markdown_table, rests_on, write_texts
from spec_plugins.evaluation.recommended import CANNOT_TELL, Interval, Option, Recommendation
from spec_plugins.evaluation.step_times import STEPS_AT_LEAST, Setting, StepTimes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BothGains", "Quantisation", "check_unquantised", "gains", "table", "without_quantising", "write"]

_SAYS_HOW = frozenset(
    {"--quantization", "-q", "--quantization-config", "--torchao-config", "--modelopt-quant"}
)
"""Arguments of engines that quantise a target's weights; each takes a value."""
_ENDS = 1.96 * 0.929
"""Half of a median's 95 % interval, in distances of the quartiles over the root of how many."""
COLUMNS = (
    "at once", "unquantised step, ms", "quantised step, ms", "quantising", "method", "speculation", "both",
)  # fmt: skip
NOTES = (
    "Speed-ups are of decoding. Quantising: a plain step of the unquantised target over one of the quantised "
    "target, both with the plug-in in the engine. Speculation: predicted, on the quantised target. Both: "
    "their product, over plain decoding of the unquantised target. In brackets: 95 % intervals; that of the "
    "product takes both as independent, and is rather too wide for it.",
    "The two targets were measured one after the other: where the machine's speed drifted between, that is "
    "in no interval. What quantising changes in what the target says is not judged.",
)


class BothGains(BaseModel):
    """One concurrency."""

    concurrency: int
    unquantised_step: Interval
    """Seconds, without drafts."""
    quantised_step: Interval
    quantising: Interval
    """How much faster the quantised target decodes plainly."""
    method: str
    """The one recommended, or the first in the ranking where it cannot be told."""
    draft_tokens: int
    sure: bool
    """Whether it is recommended."""
    speculation: Interval
    """How much faster it makes the quantised target."""
    both: Interval
    """The product."""


class Quantisation(BaseModel):
    """Quantising, speculation, and both; kept as JSON."""

    version: Literal[1] = 1
    quantised: Setting
    unquantised: Setting
    mean_context: float
    at: list[BothGains]
    rests_on: str
    notes: list[str]


def without_quantising(arguments: Sequence[str]) -> tuple[str, ...]:
    """An engine's arguments without those that quantise."""
    left, value_of = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        quantises = not value_of and name.replace("_", "-") in _SAYS_HOW
        if not (quantises or value_of):
            left.append(word)
        value_of = quantises and not equals
    return tuple(left)


def check_unquantised(model: Path, unquantised: Path, arguments: Sequence[str]) -> None:
    """Raise :class:`ConfigError` where it is no unquantised form of the model that the engine serves."""
    theirs, ours = model_config(unquantised), model_config(model)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"--unquantised: {str(unquantised)!r} has {name} {theirs.get(name)} and {str(model)!r} has "
                f"{ours.get(name)}; give the folder that was quantised"
            )
    if "quantization_config" in json.loads((unquantised / "config.json").read_text(encoding="utf-8")):
        raise ConfigError(
            f"--unquantised: {str(unquantised)!r} has a quantization_config itself; give the folder that was "
            "quantised"
        )
    if model.samefile(unquantised) and without_quantising(arguments) == tuple(arguments):
        raise ConfigError(
            f"--unquantised: {str(unquantised)!r} is the target itself, and no argument quantises it; add "
            "one, such as --quantization fp8, or give the quantised folder first"
        )


def gains(found: Recommendation, quantised: StepTimes, unquantised: StepTimes) -> Quantisation:
    """Set plain steps of both targets beside what speculation gains on the quantised one.

    Args:
        found: of the quantised target.
        quantised: step times that it rests on.
        unquantised: those of the unquantised target, without drafts at least, at the same concurrencies.

    Raises:
        ConfigError: a concurrency was not calibrated without drafts.
    """
    return Quantisation(
        quantised=quantised.setting,
        unquantised=unquantised.setting,
        mean_context=found.mean_context,
        at=[
            _at(
                at.concurrency,
                _plain_step(unquantised, at.concurrency, found.mean_context),
                _plain_step(quantised, at.concurrency, found.mean_context),
                next((o for o in at.options if o.method == at.choice), at.options[0]),
                at.choice != CANNOT_TELL,
            )
            for at in found.at
        ],
        rests_on=rests_on(found),
        notes=list(NOTES),
    )


def _plain_step(times: StepTimes, batch: int, context: float) -> tuple[float, float]:
    """Seconds of a step without drafts, and half its 95 % interval on the log scale; NaN: too few steps.

    Between the contexts that were measured it lies on a line, beyond them at the nearest.
    """
    cells = sorted((c for c in times.cells if (c.batch, c.q) == (batch, 1)), key=lambda c: c.mean_context)
    if not cells:
        raise ConfigError(f"concurrency {batch}: no step without drafts was measured; calibrate it")
    contexts = [c.mean_context for c in cells]
    away = [
        math.log1p(_ENDS * (c.quartiles[1] - c.quartiles[0]) / math.sqrt(c.steps) / c.median)
        if c.steps >= STEPS_AT_LEAST
        else math.nan
        for c in cells
    ]
    seconds, error = (float(np.interp(context, contexts, y)) for y in ([c.median for c in cells], away))
    return seconds, error


def _at(
    concurrency: int, plain: tuple[float, float], ours: tuple[float, float], option: Option, sure: bool
) -> BothGains:
    gain, away = plain[0] / ours[0], math.hypot(plain[1], ours[1])
    s = option.speed_up
    low, high = (math.nan if end is None else abs(math.log(end / s.value)) for end in (s.low, s.high))
    return BothGains(
        concurrency=concurrency,
        unquantised_step=_around(*plain),
        quantised_step=_around(*ours),
        quantising=_around(gain, away),
        method=option.method,
        draft_tokens=option.draft_tokens,
        sure=sure,
        speculation=s,
        both=_around(gain * s.value, math.hypot(away, low), math.hypot(away, high)),
    )


def _around(value: float, below: float, above: float | None = None) -> Interval:
    """From how far its ends are away on the log scale."""
    return Interval.of(value, value * math.exp(-below), value * math.exp(below if above is None else above))


def _row(at: BothGains) -> tuple[str, ...]:
    method = f"{at.method}, {at.draft_tokens}" if at.draft_tokens else at.method
    return (
        str(at.concurrency),
        *(f"{1e3 * step.value:.2f}" for step in (at.unquantised_step, at.quantised_step)),
        shown(at.quantising),
        method if at.sure else f"{method} (cannot tell)",
        shown(at.speculation),
        shown(at.both),
    )


def table(found: Quantisation) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, title=f"Quantising and speculation in {found.quantised.engine}")
    for column in ("at\nonce", "quantising\n(95 %)", "method,\ndraft tokens", "speculation\n(95 %)"):
        out.add_column(column)
    out.add_column("both\n(95 %)")
    for at in found.at:
        once, _, _, *rest = _row(at)
        out.add_row(once, *rest)
    return out


def markdown(found: Quantisation) -> str:
    """For documents."""
    return "\n".join(_lines(found))


def _lines(found: Quantisation) -> Iterator[str]:
    yield from (f"# Quantising and speculation in {found.quantised.engine}", "")
    yield from markdown_table(COLUMNS, [_row(at) for at in found.at])
    yield from ("", *(f"{note}\n" for note in found.notes), f"It rests on {found.rests_on}", "")


def write(found: Quantisation, out: Path) -> list[Path]:
    """Write ``quantisation.json`` and ``quantisation.md`` into a folder; returns their paths.

    Raises:
        ConfigError: it cannot be written.
    """
    texts = {"quantisation.json": found.model_dump_json(indent=1), "quantisation.md": markdown(found)}
    return write_texts(texts, out)
