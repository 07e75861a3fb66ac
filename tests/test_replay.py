"""Replay counts what an engine would; from one pass for every draft length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_plugins import ConfigError, Draft, Need, Proposer, Step, UnsupportedError
from spec_plugins.config import Config, Containment, load_config
from spec_plugins.driver import Driver
from spec_plugins.evaluation import replay_report
from spec_plugins.evaluation.intervals import ratio_intervals
from spec_plugins.evaluation.recorded import Recorded, bring_together
from spec_plugins.evaluation.replay import Replayed, replay
from spec_plugins.evaluation.replay_target import ReplayTarget
from spec_plugins.proposer import IntArray
from spec_plugins.traffic.conversations import Conversation
from spec_plugins.traffic.record import Record

VOCAB = 30
CHAINS = frozenset[Need]()
TREES = frozenset({Need.TREES})
TARGET = ReplayTarget(VOCAB, 512)


def texts(n: int = 24, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts and responses that repeat themselves and each other now and then, from 1 token long."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, VOCAB, 6).tolist() for _ in range(6)]
    made = []
    for i in range(n):
        words = [phrases[rng.integers(6)][rng.integers(3) :] for _ in range(30)]
        text = [t for word in words for t in word if rng.random() > 0.05]
        prompt = int(rng.integers(1, 30))
        made.append((text[:prompt], text[prompt : prompt + (1 if i == 5 else int(rng.integers(2, 70)))]))
    return made


def record(pairs: Sequence[tuple[list[int], list[int]]], stopped: bool = False, **about: Any) -> Recorded:
    """Responses that were cut by their length, or ended by the target."""
    made = []
    for line, (prompt, said) in enumerate(pairs, 1):
        tokens = np.array([*prompt, *said], np.int32)
        answered = np.arange(len(tokens)) >= len(prompt)
        made.append(
            Conversation(tokens, answered, Record(line, tags=("a", "b")[line % 2 :][:1], **about), stopped)
        )
    return bring_together(made, 512)


def engine(
    pairs: Sequence[tuple[list[int], list[int]]], config: Config, trees: bool, most: int | None = None
) -> Any:
    """Statistics of one request after the other, each drafted for and verified step by step; ``most``: what
    an engine lets a response have, where the target ends it before."""
    from spec_plugins import Target

    proposer = config.create_proposer()
    config = config.model_copy(update={"containment": Containment(time_allowance_ms=60_000)})
    target = Target(
        VOCAB, 512, 1, TREES if trees else CHAINS, config.num_speculative_tokens, config.draft_nodes(proposer)
    )
    driver = Driver(proposer, target, config)
    for i, (prompt, said) in enumerate(pairs):
        whole, n = [*prompt, *said], len(prompt) + 1
        end = len(prompt) + (len(said) if most is None else most)
        while n < len(whole):
            draft = driver.propose(
                [f"{i}"], np.array([whole[:n]], np.int32), np.zeros(1, np.int32), np.array([n], np.int32),
                limits=np.array([end - n - 1], np.int32), prompt_lengths=np.array([len(prompt)], np.int32),
            )[0]  # fmt: skip
            parents = draft.parents if draft.parents is not None else np.arange(-1, len(draft) - 1)
            path: list[int] = []
            for j in range(len(draft)):
                follows = parents[j] == (path[-1] if path else -1)
                if follows and whole[n + len(path) :][:1] == [draft.tokens[j]]:
                    path.append(j)
            driver.observe([f"{i}"], np.array([len(path)], np.int32), np.array([path], np.int32))
            n += len(path) + 1
    return driver.statistics


def same(result: Replayed, size: int | None, statistics: Any) -> bool:
    """Whether a replay counted what an engine did."""
    counts = result.counts(size)
    depth = statistics.positions
    by_position = (
        (counts.drafted.sum(0)[:depth], statistics.drafted_by_position),
        (counts.accepted.sum(0)[:depth], statistics.accepted_by_position),
    )
    totals = counts.steps.sum(), counts.draft_tokens.sum(), counts.accepted_tokens.sum()
    return all(np.array_equal(a, b) for a, b in by_position) and totals == (
        statistics.verify_steps, statistics.draft_tokens, statistics.accepted_tokens,
    )  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {"cache_tokens": 0},
    "combine": {"proposers": [{"name": "ngram", "options": {"min_ngram": 3}}, "ngram"]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_pass_tells_of_every_draft_length(name: str) -> None:
    pairs = texts()
    longest = load_config({"proposer": name, "options": OPTIONS[name], "num_speculative_tokens": 6})
    result = replay(record(pairs), longest, TARGET, provides=CHAINS)
    assert (result.mode, result.sizes, result.trees) == ("positions", (1, 2, 3, 4, 5, 6), False)
    found = {
        k: engine(pairs, longest.model_copy(update={"num_speculative_tokens": k}), False)
        for k in (1, 2, 4, 6)
    }
    assert all(same(result, k, statistics) for k, statistics in found.items())
    assert found[6].accepted_tokens > 100
    # Not so with another length, or other responses.
    assert not same(result, 3, found[4])
    altered = [(prompt, said[: len(said) // 2][::-1] + said[len(said) // 2 :]) for prompt, said in pairs]
    assert not same(replay(record(altered), longest, TARGET, provides=CHAINS), 6, found[6])


def test_one_pass_tells_of_every_size_of_a_tree() -> None:
    pairs = texts()
    spec = {"proposer": "suffix", "options": {"cache_tokens": 0}, "num_speculative_tokens": 5}
    result = replay(record(pairs), load_config({**spec, "max_draft_nodes": 12}), TARGET, provides=TREES)
    assert (result.sizes, result.trees) == (tuple(range(1, 13)), True)
    for nodes in (3, 8, 12):
        config = load_config({**spec, "max_draft_nodes": nodes, "num_speculative_tokens": min(5, nodes)})
        assert same(result, nodes, engine(pairs, config, True)), nodes
    assert result.counts(12).accepted_tokens.sum() > result.counts(3).accepted_tokens.sum()
    with pytest.raises(ConfigError, match="13 is none of 1, 2"):
        result.counts(13)


@pytest.mark.parametrize("name", ["suffix", "lookahead"])
def test_what_depends_on_steps_is_stepped_through(name: str) -> None:
    pairs = texts()
    config = load_config({"proposer": name, "num_speculative_tokens": 4})
    statistics = engine(pairs, config, False)
    stepped = replay(record(pairs), config, TARGET, mode="steps", concurrency=1, provides=CHAINS)
    assert stepped.sizes == (4,)
    assert same(stepped, None, statistics)
    assert stepped.statistics["accepted_tokens"] == statistics.accepted_tokens
    crowded = replay(record(pairs), config, TARGET, mode="steps", concurrency=8, provides=CHAINS)
    assert same(crowded, None, statistics) == (name == "lookahead")  # a cache that fills later accepts less
    if name == "lookahead":
        with pytest.raises(UnsupportedError, match="use mode 'steps'"):
            replay(record(pairs), config, TARGET, mode="positions")
    else:
        everywhere = replay(record(pairs), config, TARGET, concurrency=1, provides=CHAINS)
        assert "mode 'steps' is exact" in everywhere.exact
        near = everywhere.counts().accepted_tokens.sum() / statistics.accepted_tokens
        assert near == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("mode", ["positions", "steps"])
def test_what_is_behind_the_end_is_counted_apart(mode: Any) -> None:
    """Where the target ends a response, an engine drafts past it; no record tells what it would have said."""
    pairs, most = texts(), 80
    config = load_config({"proposer": "ngram", "num_speculative_tokens": 6})
    result = replay(record(pairs, stopped=True, max_tokens=most), config, TARGET, mode=mode, provides=CHAINS)
    statistics = engine(pairs, config, False, most)
    assert same(result, None, statistics)
    counts = result.counts()
    assert counts.past_end.sum() > 0
    cut = replay(record(pairs), config, TARGET, mode=mode, provides=CHAINS).counts()
    assert cut.past_end.sum() == 0
    assert cut.draft_tokens.sum() < counts.draft_tokens.sum()


class Sees(Proposer):
    """Drafts nothing; keeps what it is shown."""

    bounded = True
    depends_on = "text"

    def __init__(self) -> None:
        self.seen: list[tuple[int, IntArray]] = []

    def propose(self, step: Step) -> list[Draft]:
        for i in range(len(step)):
            row = step.token_ids[step.rows[i]]
            self.seen.append((int(step.lengths[i]), row.copy()))
        return [Draft(np.zeros(0, np.int32))] * len(step)


def test_no_proposer_sees_what_it_is_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [([7] * 5, list(range(20)))]
    proposer = Sees()
    monkeypatch.setattr(Config, "create_proposer", lambda self: proposer)
    result = replay(record(pairs), Config(), TARGET)
    assert [n for n, _ in proposer.seen] == list(range(6, 25))
    for n, row in proposer.seen:
        assert row[:n].tolist() == [7] * 5 + list(range(n - 5))
        assert not row[n:].any()
    assert result.sizes == (8,)  # it does not promise that drafts are nested
    assert result.counts().steps.sum() == 19


def test_faults_are_told_and_cost_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Sees):
        def propose(self, step: Step) -> list[Draft]:
            return [Draft(np.full(2, VOCAB, np.int32))] * len(step)

    monkeypatch.setattr(Config, "create_proposer", lambda self: Wrong())
    result = replay(record(texts()), Config(), TARGET)
    assert "token_out_of_range" in result.notes[0]
    assert result.counts().draft_tokens.sum() == 0


def test_sampled_responses_estimate_without_bias() -> None:
    """Tokens of a known distribution: replay's acceptance length is that of rejection sampling."""
    rng, p = np.random.default_rng(0), 0.6
    pairs = [([1, 0] * 4, rng.choice([0, 1], 300, p=[p, 1 - p]).tolist()) for _ in range(60)]

    class Zeros(Sees):
        nested = True

        def propose(self, step: Step) -> list[Draft]:
            most = np.minimum(step.budgets, step.depths)
            return [Draft(np.zeros(n, np.int32)) for n in most]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "create_proposer", lambda self: Zeros())
        result = replay(record(pairs, temperature=1.0), Config(num_speculative_tokens=4), TARGET)
    found = replay_report.figures({k: result.counts(k) for k in result.sizes}, np.arange(60))
    for size in found["by_size"]:
        expected = sum(p**i for i in range(size["draft_tokens"] + 1))
        low, high = size["interval"]
        assert size["acceptance_length"] == pytest.approx(expected, rel=0.02)
        assert low - 0.02 < expected < high + 0.02
        assert high - low < 0.15
    assert not result.notes


