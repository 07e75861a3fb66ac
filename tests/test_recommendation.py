"""Recommendations tell what pays where the truth is known, and say so where it cannot be told."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_plugins.errors import ConfigError
from spec_plugins.launch import prepare

pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")

from repeating_traffic import write_traffic
from typer.testing import CliRunner

from spec_plugins.cli import app
from spec_plugins.evaluation import recommendation_report as report
from spec_plugins.evaluation.candidates import Replays, gather, read_replays
from spec_plugins.evaluation.effort import EFFORTS, effort_of, small_model
from spec_plugins.evaluation.recommendation import rank, recommend
from spec_plugins.evaluation.recommended import CANNOT_TELL, NONE, AtConcurrency, Interval, Recommendation
from spec_plugins.evaluation.speed_up import SpeedUps, Steps
from spec_plugins.evaluation.step_times import Cell, Setting, StepTimes

Floats = np.ndarray[Any, np.dtype[np.float64]]
Truth = Callable[[float, float], float]
BATCHES, WIDTHS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 5, 7)
SIZES = (1, 2, 3, 4, 5, 6)


def read_weights(batch: float, q: float) -> float:
    """Flat up to 24 tokens, then linear, as on a GPU."""
    return 10e-3 + 0.4e-3 * max(0.0, batch * q - 24)


def compute(batch: float, q: float) -> float:
    """A token costs as much as any other."""
    return 1e-3 + 4e-3 * batch * q


def free(batch: float, q: float) -> float:
    """Verification costs nothing."""
    return 10e-3 + 1e-4 * batch


def step_times(
    truth: Truth,
    noise: float = 0.02,
    seed: int = 0,
    engine: str = "vllm",
    batches: Sequence[int] = BATCHES,
    widths: Sequence[int] = WIDTHS,
) -> StepTimes:
    rng = np.random.default_rng(seed)
    setting = Setting(
        engine=engine, engine_version="1", spec_plugins_version="0", model="m" * 64, dtype="float32",
        hardware={"processor": "a processor"},
    )  # fmt: skip
    return StepTimes.of(
        setting,
        [
            Cell(
                batch=b, q=q, context=c, mean_context=c,
                seconds=(truth(b, q) * (1 + noise * rng.standard_normal(40))).tolist(),
            )
            for b in batches for q in widths for c in (100, 1000)
        ],
    )  # fmt: skip


class Drafts:
    """A proposer whose requests each have their own acceptance rate, and that drafts now and then."""

    def __init__(self, name: str, share: float, rate: float, spread: float = 8.0) -> None:
        self.name, self.share, self.rate, self.spread = name, share, rate, spread

    def rates(self, n: int, rng: np.random.Generator) -> Floats:
        return rng.beta(self.rate * self.spread, (1 - self.rate) * self.spread, n)

    def by_request(
        self, n: int, rng: np.random.Generator, sizes: Sequence[int] = SIZES, steps: int = 40
    ) -> list[dict[str, Any]]:
        """As replay writes it, every draft as long as may be."""
        rates = self.rates(n, rng)
        drafts = rng.binomial(steps, self.share, n)
        found = []
        for size in sizes:
            odds = rates[:, None] ** np.arange(size + 1)
            odds[:, :-1] -= odds[:, 1:]  # of exactly so many accepted
            accepted = np.array(
                [rng.multinomial(d, o) @ np.arange(size + 1) for d, o in zip(drafts, odds, strict=True)]
            )
            found.append(
                {
                    "draft_tokens": size,
                    "steps": [steps] * n,
                    "drafts": drafts.tolist(),
                    "drafted_tokens": (drafts * size).tolist(),
                    "accepted_tokens": accepted.tolist(),
                }
            )
        return found

    def tokens(self, size: int) -> float:
        """The true ones, a step: moments of the beta distribution."""
        a, b = self.rate * self.spread, (1 - self.rate) * self.spread
        moments = np.cumprod([(a + i) / (a + b + i) for i in range(size)])
        return 1 + self.share * float(moments.sum())

    def speed_up(self, truth: Truth, batch: int, size: int) -> float:
        """The true one, by drawing batches."""
        drafting = np.random.default_rng(1).binomial(batch, self.share, 4000)
        seconds = np.mean([truth(batch, 1 + k * size / batch) for k in drafting])
        return self.tokens(size) * truth(batch, 1) / float(seconds)


NGRAM, SUFFIX = Drafts("ngram", 0.35, 0.75), Drafts("suffix", 0.95, 0.5)


def replayed(
    proposers: Sequence[Drafts], n: int = 60, seed: int = 0, sizes: Sequence[int] = SIZES, **about: Any
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "about": {
            "model": "m", "model_sha256": "m" * 64, "traffic": "t.jsonl", "traffic_sha256": "t",
            "conversations": n, "response_tokens": 1000, "seed": 0, "engine": "vllm",
            "processor": "a processor", "device": "cpu", **about,
        },
        "traffic": {"requests": n, "mean_context": 400.0},
        "proposers": {
            p.name: {
                "config": {"proposer": p.name, "options": {}, "num_speculative_tokens": SIZES[-1]},
                "trees": False,
                "concurrency": 32,
                "notes": [],
                "drafting": {"seconds": 1e-7 * n, "steps": n, "requests": n},
                "by_tag": {},
                "by_request": p.by_request(n, rng, sizes),
            }
            for p in proposers
        },
    }  # fmt: skip


def replays(proposers: Sequence[Drafts], n: int = 60, seed: int = 0, **about: Any) -> Replays:
    return gather([json.loads(json.dumps(replayed(proposers, n, seed, **about)))])


def chosen(at: AtConcurrency) -> Any:
    return next(o for o in at.options if o.method == at.choice)


# ------------------------------------------------------------------------------------------- what pays


def test_the_right_method_and_draft_length_at_each_concurrency() -> None:
    found = recommend(replays([NGRAM, SUFFIX], 200), step_times(read_weights), (1, 4, 8, 12, 32))
    true = {
        n: {(p.name, s): p.speed_up(read_weights, n, s) for p in (NGRAM, SUFFIX) for s in SIZES}
        for n in (1, 4, 8, 12, 32)
    }
    for at in found.at:
        best = max(true[at.concurrency].values())
        if best < 1:
            assert at.choice == NONE
            continue
        o = chosen(at)
        assert true[at.concurrency][o.method, o.draft_tokens] > 0.96 * best
        assert o.speed_up.value == pytest.approx(best, rel=0.08)
        assert o.speed_up.low < true[at.concurrency][o.method, o.draft_tokens] < o.speed_up.high
        plain = next(p for p in at.options if p.method == NONE)
        ratio = o.tokens_per_second.value / plain.tokens_per_second.value
        assert ratio == pytest.approx(o.speed_up.value)
    # One that drafts always while steps are free, one that drafts when it is likely where they are not.
    assert [found.at[i].choice for i in (0, 1, 3, 4)] == ["suffix", "suffix", "ngram", NONE]
    lengths = [chosen(at).draft_tokens for at in found.at]
    assert lengths[0] >= 5
    assert lengths[2] <= lengths[1]
    assert [at.bound for at in found.at] == ["latency", "latency", "both", "both", "throughput"]


def test_where_each_stops_paying() -> None:
    weak = Drafts("suffix", 1.0, 0.3)
    times = step_times(read_weights, batches=(1, 2, 4, 8, 12, 16, 20, 24, 32))
    found = recommend(replays([weak, NGRAM], 300), times, (1,), draws=300)
    crossover = next(c for c in found.crossovers if c.method == "suffix")
    gains = [max(weak.speed_up(read_weights, n, s) for s in SIZES) for n in range(1, 33)]
    truth = next(n for n, s in enumerate(gains, 1) if s <= 1)
    assert 1 < truth < 30
    assert crossover.expected_from is not None
    assert abs(crossover.expected_from - truth) <= 2
    assert crossover.not_sure_from is not None
    assert crossover.sure_from is not None
    assert crossover.not_sure_from <= crossover.expected_from <= crossover.sure_from
    assert (crossover.curve[0][0], crossover.curve[-1][0]) == (1, 32)
    assert crossover.curve[0][2].value == pytest.approx(gains[0], rel=0.05)
    told = list(report.crossings(found))
    assert f"suffix pays for sure below {crossover.not_sure_from} requests" in told[0]


def test_none_where_nothing_pays_and_not_where_verification_is_free() -> None:
    poor = Drafts("ngram", 0.6, 0.3)
    nothing = recommend(replays([poor], 100), step_times(compute), (1, 8, 32))
    assert [at.choice for at in nothing.at] == [NONE] * 3
    assert all(at.options[0].method == NONE and at.started is None for at in nothing.at)
    assert [at.options[1].verdict for at in nothing.at] == ["does not pay"] * 3
    assert "Nothing pays" in " ".join(nothing.at[0].reasons)
    assert nothing.crossovers[0].sure_from == 1
    # The control: the same drafts.
    gain = recommend(replays([poor], 100), step_times(free), (1, 8, 32))
    assert [at.choice for at in gain.at] == ["ngram"] * 3
    assert gain.crossovers[0].not_sure_from is None
    assert gain.at[-1].options[0].draft_tokens == SIZES[-1] or gain.at[-1].options[0].speed_up.value > 1.1


def test_time_for_drafting_counts() -> None:
    slow = replayed([SUFFIX], 100)
    slow["proposers"]["suffix"]["drafting"] = {"seconds": 100 * 12e-3, "steps": 10, "requests": 100}
    found = recommend(gather([slow]), step_times(free), (1, 4))
    quick = recommend(replays([SUFFIX], 100), step_times(free), (1, 4))
    plain = found.at[0].plain_step.value
    for at, other, drafting in zip(found.at, quick.at, (12e-3, 48e-3), strict=True):
        o, q = (next(o for o in a.options if o.method == "suffix") for a in (at, other))
        assert o.draft_seconds == pytest.approx(drafting)
        assert o.speed_up.value == pytest.approx(q.speed_up.value * plain / (plain + drafting), rel=0.05)
    assert found.at[1].choice == NONE
    unknown = replayed([SUFFIX], 100)
    del unknown["proposers"]["suffix"]["drafting"]
    told = recommend(gather([unknown]), step_times(free), (4,))
    assert told.at[0].options[0].draft_seconds is None
    assert any("not known for suffix, and taken as 0" in note for note in told.notes)


def test_a_model_drafts_for_all_requests_at_once() -> None:
    data = replayed([Drafts("eagle3", 1.0, 0.7)])
    data["proposers"]["eagle3"]["drafting"] = {"seconds": 0.8, "steps": 100, "requests": 800}
    c = {c.draft_tokens: c for c in gather([data]).candidates}
    assert [c[6].draft_seconds(n) for n in (1, 8, 16)] == pytest.approx([8e-3, 8e-3, 16e-3])
    assert c[3].draft_seconds(8) == pytest.approx(4e-3)  # a forward for each draft token
    there = step_times(free)
    gpu = there.setting.model_copy(update={"hardware": {"gpus": ["a GPU"]}})
    found = recommend(gather([data]), there.model_copy(update={"setting": gpu}), (8,), curve=False)
    assert found.at[0].options[0].draft_seconds is None
    assert any("which says nothing of a GPU" in note for note in found.notes)


def test_batches_in_which_some_draft() -> None:
    """The mean step is that over batches, not that of the mean batch; and padded engines have other ones."""
    ragged = Steps(step_times(read_weights, noise=0), 4, 400, 6)
    p, m = np.array(0.3), np.array(6.0)
    rng = np.random.default_rng(0)
    k = rng.binomial(4, 0.3, 100_000)
    mean, idle, _ = ragged.mean(p, m, 6)
    times = np.array([read_weights(4, 1 + i * 6 / 4) for i in range(5)])
    assert float(mean) == pytest.approx(times[k].mean(), rel=0.01)
    assert float(idle) == pytest.approx(0.7**4 * read_weights(4, 1), rel=0.01)
    padded = Steps(step_times(read_weights, noise=0, engine="transformers"), 4, 400, 6)
    widest = np.where(k > 0, read_weights(4, 7), read_weights(4, 1)).mean()
    assert float(padded.mean(p, m, 6)[0]) == pytest.approx(widest, rel=0.01)
    many = Steps(step_times(read_weights, noise=0), 32, 400, 6)
    k = rng.binomial(32, 0.3, 20_000)
    exact = np.mean([read_weights(32, 1 + i * 6 / 32) for i in k])
    assert float(many.mean(p, m, 6)[0]) == pytest.approx(exact, rel=0.02)


# ------------------------------------------------------------------------------------------- certainty


def held(n: int, noise: float, by_steps: bool = False, trials: int = 200) -> float:
    """How often the interval holds the true speed-up."""
    drafts, size, batch = Drafts("suffix", 1.0, 0.5, spread=3.0), 4, 8
    truth = drafts.speed_up(read_weights, batch, size)
    hits = 0
    for trial in range(trials):
        times = step_times(read_weights, noise, trial, batches=(batch, 16), widths=(1, 1 + size))
        data = replayed([drafts], n, trial, (size,))
        rows = data["proposers"]["suffix"]["by_request"][0]
        data["proposers"]["suffix"]["by_request"] = [_by_steps(rows, trial) if by_steps else rows]
        if by_steps:
            data["traffic"]["requests"] = len(data["proposers"]["suffix"]["by_request"][0]["steps"])
        found = SpeedUps(gather([data]), times, draws=300, seed=trial).at(batch)
        hits += bool(found.low[0] <= truth <= found.high[0])
    return hits / trials


def _by_steps(rows: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Each step as if it were a request."""
    rng, accepted = np.random.default_rng(seed), []
    for total, steps in zip(rows["accepted_tokens"], rows["steps"], strict=True):
        accepted += rng.multinomial(total, np.full(steps, 1 / steps)).tolist()
    ones = [1] * len(accepted)
    return {
        "draft_tokens": rows["draft_tokens"],
        "steps": ones,
        "drafts": ones,
        "drafted_tokens": [rows["draft_tokens"]] * len(ones),
        "accepted_tokens": accepted,
    }


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    assert 0.90 <= held(40, 0.02) <= 1.0


