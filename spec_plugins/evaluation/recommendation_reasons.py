"""Why: what a careful engineer would say of the figures, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from spec_plugins.evaluation.candidates import Replays
from spec_plugins.evaluation.effort import EFFORTS, PUBLISHED_BY, small_model
from spec_plugins.evaluation.recommended import CANNOT_TELL, NONE, SAME, AtConcurrency, Interval, Option
from spec_plugins.evaluation.speed_up import Steps, StepsAt
from spec_plugins.evaluation.step_times import Estimate, StepTimes
from spec_plugins.support import is_padded

__all__ = ["at", "bound", "elsewhere", "in_general", "notes", "shown", "token_cost", "widened"]

_FREE, _DEAR = 0.1, 0.5
"""Costs of a token up to which a step is bound by latency, and from which on by throughput."""
_PROBE = 5
"""The width at which that cost is looked at."""
_NEW_DRAFTS = 3
"""Draft tokens of a head that does not exist yet."""


def shown(interval: Interval, digits: int = 2) -> str:
    """A figure with its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f}–{interval.high:.{digits}f})"


def widened(estimate: Estimate) -> tuple[float, float]:
    """The ends of a step time's 95 % interval, in seconds."""
    return max(0.0, estimate.seconds - estimate.half_95), estimate.seconds + estimate.half_95


def token_cost(steps: Steps) -> float:
    """What a token more of each request adds to a plain step, as a share of it."""
    q = min(_PROBE, len(steps.widths))
    if q < 2:
        return math.nan
    return (steps.widths[q - 1].seconds / steps.plain.seconds - 1) / (q - 1)


def bound(cost: float) -> Literal["latency", "both", "throughput"]:
    """What holds a step back."""
    return "latency" if cost <= _FREE else "throughput" if cost >= _DEAR else "both"


def at(
    found: StepsAt, ranked: Sequence[Option], choice: str, rivals: Sequence[str], cost: float
) -> Iterator[str]:
    """Why this is chosen at one concurrency; ``rivals``: slower ones that may be faster after all."""
    n = found.steps.batch
    each = f"a token more of each request adds {max(0.0, cost):.0%} to a step"
    yield {
        "latency": f"Latency-bound at {n}: {each}, so drafts are verified nearly for nothing.",
        "both": f"Between latency- and throughput-bound at {n}: {each}, so only likely drafts pay.",
        "throughput": f"Throughput-bound at {n}: {each}; rejected drafts cost nearly what they weigh.",
    }[bound(cost)]
    drafted = [o for o in ranked if o.method != NONE]
    chosen = next((o for o in drafted if o.method == choice), None)
    for o in [chosen] if chosen else drafted[:1]:
        yield _acceptance(o)
    if chosen:
        if chosen.instead_of:
            takes = next(o.effort for o in ranked if o.method == chosen.instead_of)
            yield f"{chosen.instead_of} gains no more than 3 % more, and takes {takes}."
        yield from _not_told_apart(chosen, drafted, rivals)
    elif choice == NONE:
        best = max(drafted, key=lambda o: o.speed_up.value, default=None)
        if best is not None and best.speed_up.value > 1:
            yield f"{best.method} gains {shown(best.speed_up)}, too little to be worth a flag."
        elif best is not None:
            yield f"Nothing pays: the best is {best.method} with {shown(best.speed_up)} times plain decoding."
    for o in drafted:
        if o.verdict == CANNOT_TELL and (o.speed_up.high or 2) > SAME:
            more = f"about {o.more_requests:,} more requests would tell" if o.more_requests else ""
            why = "; ".join(part for part in (o.lacks, more) if part)
            yield f"Cannot tell whether {o.method} pays, {shown(o.speed_up)}: {why}."


def _acceptance(o: Option) -> str:
    steps = f"{o.drafts_in:.0%} of steps" if o.drafts_in < 0.995 else "every step"
    drafting = ""
    if o.draft_seconds:
        drafting = f", and {o.draft_seconds * 1e3:.2g} ms for drafting"
    return (
        f"{o.method} with {o.draft_tokens} draft tokens gives {shown(o.tokens_per_step)} tokens a step, has "
        f"a draft in {steps}, and a step takes {o.step_ratio:.2f} times a plain one{drafting}."
    )


def _not_told_apart(chosen: Option, drafted: Sequence[Option], rivals: Sequence[str]) -> Iterator[str]:
    """Others that may be better, by these data."""
    for o in drafted:
        better = o.speed_up.value > chosen.speed_up.value and o.method != chosen.instead_of
        if better and o.verdict == CANNOT_TELL:
            yield f"{o.method} may be better, {shown(o.speed_up)}, but is not known to pay."
    if rivals:
        yield f"On these requests it is not certain to be faster than {', '.join(rivals)}."


# -------------------------------------------------------------------------------------------- in general


def in_general(
    replays: Replays, times: StepTimes, found: Sequence[StepsAt], at: Sequence[AtConcurrency]
) -> Iterator[str]:
    """What holds at all concurrencies: other methods, kinds of traffic, and what to do later."""
    yield (
        "Speed-ups are of decoding. Time to the first token stays as it is, so a whole request gains less: "
        "the share of its time that it decodes, times that."
    )
    yield from _small_model(replays)
    yield from _heads(replays, found, at)
    yield from _tags(replays)
    names = dict.fromkeys(a.choice for a in at if a.choice not in (NONE, CANNOT_TELL))
    for method in names:
        effort = next(c.effort for c in replays.candidates if c.method == method)
        yield f"After an update of the target, for {method}: {effort.retest}."
    yield (
        "After an update of the engine, its flags or the machine: calibrate again. After one of the target: "
        "calibrate only where its size or number format changed."
    )


