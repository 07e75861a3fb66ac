"""Serves the finalists and plain decoding, and sets what was predicted beside what is measured.

One server at a time, as an accelerator has memory for one: plain decoding, each finalist, and plain decoding
again, which tells how far the machine drifted. Each meets the same loads. Every load has requests of its own,
since a proposer that learns from finished ones would know those that come again.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_plugins.config import Config, load_config
from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.candidates import Replays, as_replayed
from spec_plugins.evaluation.confirmed import Confirmation, Confirmed, Point, Quantiles
from spec_plugins.evaluation.intervals import REQUESTS_AT_LEAST as ENOUGH_FOR_AN_INTERVAL
from spec_plugins.evaluation.intervals import accelerated, ratio_intervals, resampled
from spec_plugins.evaluation.load import Load, LoadRunner, Request, Served, load_runner
from spec_plugins.evaluation.recommended import NONE, Interval
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.evaluation.speed_up import OneForAll, SpeedUps, StepsAt, one_for_all
from spec_plugins.evaluation.step_times import StepTimes
from spec_plugins.support import ENGINES
from spec_plugins.traffic.conversations import Conversation

__all__ = ["REQUESTS_AT_LEAST", "Asked", "confirm", "finalists", "loads"]

REQUESTS_AT_LEAST = 8
"""Of a load."""
_ROUNDS_AT_LEAST = 2
"""How often each user of a closed loop asks, at least; of one round all would be at their prompts at once."""
_WARM_UP_TOKENS = 24

Progress = Callable[[float, str], None]
"""Takes the share that is done, and what runs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to confirm."""

    model: str
    """Folder."""
    concurrencies: Sequence[int]
    methods: Sequence[str] = ()
    """Names as in the replay; empty: the ``most`` best."""
    most: int = 2
    rounds: int = 6
    """How often each user of a closed loop asks, where there are requests enough."""
    open_loop: bool = True
    """Also send requests as the traffic's arrivals say, where it has such."""


def confirm(
    replays: Replays,
    times: StepTimes,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    asked: Asked,
    progress: Progress = lambda done, words: None,
    runner: LoadRunner | None = None,
) -> Confirmation:
    """Serve and measure; some minutes for each method.

    Args:
        replays, times: what the prediction rests on. Servers are started as the calibrated one was.
        conversations: what is asked, and how long answers may be.
        tokenizer: the model's.
        asked: what to serve.
        progress: called before each server and load.
        runner: the adapter's, if not that of the calibrated engine.

    Raises:
        ConfigError: a method or concurrency that was not replayed or calibrated, or too few requests.
        UnsupportedError: the engine has no server.
        UnavailableError: the engine, or a package of its client, is missing.
        SpecPluginsError: a server or the client fails.
    """
    engine = times.setting.engine
    runner = runner or load_runner(engine)
    speed_ups = SpeedUps(replays, times)
    found = [speed_ups.at(c) for c in asked.concurrencies]
    chosen = finalists(replays, found, asked)
    planned, notes = loads(conversations, tokenizer, asked)
    configs: list[Config | None] = [
        None,
        *(load_config(as_replayed(one.candidate.config, engine)) for one in chosen),
        None,
    ]
    names = [NONE, *(one.candidate.method for one in chosen), NONE]
    served: list[list[Served]] = []
    for turn, (name, config) in enumerate(zip(names, configs, strict=True)):
        progress(turn / len(names), f"starting {ENGINES[engine].title} with {name}")
        setting = times.setting
        with runner.server(asked.model, config, setting.dtype, setting.flags) as server:
            _warm_up(server, max(load.concurrency or 1 for load in planned))
            measured = []
            for i, load in enumerate(planned):
                progress((turn + (i + 0.5) / len(planned)) / len(names), f"{name}: {_words(load)}")
                measured.append(runner.run(server, asked.model, load))
            served.append(measured)
    at = []
    for i, load in enumerate(planned):
        steps = found[i] if load.concurrency is not None else None
        at.append(_confirmed(load, steps, i, chosen, [measured[i] for measured in served]))
    return Confirmation(
        engine=engine,
        client=runner.CLIENT,
        setting=times.setting,
        about=dict(replays.about),
        temperature=planned[0].temperature,
        at=at,
        notes=notes,
    )


