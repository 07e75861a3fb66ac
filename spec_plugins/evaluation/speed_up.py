"""How much faster decoding gets: what replay counted, set against what calibration measured.

With C requests decoding together, each with a draft in a share p of its steps, of m tokens on average,

    S = E · T(C, 1) / (T̄ + T_draft),    T̄ = the mean of T(C, q) over the batches that come about,

where E is the tokens that a request gets from a step. It is the same for latency (time for each token of a
request) and throughput, since the same requests run side by side. Prefill is not in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.evaluation.candidates import Candidate, Replays
from spec_plugins.evaluation.intervals import REQUESTS_AT_LEAST, accelerated, resampled
from spec_plugins.evaluation.recommended import Interval
from spec_plugins.evaluation.step_times import Estimate, StepTimes
from spec_plugins.support import is_padded

__all__ = ["OneForAll", "SpeedUps", "Steps", "StepsAt", "grid", "one_for_all"]

Floats = npt.NDArray[np.float64]

DRAWS = 1000
_GROUPS = 400
"""More requests are put together by chance into so many groups, which are drawn instead: as good."""
_EXACT_UP_TO = 16
"""Requests up to which every number of drafting ones is gone through."""


class Steps:
    """Step times of one engine at one batch size and context, for any mean width.

    A width between whole ones follows the fit, through what those two have.

    Raises:
        ConfigError: the batch size or context was not calibrated; names what to do.
    """

    def __init__(self, times: StepTimes, batch: int, context: float, longest: int) -> None:
        self.batch, self.engine = batch, times.setting.engine
        try:
            known = [times.seconds(batch, 1, context)]
        except UnsupportedError as error:
            raise ConfigError(f"concurrency {batch}: {error}") from error
        for q in range(2, longest + 2):
            try:
                known.append(times.seconds(batch, q, context))
            except UnsupportedError:
                break
        self.widths: list[Estimate] = known
        """Of 1, 2, … tokens a request."""
        assert times.fit is not None
        whole = np.arange(1, len(known) + 1, dtype=np.float64)
        between = np.unique(np.concatenate([np.arange(1, len(known), 0.125), whole, [1 + 1e-6]]))
        self._q: Floats = between[between <= len(known)]
        shape, at_whole = (
            times.fit.of(np.stack([np.full_like(q, batch), q, np.full_like(q, context)], 1))
            for q in (self._q, whole)
        )
        seconds = np.array([e.seconds for e in known])
        self._seconds: Floats = shape * np.interp(self._q, whole, seconds / at_whole)
        self._errors: Floats = np.interp(self._q, whole, [_error(e) for e in known])

    @property
    def plain(self) -> Estimate:
        """A step without drafts."""
        return self.widths[0]

    @property
    def plain_error(self) -> float:
        """Half of its 95 % interval, on the log scale."""
        return _error(self.plain)

    def mean(self, p: Floats, m: Floats, size: int) -> tuple[Floats, Floats, Floats]:
        """The mean step, over batches of requests that draft now and then, each by itself.

        Args:
            p: how likely a request has a draft.
            m: draft tokens of one that has; the same shape.
            size: the most that it can be.

        Returns:
            Seconds; of that, in steps without any draft; and half the 95 % interval of the rest, on the log
            scale.
        """
        odds, widths = (self._padded if is_padded(self.engine) else self._ragged)(p, m, size)
        seconds = np.interp(widths, self._q, self._seconds) * odds
        drafting = widths > 1
        spread = np.interp(widths, self._q, self._errors) * seconds * drafting
        whole, drafted = seconds.sum(-1), (seconds * drafting).sum(-1)
        return whole, whole - drafted, spread.sum(-1) / np.maximum(drafted, 1e-300)

    def _ragged(self, p: Floats, m: Floats, size: int) -> tuple[Floats, Floats]:
        """Batches by how many of their requests have a draft: odds and mean widths, ``[…, k]``."""
        n, p, m = self.batch, p[..., None], m[..., None]
        if n <= _EXACT_UP_TO:
            k = np.arange(n + 1, dtype=np.float64)
            odds: Floats = _ways(n) * p**k * (1 - p) ** (n - k)
            return odds, 1 + k * m / n
        nodes, weights = np.polynomial.hermite_e.hermegauss(7)
        k = np.clip(n * p + np.sqrt(n * p * (1 - p)) * nodes, 0, n)
        odds = np.broadcast_to(weights / weights.sum(), k.shape)
        return odds, 1 + k * m / n

    def _padded(self, p: Floats, m: Floats, size: int) -> tuple[Floats, Floats]:
        """Batches by their longest draft, where one is either a token or all that it can be."""
        full = p * np.clip((m - 1) / (size - 1), 0, 1) if size > 1 else p
        none, not_full = (1 - p) ** self.batch, (1 - full) ** self.batch
        odds = np.stack([none, not_full - none, 1 - not_full], -1)
        return odds, np.broadcast_to(np.array([1.0, 2.0, 1.0 + size]), odds.shape)


@functools.cache
def _ways(n: int) -> Floats:
    return np.array([math.comb(n, k) for k in range(n + 1)], np.float64)


def _error(estimate: Estimate) -> float:
    return float(np.log1p(estimate.half_95 / estimate.seconds))


@dataclass(frozen=True, slots=True, eq=False)
class StepsAt:
    """All candidates at one concurrency; arrays are over them."""

    steps: Steps
    which: list[int]
    """Places in :attr:`Replays.candidates`."""
    log_speed_up: Floats
    low: Floats
    """Of the 95 % interval; NaN for too few requests."""
    high: Floats
    from_requests: Floats
    """``[2, candidates]``: how far the ends would be away if step times were exact, on the log scale."""
    from_steps: Floats
    """Half the interval if the requests were all there are, on the log scale."""
    tokens: Floats
    """A step and request."""
    tokens_interval: Floats
    """``[2, candidates]``."""
    drafted: Floats
    """Draft tokens a step and request."""
    share: Floats
    """Of a request's steps that have a draft."""
    seconds: Floats
    """Of a step, drafting included."""
    draft_seconds: Floats
    seconds_error: Floats
    """Half the 95 % interval of ``seconds``, on the log scale."""
    drawn: Floats | None
    """``[draws, candidates]``: log speed-ups of requests drawn anew, the same for all; ``None``: too few."""

    def surely_faster(self, i: int, j: int) -> bool:
        """Whether one is known to be faster than another, on the same requests; errors of their step times
        are taken as independent."""
        if self.drawn is None:
            return False
        apart = float(self.log_speed_up[i] - self.log_speed_up[j])
        low = float(np.quantile(self.drawn[:, i] - self.drawn[:, j], 0.025))
        return apart > math.hypot(apart - low, self.seconds_error[i], self.seconds_error[j])