def test_drawn_drafts_of_sampled_responses_are_flagged() -> None:
    class Draws(Sees):
        uses = frozenset({Need.PROBABILITIES, Need.PREDICTIONS})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "create_proposer", lambda self: Draws())
        sampled = replay(record(texts(), temperature=0.7), Config(), TARGET)
        greedy = replay(
            record(texts(), temperature=0.0), Config(), TARGET, provides=frozenset({Need.PROBABILITIES})
        )
    assert "24 of 24 responses were sampled" in sampled.notes[0]
    assert "after rejected tokens" in sampled.notes[1]
    assert not greedy.notes


def test_intervals_are_those_of_scipy_and_know_that_requests_differ() -> None:
    pytest.importorskip("scipy", "1.15", reason="needs scipy 1.15: pip install 'spec-plugins[evaluate]'")
    from scipy import stats

    rng = np.random.default_rng(4)
    rates = rng.beta(2, 3, 40)  # each request has its own
    steps = rng.integers(5, 200, 40)
    accepted = rng.binomial(steps, rates)
    low, high = ratio_intervals(accepted[:, None], steps[:, None], draws=4000)
    theirs = stats.bootstrap(
        (accepted, steps), lambda a, s, axis: a.sum(axis) / s.sum(axis), paired=True, n_resamples=4000,
        vectorized=True, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert (low[0], high[0]) == pytest.approx((theirs.low, theirs.high), abs=0.006)
    naive = 2 * 1.96 * (0.4 * 0.6 / steps.sum()) ** 0.5
    assert high[0] - low[0] > 2 * naive  # one over steps would be far too narrow
    assert np.isnan(ratio_intervals(accepted[:4, None], steps[:4, None])).all()
    assert np.isnan(ratio_intervals(accepted[:, None], 0 * steps[:, None])).all()


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(5), 0
    for _ in range(200):
        steps = rng.integers(20, 200, 30)
        accepted = rng.binomial(steps, rng.beta(2, 3, 30))
        low, high = ratio_intervals(accepted[:, None], steps[:, None], draws=400)
        held += low[0] <= 0.4 <= high[0]
    assert 0.88 <= held / 200 <= 0.99


def test_figures_are_by_tag_position_and_place(tmp_path: Path) -> None:
    pairs = texts(40)
    config = load_config({"proposer": "ngram", "num_speculative_tokens": 3})
    data = replay_report.as_json({"ngram": replay(record(pairs), config, TARGET)}, {"model": "m"})
    data = json.loads(json.dumps(data, allow_nan=False))
    found = data["proposers"]["ngram"]
    whole = found["all"]
    assert [s["draft_tokens"] for s in whole["by_size"]] == [1, 2, 3]
    assert whole["steps"] == sum(tag["steps"] for tag in found["by_tag"].values())
    assert whole["steps"] == sum(place["steps"] for place in whole["by_place"])
    assert {place["from_token"] for place in whole["by_place"]} == {0, 64}
    survival = [p["survival"] for p in whole["by_position"]]
    assert survival == whole["by_size"][-1]["survival"]
    assert whole["by_size"][-1]["acceptance_length"] == pytest.approx(1 + sum(survival))
    first = whole["by_position"][0]
    assert first["acceptance_rate"] == first["accepted"] / first["drafted"]
    low, high = first["survival_interval"]
    assert low < first["survival"] < high
    names = [path.name for path in replay_report.write(data, tmp_path)]
    assert names == ["replay.json", "replay.md"]
    assert "| 20 a | ngram | 3 |" in (tmp_path / "replay.md").read_text()


def test_requests_come_in_the_order_of_their_arrival() -> None:
    pairs = [([i], [i, i + 1]) for i in range(3)]
    made = [
        Conversation(
            np.array([*p, *s], np.int32), np.array([False, True, True]), Record(i, arrived=-float(i))
        )
        for i, (p, s) in enumerate(pairs)
    ]
    assert bring_together(made).tokens.tolist() == [2, 2, 3, 1, 1, 2, 0, 0, 1]
    made[1] = Conversation(made[1].tokens, made[1].answered, Record(1))
    assert bring_together(made).tokens.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(ConfigError, match="no conversation"):
        bring_together([])