def test_intervals_hold_it_where_step_times_are_noisy() -> None:
    assert 0.90 <= held(300, 0.5, trials=100) <= 1.0


def test_intervals_over_steps_would_be_too_narrow() -> None:
    assert held(40, 0.02, by_steps=True, trials=100) < 0.85


def test_two_methods_are_compared_on_the_same_requests() -> None:
    """Their intervals overlap, and yet one is known to be faster: requests that suit one suit the other."""
    data = replayed([Drafts("suffix", 1.0, 0.4, spread=2.0)], 60, sizes=(2,))
    rows = data["proposers"]["suffix"]["by_request"][0]
    twin = {**rows, "accepted_tokens": [int(0.8 * a) for a in rows["accepted_tokens"]]}
    data["proposers"]["ngram"] = {**data["proposers"]["suffix"], "by_request": [twin]}
    data["proposers"]["ngram"]["config"] = {"proposer": "ngram", "num_speculative_tokens": 2}
    shuffled = json.loads(json.dumps(data))
    np.random.default_rng(0).shuffle(shuffled["proposers"]["ngram"]["by_request"][0]["accepted_tokens"])
    times = step_times(read_weights)
    for of, certain in ((data, True), (shuffled, False)):
        at = recommend(gather([of]), times, (1,), curve=False).at[0]
        suffix, ngram = at.options[:2]
        assert (at.choice, ngram.method) == ("suffix", "ngram")
        assert suffix.speed_up.low is not None
        assert ngram.speed_up.high is not None
        assert ngram.speed_up.high > suffix.speed_up.low
        assert ("not certain to be faster than ngram" in " ".join(at.reasons)) != certain