class SpeedUps:
    """Speed-ups of replayed methods at any concurrency, with intervals.

    All candidates share the draws of requests. Some 30 ms for each concurrency with 40 candidates.
    """

    def __init__(self, replays: Replays, times: StepTimes, *, draws: int = DRAWS, seed: int = 0) -> None:
        self.replays, self.times = replays, times
        counts = np.stack([c.counts for c in replays.candidates], 1)
        n = len(counts)
        if n > _GROUPS:
            groups = np.random.default_rng(seed).permutation(n) % _GROUPS
            together = np.zeros((_GROUPS, *counts.shape[1:]))
            np.add.at(together, groups, counts)
            counts = together
        self._whole: Floats = counts.sum(0)
        self._drawn: Floats | None = None
        if n >= REQUESTS_AT_LEAST:
            flat = counts.reshape(len(counts), -1)
            self._drawn = resampled(flat, draws=draws, seed=seed).reshape(draws, *counts.shape[1:])
            self._without: Floats = self._whole - counts
        self.longest = max(c.draft_tokens for c in replays.candidates)

    def at(self, concurrency: int) -> StepsAt:
        """All candidates whose draft length was calibrated there.

        Raises:
            ConfigError: it is out of the range that was calibrated.
        """
        steps = Steps(self.times, concurrency, self.replays.mean_context, self.longest)
        candidates = self.replays.candidates
        which = [i for i in self.replays.at(concurrency) if candidates[i].draft_tokens < len(steps.widths)]
        chosen = [candidates[i] for i in which]
        whole = [_figures(steps, c, self._whole[i]) for i, c in zip(which, chosen, strict=True)]
        columns = np.array(whole, np.float64).reshape(len(which), 9).T
        log_s, e, drafted, share, seconds, drafting, idle, active, spread = columns
        ends, drawn = np.full((2, 2 * len(which)), np.nan), None
        if self._drawn is not None and which:
            of_draws, of_jackknife = (
                np.concatenate([_both(steps, c, sums[:, i]) for i, c in zip(which, chosen, strict=True)], 1)
                for sums in (self._drawn, self._without)
            )
            together, drawn = np.stack([log_s, e], 1).ravel(), of_draws[:, ::2]
            ends[:] = accelerated(of_draws, together, of_jackknife, 0.95)
        away = np.stack([log_s - ends[0, ::2], ends[1, ::2] - log_s])
        from_steps = np.hypot((1 - idle) * steps.plain_error, active * spread)
        return StepsAt(
            steps, which, log_s,
            np.exp(log_s - np.hypot(away[0], from_steps)), np.exp(log_s + np.hypot(away[1], from_steps)),
            away, from_steps, e, ends[:, 1::2], drafted, share, seconds, drafting,
            np.hypot(idle * steps.plain_error, active * spread), drawn,
        )  # fmt: skip


