"""Lookahead's pool, its window, and both together against a target that is a table."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from spec_plugins import Need, Step, Target
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.proposer import IntArray, Packed
from spec_plugins.proposers.lookahead import LookaheadProposer
from spec_plugins.trees import node_depths

VOCAB = 50


class Target2:
    """Says what follows the last two tokens: a permutation, so that texts neither stop nor soon repeat."""

    def __init__(self, seed: int) -> None:
        self.table = np.random.default_rng(seed).integers(0, VOCAB, (VOCAB, VOCAB))

    def next(self, tokens: list[int]) -> int:
        return int(self.table[tokens[-2], tokens[-1]])

    def text(self, prompt: list[int], n: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(self.next(tokens))
        return tokens[len(prompt) :]


def run(
    target: Any, prompt: list[int], n: int, provides: frozenset[Need], nodes: int = 40, **options: Any
) -> tuple[list[int], Driver]:
    """Greedy decoding with the proposer, a host in a few lines."""
    proposer = LookaheadProposer(**options)
    proposer.name = "lookahead"
    driver = Driver(
        proposer,
        Target(VOCAB, 4096, 1, provides, num_speculative_tokens=8, max_draft_nodes=nodes),
        Config(num_speculative_tokens=8, max_draft_nodes=nodes),
    )
    tokens, row = list(prompt), np.zeros(1, np.int32)
    predictions: list[int] = []
    while len(tokens) < len(prompt) + n:
        drafts = driver.propose(
            ["r"], np.array([tokens], np.int32), row, np.array([len(tokens)], np.int32),
            predictions=Packed(np.array(predictions, np.int32), np.array([0, len(predictions)], np.int32))
            if Need.PREDICTIONS in provides else None,
        )  # fmt: skip
        draft = drafts[0]
        parents = draft.parents if draft.parents is not None else np.arange(-1, len(draft) - 1)
        paths = [tokens]
        for j in range(len(draft)):
            paths.append([*paths[parents[j] + 1], int(draft.tokens[j])])
        predictions = [target.next(path) for path in paths]
        at, accepted = -1, []
        while True:
            follow = [
                j for j in range(len(draft)) if parents[j] == at and draft.tokens[j] == predictions[at + 1]
            ]
            if not follow:
                break
            at = follow[0]
            accepted.append(at)
        tokens = [*paths[at + 1], predictions[at + 1]]
        path = np.full((1, 8), -1, np.int32)
        path[0, : len(accepted)] = accepted
        driver.observe(["r"], np.array([len(accepted)], np.int32), path)
    assert not driver.statistics.faults
    return tokens[len(prompt) : len(prompt) + n], driver


ALL = frozenset({Need.TREES, Need.PREDICTIONS})
HOSTS = [ALL, frozenset({Need.TREES}), frozenset({Need.PREDICTIONS}), frozenset[Need]()]


@pytest.mark.parametrize("provides", HOSTS)
@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 4, 4), (0, 3, 1), (7, 2, 3), (2, 6, 2)])
def test_output_is_the_targets(provides: frozenset[Need], window: int, ngram: int, guesses: int) -> None:
    target = Target2(1)
    prompt = [3, 1, 4, 1, 5]
    got, _ = run(target, prompt, 200, provides, window=window, ngram=ngram, guesses=guesses)
    assert got == target.text(prompt, 200)


def test_the_window_finds_what_no_text_holds() -> None:
    """On text without repetition only the window can be right: that is what it is for."""

    class Counting:
        def next(self, tokens: list[int]) -> int:
            # Depends on the last token alone, so that Jacobi iterations converge.
            return (tokens[-1] * 5 + 11) % 47

    prompt = [5, 46]
    n = 40  # less than the period
    with_window, driver = run(Counting(), prompt, n, ALL)
    without, plain = run(Counting(), prompt, n, ALL, window=0)
    assert with_window == without
    assert plain.statistics.acceptance_length < 1.1
    assert driver.statistics.acceptance_length > 1.5
    sources = driver.statistics.by_source
    assert set(sources) == {"lookahead:guesses", "lookahead:window"}


def test_predictions_at_rejected_tokens_help_chains() -> None:
    target = Target2(4)
    prompt = [3, 1]
    _, bare = run(target, prompt, 600, frozenset())
    _, told = run(target, prompt, 600, frozenset({Need.PREDICTIONS}))
    assert told.statistics.accepted_tokens >= bare.statistics.accepted_tokens > 0


def first_draft(proposer: LookaheadProposer, tokens: list[int], budget: int, depth: int) -> Any:
    one = np.ones(1, np.int32)
    return proposer.propose(
        Step(["a"], np.array([tokens], np.int32), 0 * one, one * len(tokens), one * len(tokens), one * budget,
             one * depth, one)
    )[0]  # fmt: skip


@pytest.mark.parametrize(("budget", "depth"), list(itertools.product((0, 1, 5, 17, 64), (0, 1, 3, 9))))
def test_drafts_keep_to_budget_and_depth(budget: int, depth: int) -> None:
    proposer = LookaheadProposer(window=5, ngram=4, guesses=3)
    proposer.load(Target(VOCAB, 512, 1, ALL))
    draft = first_draft(proposer, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 4, 4, 1], budget, depth)
    assert len(draft) <= budget
    depths = node_depths(draft.parents[None], np.array([len(draft)], np.int32))
    assert depths.max(initial=0) <= depth
    pairs = set(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    assert len(pairs) == len(draft), "siblings must differ"


def test_newest_guess_first_and_as_many_as_kept() -> None:
    proposer = LookaheadProposer(window=0, ngram=3, guesses=2)
    proposer.load(Target(VOCAB, 512, 1, ALL))
    draft = first_draft(proposer, [1, 2, 3, 1, 4, 5, 1, 6, 7, 1], 16, 8)
    assert draft.tokens.tolist() == [6, 7, 4, 5]
    assert draft.parents.tolist() == [-1, 0, -1, 2]


def test_chains_go_on_from_guess_to_guess() -> None:
    proposer = LookaheadProposer(ngram=3)
    proposer.load(Target(VOCAB, 512, 1, frozenset()))
    draft = first_draft(proposer, [1, 2, 3, 4, 5, 6, 1], 5, 5)
    assert draft.parents is None
    assert draft.tokens.tolist() == [2, 3, 4, 5, 6]


def test_the_pool_is_bounded_and_given_back() -> None:
    proposer = LookaheadProposer(pool_sets=16)
    proposer.load(Target(VOCAB, 512, 1, ALL))
    tokens: IntArray = np.random.default_rng(0).integers(0, VOCAB, 5000).astype(np.int32)
    first_draft(proposer, tokens[:20].tolist(), 8, 8)
    size = proposer.gauges()["pool_bytes"]
    first_draft(proposer, tokens.tolist(), 8, 8)
    assert proposer.gauges()["pool_bytes"] == size
    proposer.finish("a")
    proposer.finish("a")
    assert proposer.gauges() == {"requests": 0, "pool_bytes": 0}