def test_too_few_requests_cannot_tell_and_the_number_asked_for_would() -> None:
    drafts, batch = Drafts("suffix", 1.0, 0.42, spread=2.0), 16
    times = step_times(read_weights, noise=0.005)
    one = drafts.by_request(4000, np.random.default_rng(9), (1,))[0]
    tokens = 1 + np.array(one["accepted_tokens"]) / 40
    truth = math.log(drafts.speed_up(read_weights, batch, 1))
    # So many that four of five samples tell.
    needed = (2.8 * float(tokens.std() / tokens.mean()) / truth) ** 2
    assert 0.03 < truth < 0.25
    asked: list[int] = []
    enough: list[bool] = []
    too_few: list[bool] = []
    for trial in range(30):
        data = replayed([drafts], 12, trial, (1,))
        at = recommend(gather([data]), times, (batch,), curve=False, draws=400).at[0]
        o = next(o for o in at.options if o.method == "suffix")
        if o.verdict != CANNOT_TELL:
            continue
        assert o.more_requests is not None
        assert at.choice == CANNOT_TELL or o.speed_up.value <= 1
        asked.append(12 + o.more_requests)
        for n, told in ((int(needed), enough), (int(needed / 5), too_few)):
            more = replayed([drafts], n, 1000 + trial, (1,))
            then = recommend(gather([more]), times, (batch,), curve=False, draws=400).at[0]
            told.append(next(o for o in then.options if o.method == "suffix").verdict == "pays")
    assert len(asked) > 10
    assert needed / 2.5 < float(np.median(asked)) < needed * 2.5
    assert np.mean(enough) > 0.6
    assert np.mean(too_few) < 0.5
    few = recommend(replays([SUFFIX], 3), times, (1,))
    assert few.at[0].choice == CANNOT_TELL
    assert few.at[0].options[0].speed_up.low is None
    assert few.at[0].options[0].more_requests == 27
    assert "3 requests are few" in " ".join(few.notes)


