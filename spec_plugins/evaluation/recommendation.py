"""Which method with which draft length pays at which concurrency; or that none does, or it cannot be told.

Takes what replay counted and what calibration measured; runs nothing. See
:mod:`spec_plugins.evaluation.speed_up` for the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spec_plugins.errors import ConfigError, SpecPluginsError
from spec_plugins.evaluation import recommendation_reasons as reasons
from spec_plugins.evaluation.candidates import Replays, as_replayed
from spec_plugins.evaluation.effort import EFFORTS
from spec_plugins.evaluation.recommended import (
    CANNOT_TELL,
    NONE,
    SAME,
    AtConcurrency,
    Crossover,
    Interval,
    Option,
    Overall,
    Recommendation,
    Started,
    Verdict,
)
from spec_plugins.evaluation.speed_up import SpeedUps, StepsAt, grid, one_for_all
from spec_plugins.evaluation.step_times import StepTimes
from spec_plugins.proposer import Need
from spec_plugins.support import ENGINES

__all__ = ["ENOUGH_REQUESTS", "rank", "recommend"]

ENOUGH_REQUESTS = 30
"""Asked for where there are too few to say how many would do."""
_LOG_SAME = math.log(SAME)
_SURER = (1.96 + 0.84) / 1.96
"""By how much narrower than would just do, so that four of five samples of that size tell."""
_MORE_THAN_ENOUGH = 1_000_000


def recommend(
    replays: Replays,
    times: StepTimes,
    concurrencies: Sequence[int] = (),
    *,
    curve: bool = True,
    draws: int = 1000,
    seed: int = 0,
) -> Recommendation:
    """Say what pays.

    Args:
        replays: see :func:`spec_plugins.evaluation.candidates.read_replays`.
        times: step times of the engine that serves the same model.
        concurrencies: how many requests decode together. Empty: what the traffic says of itself, by tenths of
            the time; where it says nothing, the batch sizes that were calibrated.
        curve: also find where each method stops paying, at concurrencies up to the largest calibrated one.
        draws, seed: of the bootstrap.

    Raises:
        ConfigError: another model was replayed than calibrated, drafts were trees and the engine verifies
            chains, or a concurrency, context or all draft lengths are out of the range that was calibrated.
    """
    _check(replays, times)
    batches = sorted({c.batch for c in times.cells})
    asked = sorted(set(concurrencies or replays.deciles or batches))
    if not asked or asked[0] < 1:
        raise ConfigError(f"concurrencies: {asked[:1]} cannot be used; give numbers from 1")
    if reasons.elsewhere(replays, times):
        candidates = [replace(c, drafting=None) if c.effort.runs_a_model else c for c in replays.candidates]
        replays = replace(replays, candidates=tuple(candidates))
    speed_ups = SpeedUps(replays, times, draws=draws, seed=seed)
    everywhere = grid(batches[-1], asked) if curve else asked
    found = {c: speed_ups.at(c) for c in everywhere if c in asked or c >= batches[0]}
    if all(not found[c].which for c in asked):
        raise ConfigError(
            f"draft length: none of those replayed was calibrated at {', '.join(map(str, asked))} requests; "
            "calibrate with --draft-tokens up to what is replayed"
        )
    engine = times.setting.engine
    at = [_at(replays, found[c], engine) for c in asked]
    overall = None
    if not concurrencies and replays.deciles:
        overall = _overall(replays, [found[c] for c in replays.deciles], engine)
    crossovers = list(_crossovers(replays, found)) if curve else []
    return Recommendation(
        engine=engine,
        setting=times.setting,
        about=dict(replays.about),
        requests=replays.requests,
        mean_context=replays.mean_context,
        at=at,
        overall=overall,
        crossovers=crossovers,
        reasons=list(reasons.in_general(replays, times, [found[c] for c in asked], at)),
        notes=list(reasons.notes(replays, times, [found[c] for c in asked])),
    )


def _check(replays: Replays, times: StepTimes) -> None:
    replayed, calibrated = replays.about.get("model_sha256"), times.setting.model
    if replayed is not None and replayed != calibrated:
        raise ConfigError(
            f"model: {replays.about.get('model')!r} with digest {replayed[:12]} was replayed, and one with "
            f"{calibrated[:12]} calibrated; calibrate the model that was replayed, or replay the other"
        )
    about = ENGINES.get(times.setting.engine)
    gives = about.provides if about is not None and about.provides is not None else frozenset(Need)
    trees = sorted({c.method for c in replays.candidates if c.trees})
    if trees and Need.TREES not in gives:
        raise ConfigError(
            f"replay: {', '.join(trees)} drafted trees, and {times.setting.engine} verifies chains; replay "
            f"with --engine {times.setting.engine}"
        )


# ------------------------------------------------------------------------------------- one concurrency


def _at(replays: Replays, found: StepsAt, engine: str) -> AtConcurrency:
    best = {replays.candidates[found.which[i]].method: i for i in _best_of_each(replays, found)}
    options = [_option(replays, found, i) for i in best.values()]
    ranked = rank([*options, _none(found)])
    choice = _choice(ranked)
    rivals = [
        method for method, i in best.items()
        if choice in best and method != choice and found.log_speed_up[i] <= found.log_speed_up[best[choice]]
        and not found.surely_faster(best[choice], i)
    ]  # fmt: skip
    plain = found.steps.plain
    cost = reasons.token_cost(found.steps)
    return AtConcurrency(
        concurrency=found.steps.batch,
        choice=choice,
        options=ranked,
        plain_step=Interval.of(plain.seconds, *reasons.widened(plain)),
        token_cost=cost,
        bound=reasons.bound(cost),
        started=_started(next((o.config for o in ranked if o.method == choice), None), engine),
        reasons=list(reasons.at(found, ranked, choice, rivals, cost)),
    )


def _best_of_each(replays: Replays, found: StepsAt) -> list[int]:
    """Of each method, the place in ``found`` of its best draft length."""
    best: dict[str, int] = {}
    for i, place in enumerate(found.which):
        method = replays.candidates[place].method
        if method not in best or found.log_speed_up[i] > found.log_speed_up[best[method]]:
            best[method] = i
    return list(best.values())


def _option(replays: Replays, found: StepsAt, i: int) -> Option:
    candidate = replays.candidates[found.which[i]]
    value = float(np.exp(found.log_speed_up[i]))
    low, high = (float(end[i]) for end in (found.low, found.high))
    tokens = found.steps.batch * found.tokens[i] / found.seconds[i]
    # Of throughput: what comes of requests, and of the step's own time.
    low_t, high_t = (
        float(tokens * np.exp(sign * np.hypot(away[i], found.seconds_error[i])))
        for sign, away in zip((-1, 1), found.from_requests, strict=True)
    )
    verdict = _verdict(low, high)
    more, why = _more(replays, found, i) if verdict == CANNOT_TELL else (None, "")
    width = found.steps.widths[candidate.draft_tokens]
    return Option(
        method=candidate.method,
        draft_tokens=candidate.draft_tokens,
        config=dict(candidate.config),
        verdict=verdict,
        speed_up=Interval.of(value, low, high),
        tokens_per_second=Interval.of(float(tokens), low_t, high_t),
        tokens_per_step=Interval.of(
            float(found.tokens[i]), *(float(end[i]) for end in found.tokens_interval)
        ),
        drafted_per_step=float(found.drafted[i]),
        drafts_in=float(found.share[i]),
        step_ratio=float((found.seconds[i] - found.draft_seconds[i]) / found.steps.plain.seconds),
        draft_seconds=None if candidate.drafting is None else float(found.draft_seconds[i]),
        step_times=width.how,
        effort=candidate.effort.make,
        effort_rank=candidate.effort.rank,
        more_requests=more,
        lacks=why,
    )


def _none(found: StepsAt) -> Option:
    plain = found.steps.plain
    low, high = reasons.widened(plain)
    n = found.steps.batch
    effort = EFFORTS[NONE]
    return Option(
        method=NONE,
        draft_tokens=0,
        config=None,
        verdict="plain",
        speed_up=Interval.of(1.0, 1.0, 1.0),
        tokens_per_second=Interval.of(n / plain.seconds, n / high, n / max(low, 1e-300)),
        tokens_per_step=Interval.of(1.0, 1.0, 1.0),
        drafted_per_step=0.0,
        drafts_in=0.0,
        step_ratio=1.0,
        draft_seconds=0.0,
        step_times=plain.how,
        effort=effort.make,
        effort_rank=effort.rank,
    )


def _verdict(low: float, high: float) -> Verdict:
    if math.isnan(low) or math.isnan(high):
        return CANNOT_TELL
    if low > 1:
        return "pays"
    if high <= 1:
        return "does not pay"
    return "no difference" if low >= 1 / SAME and high <= SAME else CANNOT_TELL


def _more(replays: Replays, found: StepsAt, i: int) -> tuple[int | None, str]:
    """How many more requests would let it be told, and what else is lacking.

    Either its gain or loss is to be sure, or that it is none to speak of; the part of the interval that comes
    from requests shrinks with the root of their number. It is as uncertain as the gain that it rests on.
    """
    distance = abs(float(found.log_speed_up[i]))
    half = float(found.from_requests[0 if found.log_speed_up[i] > 0 else 1, i])
    if math.isnan(half):
        return max(1, ENOUGH_REQUESTS - replays.requests), "too few requests for an interval"
    steps, wanted = float(found.from_steps[i]), max(distance, _LOG_SAME - distance)
    if steps >= wanted:
        return None, (
            "step times are not known well enough, and more requests would not help; calibrate this batch "
            "size and draft length, with more --steps"
        )
    needed = replays.requests * (_SURER * half) ** 2 / (wanted**2 - steps**2)
    more = math.ceil(needed) - replays.requests
    if more > _MORE_THAN_ENOUGH:
        return None, "it is too close for any number of requests"
    return max(1, more), "the interval is too wide"


def rank(options: Sequence[Option]) -> list[Option]:
    """The best first; of those that gain as much as the best of them, the one that takes the least effort.

    As much: within 3 %, and intervals that overlap. Plain decoding needs no overlap, for within 3 % nothing
    is worth a flag.
    """
    left = sorted(options, key=lambda o: -o.speed_up.value)
    ranked: list[Option] = []
    while left:
        best = left[0]
        same = [o for o in left if _as_good(o, best)]
        first = min(same, key=lambda o: (o.effort_rank, -o.speed_up.value))
        for_less = first is not best
        ranked.append(first.model_copy(update={"instead_of": best.method if for_less else None}))
        left = [o for o in left if o is not first]
    return ranked


def _as_good(option: Option, best: Option) -> bool:
    if option is best:
        return True
    if option.speed_up.value * SAME < best.speed_up.value:
        return False
    high, low = option.speed_up.high, best.speed_up.low
    return option.method == NONE or high is None or low is None or high >= low


def _choice(ranked: Sequence[Option]) -> str:
    """The first that is known to pay; or that it cannot be told, where something may pay and nothing does."""
    sure = next(o for o in ranked if o.verdict in ("pays", "plain"))
    if sure.method != NONE:
        return sure.method
    if len(ranked) == 1:  # no draft length was calibrated there
        return CANNOT_TELL
    for o in ranked:
        if o.verdict == CANNOT_TELL and (o.speed_up.high is None or o.speed_up.value > 1):
            return CANNOT_TELL
    return NONE


def _started(config: Mapping[str, Any] | None, engine: str) -> Started | None:
    """How the engine is started with a configuration; ``None`` for plain decoding."""
    if config is None:
        return None
    from spec_plugins.launch import prepare
    from spec_plugins.support import has_flags

    config = as_replayed(config, engine)
    if engine not in ENGINES or not has_flags(engine):
        return Started(config=config)
    try:
        flags = prepare(engine, config)
    except SpecPluginsError as error:
        return Started(config=config, notes=[str(error)])
    return Started(
        config=config,
        flags=flags.flags,
        environment=dict(flags.environment),
        file=flags.file,
        notes=list(flags.notes),
    )


# ----------------------------------------------------------------------------------- all concurrencies


def _crossovers(replays: Replays, found: Mapping[int, StepsAt]) -> Iterator[Crossover]:
    """Of each method, with its best draft length at each concurrency."""
    methods: dict[str, list[tuple[int, Option | None]]] = {}
    for concurrency, steps in found.items():
        best = {replays.candidates[steps.which[i]].method: i for i in _best_of_each(replays, steps)}
        for method in {c.method: None for c in replays.candidates}:
            option = _option(replays, steps, best[method]) if method in best else None
            methods.setdefault(method, []).append((concurrency, option))
    for method, told in methods.items():
        known = [(c, o) for c, o in told if o is not None]
        # Without an interval neither end is known.
        bounded = [(c, o.speed_up.low, o.speed_up.high) for c, o in known]
        yield Crossover(
            method=method,
            not_sure_from=_from([(c, low is None or low <= 1) for c, low, _ in bounded]),
            expected_from=_from([(c, o.speed_up.value <= 1) for c, o in known]),
            sure_from=_from([(c, high is not None and high <= 1) for c, _, high in bounded]),
            curve=[(c, o.draft_tokens, o.speed_up) for c, o in known],
        )


def _from(stopped: Sequence[tuple[int, bool]]) -> int | None:
    """The concurrency from which on it holds, up to the last; ``None``: not even there."""
    first: int | None = None
    for concurrency, holds in stopped:
        if not holds:
            first = None
        elif first is None:
            first = concurrency
    return first


def _overall(replays: Replays, tenths: Sequence[StepsAt], engine: str) -> Overall | None:
    """One configuration for all of the traffic's own concurrencies."""
    lines = [(one.candidate, one.whole) for one in one_for_all(replays, tenths)]
    if not lines:
        return None
    sure = [(c, s) for c, s in lines if s.low is not None and s.low > 1 and s.value > SAME]
    open_ = [s for _, s in lines if s.value > 1 and (s.low is None or s.low <= 1) and not _settled(s)]
    choice = sure[0][0].method if sure else CANNOT_TELL if open_ else NONE
    return Overall(
        concurrencies=list(replays.deciles),
        choice=choice,
        options=[(c.method, c.draft_tokens, s) for c, s in lines],
        started=_started(sure[0][0].config, engine) if sure else None,
    )


def _settled(interval: Interval) -> bool:
    """Whether it is known to make no difference."""
    return interval.high is not None and interval.high <= SAME