def finalists(replays: Replays, found: Sequence[StepsAt], asked: Asked) -> list[OneForAll]:
    """Methods to serve, each with the draft length that is best over all concurrencies; best first.

    Raises:
        ConfigError: one that is asked for was not replayed, or not calibrated at all of them.
    """
    there = {one.candidate.method: one for one in one_for_all(replays, found)}
    if unknown := [method for method in asked.methods if method not in there]:
        raise ConfigError(
            f"methods: {unknown[0]!r} was not replayed, or its draft lengths not calibrated; there are: "
            f"{', '.join(there)}"
        )
    return [there[m] for m in asked.methods or list(there)[: asked.most]]


def loads(
    conversations: Sequence[Conversation], tokenizer: Any, asked: Asked
) -> tuple[list[Load], list[str]]:
    """A closed loop for each concurrency, and an open one where all requests have arrival times.

    Returns them, and what is to be said of them.

    Raises:
        ConfigError: too few requests to keep so many users busy.
    """
    usable = [c for c in conversations if len(c.tokens) - c.prompt_length >= 2 and c.prompt_length >= 2]
    arrived = sorted(float(a) for c in usable if (a := c.record.arrived) is not None)
    is_open = asked.open_loop and 1 < len(arrived) == len(usable) and arrived[-1] > arrived[0]
    wanted = [max(REQUESTS_AT_LEAST, asked.rounds * c) for c in asked.concurrencies]
    least = [max(REQUESTS_AT_LEAST, _ROUNDS_AT_LEAST * c) for c in asked.concurrencies]
    if is_open:
        wanted.append(max(wanted))
        least.append(REQUESTS_AT_LEAST)
    share = min(1.0, (len(usable) - sum(least)) / max(1, sum(wanted) - sum(least)))
    if share < 0:
        raise ConfigError(
            f"traffic: {len(usable)} requests with responses are too few to keep "
            f"{', '.join(map(str, asked.concurrencies))} users busy, each concurrency with requests of its "
            f"own; give {sum(least)} or more, or lower concurrencies"
        )
    counts = [low + int(share * (high - low)) for low, high in zip(least, wanted, strict=True)]
    mixed = [usable[i] for i in np.random.default_rng(0).permutation(len(usable))[: sum(counts)]]
    temperatures = [t for c in mixed if (t := c.record.temperature) is not None]
    temperature = float(np.median(temperatures)) if temperatures else 0.0
    requests, other = _requests(mixed, tokenizer)
    found, begin = [], 0
    for i, count in enumerate(counts):
        part = requests[begin : begin + count]
        begin += count
        if i < len(asked.concurrencies):
            found.append(Load(part, concurrency=asked.concurrencies[i], temperature=temperature))
        else:
            rate, burstiness = _arrivals(arrived)
            found.append(Load(part, rate=rate, burstiness=burstiness, temperature=temperature))
    notes = []
    if len(set(temperatures)) > 1:
        notes.append(
            f"Requests had several temperatures; all were served with their median, {temperature:g}."
        )
    if other:
        notes.append(
            f"{other} of {len(requests)} prompts, sent as text, are encoded in other tokens than recorded."
        )
    return found, notes


def _requests(conversations: Sequence[Conversation], tokenizer: Any) -> tuple[list[Request], int]:
    """Prompts as text, since the clients send such; and how many of them are encoded otherwise."""
    found, other = [], 0
    for c in conversations:
        asked, said = c.tokens[: c.prompt_length].tolist(), c.tokens[c.prompt_length :].tolist()
        prompt = tokenizer.decode(asked, clean_up_tokenization_spaces=False)
        bos = getattr(tokenizer, "bos_token", None)
        if bos and prompt.startswith(bos) and tokenizer(prompt)["input_ids"] != asked:
            prompt = prompt[len(bos) :]  # the engine puts one there
        other += list(tokenizer(prompt)["input_ids"]) != asked
        found.append(Request(prompt, tokenizer.decode(said, clean_up_tokenization_spaces=False), len(said)))
    return found, other


def _arrivals(arrived: Sequence[float]) -> tuple[float, float]:
    """Requests a second, and the shape of the gaps between them."""
    gaps = np.diff(np.array(arrived))
    mean, spread = float(gaps.mean()), float(gaps.std())
    return 1 / mean, float(np.clip((mean / spread) ** 2 if spread > 0 else 100.0, 0.05, 100.0))


def _words(load: Load) -> str:
    n = len(load.requests)
    if load.concurrency is not None:
        return f"{n} requests, {load.concurrency} at once"
    return f"{n} requests, {load.rate:.3g} a second"