def test_step_times_that_are_not_known_are_not_asked_of_requests() -> None:
    rng = np.random.default_rng(0)
    noisy = step_times(read_weights, noise=0.001)
    cells = [
        c.model_copy(update={"seconds": (rng.lognormal(0, 1.0, 9) * c.median).tolist()}) for c in noisy.cells
    ]
    data = replayed([Drafts("suffix", 1.0, 0.1, spread=200)], 200, sizes=(1,))
    at = recommend(gather([data]), StepTimes.of(noisy.setting, cells), (1,), curve=False).at[0]
    o = next(o for o in at.options if o.method == "suffix")
    assert o.verdict == CANNOT_TELL
    assert o.more_requests is None
    assert "calibrate this batch size" in o.lacks


# --------------------------------------------------------------------------------------------- effort


def test_of_equal_gains_the_one_that_takes_less() -> None:
    twin = Drafts("eagle3", SUFFIX.share, SUFFIX.rate)
    at = recommend(replays([twin, SUFFIX], 200, seed=3), step_times(read_weights), (1,), curve=False).at[0]
    by_name = {o.method: o for o in at.options}
    assert abs(math.log(by_name["eagle3"].speed_up.value / by_name["suffix"].speed_up.value)) < math.log(1.03)
    assert at.choice == "suffix"
    if by_name["eagle3"].speed_up.value > by_name["suffix"].speed_up.value:
        assert by_name["suffix"].instead_of == "eagle3"
        assert any("eagle3 gains no more than 3 % more" in r for r in at.reasons)
    better = Drafts("eagle3", 1.0, 0.7)
    at = recommend(replays([better, SUFFIX], 200), step_times(read_weights), (1,), curve=False).at[0]
    assert at.choice == "eagle3"
    # Within 3 % of it, plain decoding needs no flag at all.
    barely, sure = at.options[0], Interval(value=1.02, low=1.01, high=1.03)
    plain = next(o for o in at.options if o.method == NONE)
    assert rank([barely.model_copy(update={"speed_up": sure}), plain])[0].method == NONE