def _figures(steps: Steps, candidate: Candidate, sums: Floats) -> list[Any]:
    """All that is told of a candidate, from sums over requests ``[…, 4]``: arrays ``[…]``."""
    taken, drafts, drafted, accepted = np.moveaxis(sums, -1, 0)
    taken = np.maximum(taken, 1e-300)
    e, p = 1 + accepted / taken, np.clip(drafts / taken, 0, 1)
    m = np.where(drafts > 0, drafted / np.maximum(drafts, 1), 1.0)
    mean, idle, spread = steps.mean(p, m, candidate.draft_tokens)
    drafting = candidate.draft_seconds(steps.batch)
    whole = mean + drafting
    log_s = np.log(e) + np.log(steps.plain.seconds) - np.log(whole)
    constant = np.full_like(whole, drafting)
    return [log_s, e, drafted / taken, p, whole, constant, idle / whole, (mean - idle) / whole, spread]


def _both(steps: Steps, candidate: Candidate, sums: Floats) -> Floats:
    """Log speed-up and tokens a step, ``[draws, 2]``."""
    return np.stack(_figures(steps, candidate, sums)[:2], -1)


@dataclass(frozen=True, slots=True, eq=False)
class OneForAll:
    """A method with one draft length at several concurrencies."""

    candidate: Candidate
    at: list[Interval]
    """Its speed-up at each."""
    whole: Interval
    """Over all of them, for the same time in each without it."""


def one_for_all(replays: Replays, found: Sequence[StepsAt]) -> list[OneForAll]:
    """Of each method the draft length that is best over all concurrencies, best first; O(candidates).

    Errors are taken to be shared by all concurrencies, which makes intervals rather too wide. Draft lengths
    that were not calibrated at one of them are left out.
    """
    told: dict[tuple[str, int], list[Interval]] = {}
    candidates: dict[tuple[str, int], Candidate] = {}
    for steps in found:
        for i, place in enumerate(steps.which):
            candidate = replays.candidates[place]
            key = candidate.method, candidate.draft_tokens
            candidates[key] = candidate
            ends = float(steps.low[i]), float(steps.high[i])
            told.setdefault(key, []).append(Interval.of(math.exp(steps.log_speed_up[i]), *ends))
    best: dict[str, OneForAll] = {}
    for key, at in told.items():
        if len(at) < len(found):
            continue
        rows = [(s.value, *(math.nan if e is None else e for e in (s.low, s.high))) for s in at]
        whole = Interval.of(*(float(1 / np.mean(1 / np.array(end))) for end in zip(*rows, strict=True)))
        if key[0] not in best or best[key[0]].whole.value < whole.value:
            best[key[0]] = OneForAll(candidates[key], at, whole)
    return sorted(best.values(), key=lambda one: -one.whole.value)


def grid(largest: int, asked: Sequence[int]) -> list[int]:
    """Concurrencies for a curve: all small ones, then a tenth apart, with those that are asked for."""
    found, at = set(asked), 1.0
    while at <= largest:
        found.add(int(at))
        at = max(at + 1, at * 1.1)
    return sorted({*found, largest})