def _small_model(replays: Replays) -> Iterator[str]:
    if any(c.config["proposer"] == "draft_model" for c in replays.candidates):
        return
    small = small_model(replays.about)
    if small is not None:
        yield (
            f"No draft model was replayed, and one of the target's family exists: {small.name}, "
            f"{small.millions:,} million parameters, by type and vocabulary. `spec-plugins inspect` says "
            "whether it fits; replay it before any head is trained."
        )
    else:
        yield "No draft model was replayed, and no much smaller one of the target's family is known here."


def _heads(replays: Replays, found: Sequence[StepsAt], at: Sequence[AtConcurrency]) -> Iterator[str]:
    """Whether a head is worth training, from how many tokens a step it has to give."""
    if any(c.effort.rank >= 3 for c in replays.candidates):
        return
    medusa, eagle = EFFORTS["medusa"].published, EFFORTS["eagle"].published
    assert medusa is not None
    assert eagle is not None
    verdicts: dict[str, list[tuple[int, float, int]]] = {}
    for steps, told in zip(found, at, strict=True):
        drafts = min(_NEW_DRAFTS, len(steps.steps.widths) - 1)
        if drafts < 1:
            continue
        # It has to beat what there is by more than 3 %, with its own time to draft left out.
        best = max([1.0, *(o.speed_up.value for o in told.options if o.verdict == "pays")])
        needed = SAME * best * steps.steps.widths[drafts].seconds / steps.steps.plain.seconds
        verdict = (
            "no head can"
            if needed > drafts + 1
            else "not worth training"
            if needed > eagle
            else "worth training only if it does as well as the published EAGLE"
            if needed > medusa
            else "worth an attempt"
        )
        verdicts.setdefault(verdict, []).append((steps.steps.batch, needed, drafts))
    for verdict, where in verdicts.items():
        needs = sorted(needed for _, needed, _ in where)
        span = f"{needs[0]:.1f}" + (f" to {needs[-1]:.1f}" if f"{needs[0]:.1f}" != f"{needs[-1]:.1f}" else "")
        at_once = ", ".join(str(n) for n, _, _ in where)
        yield (
            f"At {at_once} a head that is not there yet would have to give {span} tokens a step with "
            f"{where[-1][2]} draft tokens, and more for its own time: {verdict}. Published: Medusa {medusa}, "
            f"EAGLE {eagle} ({PUBLISHED_BY})."
        )


def _tags(replays: Replays) -> Iterator[str]:
    for method, by_tag in replays.by_tag.items():
        if len(by_tag) > 1:
            worst, best = min(by_tag, key=lambda t: by_tag[t]), max(by_tag, key=lambda t: by_tag[t])
            if by_tag[best] - 1 > 2 * (by_tag[worst] - 1):
                yield (
                    f"{method} gives {by_tag[best]:.2f} tokens a step for {best}, and {by_tag[worst]:.2f} "
                    f"for {worst}: requests of that kind may do better without it."
                )


# ------------------------------------------------------------------------------------------------- notes


def elsewhere(replays: Replays, times: StepTimes) -> bool:
    """Whether models drafted on a CPU, and are to draft on a GPU."""
    return replays.about.get("device", "cpu") == "cpu" and bool(times.setting.hardware.get("gpus"))


def notes(replays: Replays, times: StepTimes, found: Sequence[StepsAt]) -> Iterator[str]:
    """What the figures rest on, where that is less than it could be."""
    about, setting = replays.about, times.setting
    if about.get("model_sha256") is None:
        yield "The replay had no weights, so it is not known whether it was of the model that was calibrated."
    if about.get("engine") not in (None, setting.engine):
        yield (
            f"Replayed with what {about['engine']} gives a proposer, not {setting.engine}: replay with "
            f"--engine {setting.engine}."
        )
    if is_padded(setting.engine):
        yield f"In {setting.engine} a step is as wide as its longest draft, and so it is reckoned here."
    unknown = {c.method for c in replays.candidates if c.drafting is None}
    if elsewhere(replays, times):
        unknown -= {c.method for c in replays.candidates if c.effort.runs_a_model}
    if unknown:
        told = ", ".join(sorted(unknown))
        yield f"How long drafting takes is not known for {told}, and taken as 0: replay again."
    calibrated = setting.hardware.get("processor")
    if about.get("processor") not in (None, calibrated) and calibrated is not None:
        yield (
            f"Drafting was timed on {about['processor']}, steps on {calibrated}: replay there for its time."
        )
    models = sorted({c.method for c in replays.candidates if c.effort.runs_a_model})
    if models and elsewhere(replays, times):
        yield (
            f"{', '.join(models)} drafted on the CPU in the replay, which says nothing of a GPU; its time is "
            "taken as 0: replay with --device cuda."
        )
    widest = {c.draft_tokens for c in replays.candidates}
    for steps in found:
        lost = sorted(size for size in widest if size >= len(steps.steps.widths))
        if lost:
            yield (
                f"At {steps.steps.batch} requests, drafts of {lost[0]} tokens or more were not calibrated "
                "and are left out: calibrate with --draft-tokens."
            )
        if any(e.how == "extrapolated" for e in steps.steps.widths):
            yield (
                f"At {steps.steps.batch} requests, some step times lie beyond what was measured, and have "
                "twice the interval."
            )
    yield from dict.fromkeys(f"{c.method}: {note}" for c in replays.candidates for note in c.notes)
    if replays.requests < 20:
        yield f"{replays.requests} requests are few: of less than some 20, intervals are too narrow."