def test_effort_is_data() -> None:
    assert (
        effort_of({"proposer": "combine", "options": {"proposers": ["suffix", {"name": "eagle"}]}}).rank == 3
    )
    assert effort_of({"proposer": "combine"}) == EFFORTS["suffix"]
    assert effort_of({"proposer": "acme"}).rank == 2
    about = {"model_type": "qwen3", "vocab_size": 151936, "num_layers": 36, "hidden_size": 4096}
    found = small_model(about)
    assert found is not None
    assert found.name == "Qwen3-0.6B"
    assert small_model({**about, "num_layers": 28, "hidden_size": 1024}) is None
    assert small_model({**about, "vocab_size": 5}) is None
    assert small_model({}) is None


def test_what_a_careful_engineer_would_say() -> None:
    family = {"model_type": "qwen3", "vocab_size": 151936, "num_layers": 36, "hidden_size": 4096}
    data = replayed([NGRAM], 100, **family)
    data["proposers"]["ngram"]["by_tag"] = {
        tag: {"by_size": [{"acceptance_length": e}]} for tag, e in (("code", 2.4), ("chat", 1.1))
    }
    found = recommend(gather([data]), step_times(read_weights), (1, 32))
    words = " ".join(found.reasons)
    assert "Qwen3-0.6B" in words
    assert "At 1 a head that is not there yet would have to give" in words
    assert "worth an attempt" in words
    assert "no head can" in words or "not worth training for" in words
    assert "ngram gives 2.40 tokens a step for code, and 1.10 for chat" in words
    assert "After an update of the target, for ngram: replay new responses" in words
    assert "Time to the first token stays as it is" in words
    assert "Latency-bound at 1" in found.at[0].reasons[0]
    assert "Throughput-bound at 32" in found.at[1].reasons[0]
    with_head = recommend(replays([NGRAM, Drafts("eagle3", 1, 0.6)], 50), step_times(read_weights), (1,))
    assert "head that is not there" not in " ".join(with_head.reasons)