def _warm_up(server: ServerProcess, requests: int) -> None:
    """Has kernels compiled and memory made, with texts that no request has."""
    name = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
    body = {
        "model": name, "prompt": [f"{i} {i + 1} {i + 2} {i + 3}" for i in range(requests)],
        "max_tokens": _WARM_UP_TOKENS, "temperature": 0,
    }  # fmt: skip
    try:
        with server.post("/v1/completions", body) as response:
            response.read()
    except (OSError, http.client.HTTPException) as error:
        raise server.failure(f"failed a request ({error})") from error


# ------------------------------------------------------------------------------------------- figures


def _confirmed(
    load: Load, steps: StepsAt | None, i: int, chosen: Sequence[OneForAll], served: Sequence[Served]
) -> Confirmed:
    """All methods under one load; ``served`` begins and ends with plain decoding."""
    first, *methods, last = served
    good = np.all([s.tokens > 0 for s in served], axis=0)
    plain = _Plain(first, last, good)
    points = [_point(NONE, 0, None, first, plain, None, None)]
    for one, found in zip(chosen, methods, strict=True):
        predicted, expected = None, None
        if steps is not None:
            predicted = one.at[i]
            expected = plain.expected(predicted.value, steps.steps.plain.seconds)
        candidate = one.candidate
        config = dict(candidate.config)
        points.append(
            _point(candidate.method, candidate.draft_tokens, config, found, plain, predicted, expected)
        )
    return Confirmed(
        concurrency=load.concurrency,
        rate=load.rate,
        points=points,
        plain_again=plain.again,
        plain_same_answers=_alike(first, last),
    )


class _Plain:
    """Plain decoding, served twice."""

    def __init__(self, first: Served, last: Served, good: npt.NDArray[np.bool_]) -> None:
        self.first, self.good = first, good
        """Which requests all servers answered."""
        self.whole = (first.whole + last.whole)[good] / 2
        self.tokens = (first.tokens + last.tokens)[good] / 2
        self.first_token = (first.first_token + last.first_token)[good] / 2
        early, late = (float(s.whole[good].sum() / max(1, s.tokens[good].sum())) for s in (first, last))
        self.again = late / early if early > 0 else math.nan

    def expected(self, speed_up: float, step: float) -> float:
        """A predicted speed-up of decoding as it is served.

        A request also waits for its own prompt and while others are at theirs, which drafts do not shorten:
        so much as plain decoding takes for a token more than a step does.
        """
        token = float(self.whole.sum() / max(1.0, self.tokens.sum()))
        return token / (step / speed_up + max(0.0, token - step))

    def speed_up(self, found: Served) -> Interval | None:
        """Measured, paired by request."""
        columns = np.stack([self.whole, self.tokens, found.whole[self.good], found.tokens[self.good]], 1)
        whole = columns.sum(0)
        if not whole.all():
            return None
        low = high = np.full(1, math.nan)
        if len(columns) >= ENOUGH_FOR_AN_INTERVAL:
            low, high = accelerated(
                _log_gain(resampled(columns)), _log_gain(whole), _log_gain(whole - columns), 0.95
            )
        return Interval.of(*(float(np.exp(end[0])) for end in (_log_gain(whole), low, high)))

    def first_tokens(self, found: Served) -> Interval | None:
        """Mean time to first token over that of plain decoding."""
        above, below = found.first_token[self.good], self.first_token
        if not below.sum():
            return None
        low, high = ratio_intervals(above[:, None], below[:, None])
        return Interval.of(float(above.sum() / below.sum()), float(low[0]), float(high[0]))


def _log_gain(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of sums ``[…, 4]``: seconds and tokens of plain decoding, and of another; ``[…, 1]``."""
    seconds, tokens, other_seconds, other_tokens = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: npt.NDArray[np.float64] = np.log(seconds * other_tokens / (tokens * other_seconds))
    return found[..., None]


def _point(
    method: str,
    draft_tokens: int,
    config: Mapping[str, Any] | None,
    found: Served,
    plain: _Plain,
    predicted: Interval | None,
    expected: float | None,
) -> Point:
    other = config is not None
    return Point(
        method=method,
        draft_tokens=draft_tokens,
        config=dict(config) if config is not None else None,
        requests=len(found.tokens),
        predicted=predicted,
        expected=expected,
        measured=plain.speed_up(found) if other else None,
        tokens_per_second=found.tokens_per_second,
        first_token=Quantiles.of(found.first_token[found.tokens > 0]),
        first_token_ratio=plain.first_tokens(found) if other else None,
        per_token=Quantiles.of(found.per_token),
        same_answers=_alike(found, plain.first),
        failures=list(found.failures),
    )


def _alike(one: Served, other: Served) -> int:
    return sum(a == b for a, b in zip(one.texts, other.texts, strict=True))
