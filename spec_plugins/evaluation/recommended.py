"""What a recommendation consists of; kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel

from spec_plugins.evaluation.step_times import Setting

__all__ = [
    "CANNOT_TELL", "NONE", "SAME", "AtConcurrency", "Crossover", "Interval", "Option", "Overall",
    "Recommendation", "Started", "Verdict",
]  # fmt: skip

NONE: Final = "none"
"""Plain decoding."""
CANNOT_TELL: Final = "cannot tell"
SAME: Final = 1.03
"""Gains closer than this are the same to a person who has to run it."""
Verdict = Literal["plain", "pays", "no difference", "does not pay", "cannot tell"]
"""``plain``: it is what the others are compared with."""


class Interval(BaseModel):
    """A figure and its 95 % interval."""

    value: float
    low: float | None
    """``None``: too few requests for an interval."""
    high: float | None

    @classmethod
    def of(cls, value: float, low: float, high: float) -> Interval:
        """With NaN as no interval."""
        known = not (math.isnan(low) or math.isnan(high))
        return cls(value=value, low=low if known else None, high=high if known else None)


class Option(BaseModel):
    """A method with its best draft length, at one concurrency."""

    method: str
    draft_tokens: int
    """Of a tree: over all branches."""
    config: dict[str, Any] | None
    """``None``: plain decoding."""
    verdict: Verdict
    speed_up: Interval
    """Of decoding: the time for each token of a request without it, over that with it."""
    tokens_per_second: Interval
    """Of all requests together, while they decode."""
    tokens_per_step: Interval
    """That a request gets from a step."""
    drafted_per_step: float
    """Draft tokens that a request has in a step, steps without a draft included."""
    drafts_in: float
    """The share of a request's steps that have a draft."""
    step_ratio: float
    """How many times a plain step the mean step takes, drafting excluded."""
    draft_seconds: float | None
    """Drafting a step, on the machine of the replay; ``None``: not known, taken as 0."""
    step_times: Literal["measured", "fitted", "extrapolated"]
    """Where the time of a step whose drafts are all that long comes from."""
    effort: str
    effort_rank: int
    more_requests: int | None = None
    """Where it cannot be told: how many more would do, by this estimate; ``None``: no number of them."""
    lacks: str = ""
    """Where it cannot be told: why."""
    instead_of: str | None = None
    """A method that gains no more than 3 % more, and takes more effort."""


class Started(BaseModel):
    """How to start the engine with it."""

    config: Mapping[str, Any]
    flags: list[str] = []
    """Arguments as a program takes them, not quoted; empty: the engine is not started with flags."""
    environment: dict[str, str] = {}
    file: str = ""
    """The text of the file that says the same, for an engine that reads one."""
    notes: list[str] = []


class AtConcurrency(BaseModel):
    """What pays where so many requests decode together."""

    concurrency: int
    choice: str
    """A method, ``none`` or ``cannot tell``."""
    options: list[Option]
    """Best first, plain decoding among them."""
    plain_step: Interval
    """Seconds."""
    token_cost: float
    """What one token more of each request adds to a plain step, as a share of it: 0 where steps read weights,
    1 where they compute."""
    bound: Literal["latency", "both", "throughput"]
    started: Started | None
    """``None`` for plain decoding, or where it cannot be told."""
    reasons: list[str]


class Crossover(BaseModel):
    """From which concurrency on, as far as calibrated, a method stops paying; ``None``: nowhere."""

    method: str
    not_sure_from: int | None
    """From where on its interval holds 1."""
    expected_from: int | None
    """From where on its speed-up is no more than 1."""
    sure_from: int | None
    """From where on its interval is no more than 1."""
    curve: list[tuple[int, int, Interval]]
    """Concurrency, best draft length there, speed-up."""


class Overall(BaseModel):
    """One configuration for all of the traffic, at its own concurrencies."""

    concurrencies: list[int]
    """Of each tenth of the time."""
    choice: str
    options: list[tuple[str, int, Interval]]
    """Method, draft length, speed-up; best first."""
    started: Started | None
    """``None`` for plain decoding, or where it cannot be told."""


class Recommendation(BaseModel):
    """What pays; kept as JSON."""

    version: Literal[1] = 1
    engine: str
    setting: Setting
    """Of the calibration."""
    about: dict[str, Any]
    """Of the replay."""
    requests: int
    mean_context: float
    at: list[AtConcurrency]
    overall: Overall | None
    """``None``: the traffic does not say how many requests run at once, or others were asked for."""
    crossovers: list[Crossover]
    reasons: list[str]
    notes: list[str]