# ---------------------------------------------------------------------------------- input and refusals


def test_replays_are_of_the_same_requests() -> None:
    one, other = replayed([NGRAM]), replayed([SUFFIX])
    together = gather([one, other])
    assert {c.method for c in together.candidates} == {"ngram", "suffix"}
    other["about"]["traffic_sha256"] = "u"
    with pytest.raises(ConfigError, match=r"about\.traffic_sha256: 'u' in 'replay 2', 't' in 'replay 1'"):
        gather([one, other])
    with pytest.raises(ConfigError, match="'replay 1' is not what this version"):
        gather([{"about": {}, "proposers": {"x": {}}}])
    with pytest.raises(ConfigError, match="none is given"):
        gather([])


def test_lengths_and_concurrencies_of_one_method_come_together() -> None:
    parts = []
    for size, concurrency in ((2, 4), (4, 4), (4, 32)):
        data = replayed([Drafts("lookahead", 1.0, 0.5)], 60, size + concurrency, (size,))
        data["proposers"]["lookahead"]["config"]["num_speculative_tokens"] = size
        data["proposers"]["lookahead"]["concurrency"] = concurrency
        parts.append(data)
    together = gather(parts)
    assert {c.method for c in together.candidates} == {"lookahead"}
    chosen_at = [[together.candidates[i] for i in together.at(n)] for n in (2, 64)]
    assert [[(c.draft_tokens, c.concurrency) for c in at] for at in chosen_at] == [
        [(2, 4), (4, 4)], [(2, 4), (4, 32)],
    ]  # fmt: skip
    other = replayed([Drafts("lookahead", 1.0, 0.5)])
    other["proposers"]["lookahead"]["config"]["options"] = {"window": 4}
    assert {c.method for c in gather([*parts, other]).candidates} == {"lookahead", "lookahead'"}


def test_the_traffics_own_concurrency_is_the_default() -> None:
    data = replayed([NGRAM, SUFFIX], 100)
    data["traffic"]["concurrency_deciles"] = [1, 1, 1, 2, 2, 4, 4, 8, 8, 30]
    found = recommend(gather([data]), step_times(read_weights))
    assert [at.concurrency for at in found.at] == [1, 2, 4, 8, 30]
    assert found.overall is not None
    assert found.overall.choice in ("ngram", "suffix")
    method, size, speed_up = found.overall.options[0]
    drafts = {"ngram": NGRAM, "suffix": SUFFIX}[method]
    truth = 1 / np.mean(
        [1 / drafts.speed_up(read_weights, n, size) for n in data["traffic"]["concurrency_deciles"]]
    )
    assert speed_up.value == pytest.approx(truth, rel=0.05)
    assert "1 to 30 requests at once" in next(report.overall(found))
    assert [at.concurrency for at in recommend(replays([NGRAM]), step_times(free), curve=False).at] == [
        *BATCHES
    ]
    assert recommend(gather([data]), step_times(free), (4,), curve=False).overall is None


def test_refusals_name_the_fix() -> None:
    times = step_times(read_weights)
    with pytest.raises(ConfigError, match="digest xxxxxxxxxxxx was replayed, and one with mmmmmmmmmmmm"):
        recommend(replays([NGRAM], model_sha256="x" * 64), times, (1,))
    with pytest.raises(ConfigError, match=r"concurrency 64: batch 64 is out .*--batch-sizes"):
        recommend(replays([NGRAM]), times, (64,))
    with pytest.raises(ConfigError, match="give numbers from 1"):
        recommend(replays([NGRAM]), times, (0,))
    far = replayed([NGRAM])
    far["traffic"]["mean_context"] = 9000.0
    with pytest.raises(ConfigError, match=r"context 9000 is out .*--context"):
        recommend(gather([far]), times, (1,))
    trees = replayed([SUFFIX])
    trees["proposers"]["suffix"]["trees"] = True
    with pytest.raises(ConfigError, match="suffix drafted trees, and vllm verifies chains"):
        recommend(gather([trees]), times, (1,))
    long = replayed([NGRAM], sizes=(6,))
    long["proposers"]["ngram"]["by_request"][0]["draft_tokens"] = 20
    with pytest.raises(ConfigError, match="none of those replayed was calibrated at 1 requests"):
        recommend(gather([long]), times, (1,))
    unknown = recommend(replays([NGRAM], model_sha256=None, engine="transformers"), times, (36,), curve=False)
    assert "The replay had no weights" in " ".join(unknown.notes)
    assert "replay with --engine vllm" in " ".join(unknown.notes)
    assert "At 36 requests, some step times lie beyond" in " ".join(unknown.notes)


def test_drafts_that_were_not_calibrated_are_left_out_and_told() -> None:
    data = replayed([SUFFIX], 100)
    more = dict(data["proposers"]["suffix"]["by_request"][-1], draft_tokens=12)
    data["proposers"]["suffix"]["by_request"].append(more)
    found = recommend(gather([data]), step_times(read_weights), (1,), curve=False)
    assert found.at[0].options[0].draft_tokens <= 8
    assert any("drafts of 12 tokens or more were not calibrated" in note for note in found.notes)


# ------------------------------------------------------------------------------------ what comes of it


def test_flags_can_be_pasted() -> None:
    found = recommend(replays([NGRAM], 100), step_times(free), (1,), curve=False)
    at = found.at[0]
    assert at.started is not None
    line = report.pasted(at.started, "vllm", "m")[-1]
    assert shlex.split(line) == at.started.flags == prepare("vllm", at.started.config).flags
    assert json.loads(at.started.flags[-1])["num_speculative_tokens"] == at.options[0].draft_tokens
    served = CliRunner().invoke(
        app, ["serve", "vllm", "m", "--dry-run", "--spec", json.dumps(dict(at.started.config))]
    )
    assert served.exit_code == 0
    assert shlex.join(at.started.flags) in served.output
    embedded = recommend(replays([NGRAM], 100), step_times(free, engine="transformers"), (1,), curve=False)
    assert embedded.at[0].started is not None
    words = shlex.split(report.pasted(embedded.at[0].started, "transformers", "m")[0])
    assert words[:3] == ["spec-plugins", "generate", "m"]
    assert json.loads(words[-1])["proposer"] == "ngram"


def test_times_of_an_engine_that_is_not_known_here() -> None:
    """As a package with an adapter of its own may measure: taken for one that pads nothing, without flags."""
    at = recommend(replays([NGRAM], 100), step_times(free, engine="toy"), (1, 8), curve=False).at[0]
    assert at.choice == "ngram"
    assert at.started is not None
    assert not at.started.flags


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_text(json.dumps(replayed([NGRAM, SUFFIX])))
    found = recommend(read_replays([tmp_path]), step_times(read_weights), (1, 32))
    names = [path.name for path in report.write(found, tmp_path / "out")]
    assert names == ["recommendation.json", "recommendation.md"]
    text = (tmp_path / "out" / "recommendation.json").read_text()
    assert Recommendation.model_validate_json(text) == found
    words = (tmp_path / "out" / "recommendation.md").read_text()
    for part in (
        "## 1 request at once: suffix with",
        "| none | - | 1.00",
        "## Where it stops",
        "--speculative",
    ):
        assert part in words
    with pytest.raises(ConfigError, match="cannot be read"):
        read_replays([tmp_path / "out" / "recommendation.md"])


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "replay.json").write_text(json.dumps(replayed([NGRAM, SUFFIX])))
    times = tmp_path / "times.json"
    times.write_text(step_times(read_weights).model_dump_json())
    arguments = ["recommend", str(tmp_path), "--times", str(times)]
    done = CliRunner().invoke(app, [*arguments, "--concurrency", "1,32", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "→ suffix" in done.output
    assert "1 request at once: suffix with" in done.output
    assert (tmp_path / "out" / "recommendation.md").exists()
    as_json = CliRunner().invoke(app, [*arguments, "--concurrency", "4", "--json"])
    assert Recommendation.model_validate_json(as_json.stdout).at[0].concurrency == 4
    for wrong, message in (("1,x", "--concurrency: '1,x'"), ("99", "concurrency 99: batch 99 is out")):
        failed = CliRunner().invoke(app, [*arguments, "--concurrency", wrong])
        assert failed.exit_code == 2
        assert message in " ".join(failed.output.split())
    times.write_text("{}")
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 2
    assert "what `spec-plugins calibrate --out` wrote" in " ".join(failed.output.split())


def test_replay_calibrate_recommend(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real commands, in the embedded engine."""
    monkeypatch.setenv("SPEC_PLUGINS_CACHE", str(tmp_path / "cache"))
    traffic = tmp_path / "traffic.jsonl"
    lines = write_traffic(traffic, seconds=3.0)
    model, times = str(tiny_model_dir), str(tmp_path / "times.json")
    for arguments in (
        ["replay", model, "--traffic", str(traffic), "--spec",
         '{"proposer": "ngram", "num_speculative_tokens": 4}', "--out", str(tmp_path)],
        ["calibrate", model, "--batch-sizes", "1,3", "--draft-tokens", "0,2,4", "--context", "32,64",
         "--steps", "10", "--out", times],
        ["recommend", str(tmp_path), "--times", times, "--out", str(tmp_path)],
    ):  # fmt: skip
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, f"{arguments}\n{done.output}\n{done.exception!r}"
    found = Recommendation.model_validate_json((tmp_path / "recommendation.json").read_text())
    assert [at.concurrency for at in found.at] == [1, 2, 3]
    assert found.overall is not None
    whole = json.loads((tmp_path / "replay.json").read_text())
    lengths = {
        s["draft_tokens"]: s["acceptance_length"] for s in whole["proposers"]["ngram"]["all"]["by_size"]
    }
    for at in found.at:
        o = next(o for o in at.options if o.method == "ngram")
        assert o.tokens_per_step.value == pytest.approx(lengths[o.draft_tokens])
        assert o.draft_seconds is not None
        assert 0 < o.draft_seconds < 1e-2
    assert found.about["model_sha256"] == found.setting.model
    tokens = [(12 + i + 1) for line in lines for i in range(len(line["token_ids"]) - 1)]
    assert found.mean_context == pytest.approx(np.mean(tokens))
