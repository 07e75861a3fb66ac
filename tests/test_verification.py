"""Verification: filters, greedy paths, and that sampling keeps the target's distribution.

The distribution tests compare the joint distribution of the first two committed tokens with a table
of conditional distributions: Pearson's chi-squared on each of 20 seeded runs, combined by Fisher's
method. A combined p under ``ALARM`` fails. Seeds are fixed; were they not, the exact cases (some 30)
together would raise a false alarm less than once in a million runs. Broken verifiers must be caught by
the same test; with these seeds the least visible of them has p < 1e-20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spec_plugins.proposer import Draft, Drafts, Sampling
from spec_plugins.trees import pack
from spec_plugins.verification import Verdict, _sample, target_probs, verify, verify_greedy, verify_sampled

Array = npt.NDArray[Any]
Verifier = Callable[[torch.Tensor, Drafts], Verdict]

VOCAB = 6
SAMPLES = 1000
SEEDS = range(20)
ALARM = 1e-8
CHAIN = (-1, 0)
TREE = (-1, 0, -1, 0, 2, -1)
"""Three children at the root, two on the first, one on the second; not in breadth-first order."""


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def make_sampling(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    return Sampling(
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
    )


# --- target_probs ---------------------------------------------------------------------------------


@st.composite
def filtered_batches(draw: st.DrawFn) -> tuple[torch.Tensor, Sampling]:
    n, slots, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 9))
    score = st.one_of(st.integers(-3, 3).map(float), st.floats(-8, 8, width=32), st.just(-np.inf))
    logits = np.array(draw(st.lists(score, min_size=n * slots * vocab, max_size=n * slots * vocab)))
    logits = logits.reshape(n, slots, vocab).astype(np.float32)
    logits[..., draw(st.integers(0, vocab - 1))] = draw(st.floats(-8, 8, width=32))

    def each(values: st.SearchStrategy[float], dtype: type) -> Array:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    return torch.from_numpy(logits), Sampling(
        each(st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0]), np.float32),
        each(st.integers(0, vocab + 2), np.int32),
        each(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]), np.float32),
        each(st.sampled_from([0.0, 0.05, 0.3, 1.0]), np.float32),
    )


@given(filtered_batches())
@settings(max_examples=150, deadline=None)
def test_filters_are_those_of_transformers(batch: tuple[torch.Tensor, Sampling]) -> None:
    hf = pytest.importorskip("transformers")
    logits, sampling = batch
    before = logits.clone()
    probs = target_probs(logits, sampling)
    assert torch.equal(logits, before)
    assert probs.dtype == torch.float32
    for i in range(len(logits)):
        if sampling.temperature[i] == 0:
            expected = torch.nn.functional.one_hot(logits[i].argmax(-1), logits.shape[-1]).float()
        else:
            scores = hf.TemperatureLogitsWarper(float(sampling.temperature[i]))(None, logits[i])
            if sampling.top_k[i]:
                scores = hf.TopKLogitsWarper(int(sampling.top_k[i]))(None, scores)
            if sampling.top_p[i] < 1:
                scores = hf.TopPLogitsWarper(float(sampling.top_p[i]))(None, scores)
            if sampling.min_p[i]:
                scores = hf.MinPLogitsWarper(float(sampling.min_p[i]))(None, scores)
            expected = scores.softmax(-1)
        assert torch.equal(probs[i], expected)


def test_filters_work_in_float32_on_half_precision_and_on_any_rank() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampling = make_sampling(3, 0.8, 20, 0.9, 0.01)
    probs = target_probs(logits, sampling)
    assert torch.equal(probs, target_probs(logits.float()[:, None], sampling)[:, 0])
    assert target_probs(logits, Sampling.greedy(3)).dtype == torch.float32


# --- random drafts --------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn, vocab: int = 4) -> Draft:
    """A tree with distinct siblings, or a chain, from paths put into a trie."""
    paths = draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=4), max_size=5))
    if draw(st.booleans()):
        return Draft(np.array(paths[0] if paths else [], np.int32))
    nodes: dict[tuple[int, ...], int] = {}
    for path in paths:
        for end in range(1, len(path) + 1):
            nodes.setdefault(tuple(path[:end]), len(nodes))
    return Draft(
        np.array([key[-1] for key in nodes], np.int32),
        np.array([nodes.get(k[:-1], -1) for k in nodes], np.int32),
    )


def children(draft: Draft, node: int) -> list[int]:
    if draft.parents is None:
        return [node + 1] if node + 1 < len(draft) else []
    return [j for j in range(len(draft)) if draft.parents[j] == node]


def greedy_oracle(draft: Draft, predictions: Sequence[int]) -> tuple[list[int], list[int]]:
    """Path and committed tokens, the slow way."""
    node = -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = int(predictions[node + 1])
        tokens.append(token)
        agreeing = [j for j in children(draft, node) if draft.tokens[j] == token]
        if not agreeing:
            return path, tokens
        node = agreeing[0]
        path.append(node)


def check_form(verdict: Verdict, drafts: Drafts) -> None:
    """The verdict's padding, and that each path is a path from the root with its tokens."""
    n, depth = verdict.path.shape
    assert verdict.tokens.shape == (n, depth + 1)
    assert n == len(drafts)
    assert {a.dtype for a in (verdict.accepted, verdict.path, verdict.tokens)} == {np.dtype(np.int32)}
    for i, draft in enumerate(drafts):
        m = verdict.accepted[i]
        node = -1
        for j in verdict.path[i, :m].tolist():
            assert j in children(draft, node)
            node = j
        assert (verdict.path[i, m:] == -1).all()
        assert (verdict.tokens[i, :m] == draft.tokens[verdict.path[i, :m]]).all()
        assert verdict.tokens[i, m] >= 0
        assert (verdict.tokens[i, m + 1 :] == -1).all()


# --- greedy ---------------------------------------------------------------------------------------


@given(st.lists(trees(), max_size=5), st.integers(0, 2**31), st.integers(0, 1))
@settings(max_examples=150, deadline=None)
def test_greedy_matches_the_oracle(batch: list[Draft], seed: int, spare: int) -> None:
    drafts = pack(batch)
    slots = drafts.tokens.shape[1] + 1 + spare
    predictions = np.random.default_rng(seed).integers(4, size=(len(batch), slots))
    verdict = verify_greedy(torch.from_numpy(predictions), drafts)
    check_form(verdict, drafts)
    for i, draft in enumerate(batch):
        path, tokens = greedy_oracle(draft, predictions[i].tolist())
        assert verdict.path[i, : verdict.accepted[i]].tolist() == path
        assert verdict.tokens[i, : verdict.accepted[i] + 1].tolist() == tokens
    again = verify_greedy(predictions, drafts)
    assert (again.tokens == verdict.tokens).all()

    # Sampling from one-hot distributions is the same, whatever the draft claims.
    q = torch.rand(len(batch), drafts.tokens.shape[1], 4, generator=torch.Generator().manual_seed(seed))
    q[q < 0.5] = 0
    hot = torch.nn.functional.one_hot(torch.from_numpy(predictions), 4).float()
    claims: list[torch.Tensor | None] = [
        torch.nn.functional.normalize(q[i, : len(d)], p=1, dim=-1) if i % 2 else None
        for i, d in enumerate(batch)
    ]
    sampled = verify_sampled(
        hot, Drafts(drafts.tokens, drafts.counts, drafts.parents, claims), [None] * len(batch)
    )
    assert (sampled.path == verdict.path).all()
    assert (sampled.tokens == verdict.tokens).all()


def test_greedy_takes_the_slots_it_needs_only() -> None:
    drafts = Drafts(np.array([[7, 8, 9, 9]], np.int32), np.array([2], np.int32))
    verdict = verify_greedy(np.array([[7, 8, 5]]), drafts)
    assert verdict.tokens.tolist() == [[7, 8, 5]]
    assert verdict.path.tolist() == [[0, 1]]


# --- sampled: properties --------------------------------------------------------------------------


def random_probs(generator: torch.Generator, *shape: int, zeros: float = 0.3) -> torch.Tensor:
    """Random distributions with many exact zeros."""
    weights = torch.rand(*shape, generator=generator) ** 3
    weights[torch.rand(*shape, generator=generator) < zeros] = 0
    weights[..., 0] += weights.sum(-1) == 0
    return weights / weights.sum(-1, keepdim=True)


@given(st.lists(trees(), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_committed_tokens_are_possible_and_independent_of_the_batch(batch: list[Draft], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = [
        replace(d, probs=random_probs(generator, len(d), 4)) if (seed + i) % 2 else d
        for i, d in enumerate(batch)
    ]
    drafts = pack(batch)
    probs = random_probs(generator, len(batch), drafts.tokens.shape[1] + 1, 4)
    verdict = verify_sampled(
        probs, drafts, [torch.Generator().manual_seed(seed + i) for i in range(len(batch))]
    )
    check_form(verdict, drafts)
    for i, draft in enumerate(batch):
        m = verdict.accepted[i]
        slots = [0, *(verdict.path[i, :m] + 1)]
        assert (probs[i, slots, verdict.tokens[i, : m + 1]] > 0).all()
        alone = verify_sampled(
            probs[i : i + 1, : len(draft) + 1], pack([draft]), [torch.Generator().manual_seed(seed + i)]
        )
        assert alone.accepted[0] == m
        assert (alone.tokens[0, : m + 1] == verdict.tokens[i, : m + 1]).all()


def test_impossible_draft_tokens_are_always_rejected() -> None:
    n = 2000
    probs = torch.tensor([0.0, 0.7, 0.3, 0.0]).expand(n, 5, 4)
    tokens = np.tile(np.array([0, 3, 1, 2], np.int32), (n, 1))
    parents = np.tile(np.array([-1, -1, 0, 1], np.int32), (n, 1))
    q = torch.tensor([[0.9, 0.05, 0.05, 0.0], [0.0, 0.1, 0.1, 0.8], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
    for claims in (None, [q] * n):
        verdict = verify_sampled(probs, Drafts(tokens, np.full(n, 4, np.int32), parents, claims), [None] * n)
        assert (verdict.accepted == 0).all()
        assert set(verdict.tokens[:, 0].tolist()) == {1, 2}


@pytest.mark.parametrize("claimed", [False, True])
def test_rounding_to_an_empty_residual_stays_within_the_support(claimed: bool) -> None:
    # Every possible token is a rejected sibling, because p[x] rounds to less than its share.
    p = torch.tensor([0.0, 0.25, 0.75 * (1 - 1e-2)])
    n = 5000
    tokens = np.tile(np.array([1, 2], np.int32), (n, 1))
    q = torch.stack([p, torch.tensor([0.0, 0.0, 1.0])]) * 1.01
    drafts = Drafts(
        tokens, np.full(n, 2, np.int32), np.full((n, 2), -1, np.int32), [q] * n if claimed else None
    )
    verdict = verify_sampled(p.expand(n, 3, 3), drafts, [None] * n)
    assert (verdict.accepted == 0).any()
    assert set(verdict.tokens[:, 0].tolist()) == {1, 2}


@pytest.mark.parametrize("scale", [1.0, 1 + 2.0**-20, 3.0, 1e-38])
def test_extreme_chances_hit_no_token_without_weight(scale: float) -> None:
    weights = torch.tensor([[0.0, scale / 3, 0.0, 2 * scale / 3, 0.0]]).expand(4, 5)
    chance = np.array([0.0, 2.0**-53, 1 - 2.0**-52, 1 - 2.0**-53])
    assert _sample(weights, chance).tolist() == [1, 1, 3, 3]
    assert _sample(weights[:, :4], chance).tolist() == [1, 1, 3, 3]


def test_a_repeated_sibling_is_not_tested_twice() -> None:
    n = 20000
    p = torch.tensor([0.5, 0.25, 0.25])
    drafts = Drafts(np.zeros((n, 2), np.int32), np.full(n, 2, np.int32), np.full((n, 2), -1, np.int32))
    verdict = verify_sampled(p.expand(n, 3, 3), drafts, [None] * n)
    counts = np.bincount(verdict.tokens[:, 0], minlength=3)
    assert p_value(p.numpy(), counts) > ALARM


@pytest.mark.parametrize("n", [0, 3])
def test_empty_drafts_commit_one_token(n: int) -> None:
    logits = torch.randn(n, 1, 5)
    logits[..., 2:] = -torch.inf
    for sampling in (None, make_sampling(n), make_sampling(n, 0.7, 3, 0.9, 0.1)):
        verdict = verify(logits, Drafts.empty(n), sampling)
        check_form(verdict, Drafts.empty(n))
        assert verdict.path.shape == (n, 0)
        assert (verdict.tokens < 2).all()
    wide = Drafts(np.full((n, 3), 99, np.int32), np.zeros(n, np.int32))
    assert verify(logits, wide, make_sampling(n)).tokens.shape == (n, 1)


def test_a_greedy_request_among_sampled_ones_is_greedy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 4, VOCAB, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits[..., 3] = 0.1
    tokens = logits[:, :3].argmax(-1).int().numpy()
    tokens[::4, 1] = 0
    claims = [random_probs(generator, 3, VOCAB) if i % 3 else None for i in range(400)]
    drafts = Drafts(tokens, np.full(400, 3, np.int32), None, claims)
    sampling = make_sampling(400)
    sampling.temperature[::2] = 0
    mixed, greedy = verify(logits, drafts, sampling), verify(logits, drafts)
    assert (mixed.tokens[::2] == greedy.tokens[::2]).all()
    assert (mixed.path[::2] == greedy.path[::2]).all()
    assert (mixed.tokens[1::2] != greedy.tokens[1::2]).any()


def test_the_same_generator_state_gives_the_same_tokens() -> None:
    probs = random_probs(torch.Generator().manual_seed(0), 50, 3, VOCAB)
    drafts = Drafts(np.zeros((50, 2), np.int32), np.full(50, 2, np.int32))
    runs = [
        verify_sampled(probs, drafts, [torch.Generator().manual_seed(s + i) for i in range(50)]).tokens
        for s in (0, 0, 1)
    ]
    assert (runs[0] == runs[1]).all()
    assert (runs[0] != runs[2]).any()


def test_misfits_are_refused() -> None:
    drafts = Drafts(np.array([[1, 9]], np.int32), np.array([2], np.int32))
    with pytest.raises(ValueError, match="need 3 slots"):
        verify_greedy(np.zeros((1, 2), np.int64), drafts)
    with pytest.raises(ValueError, match="1 drafts need"):
        verify_sampled(torch.ones(2, 3, 10) / 10, drafts, [None, None])
    with pytest.raises(ValueError, match=r"range\(5\)"):
        verify_sampled(torch.ones(1, 3, 5) / 5, drafts, [None])
    with pytest.raises(ValueError, match="0 generators"):
        verify_sampled(torch.ones(1, 3, 10) / 10, drafts, [])


# --- sampled: distribution ------------------------------------------------------------------------


def p_value(expected: Array, counts: Array) -> float:
    """Pearson's chi-squared; cells that expect under 10 are pooled, impossible ones must be empty."""
    expected, counts = expected.astype(np.float64).ravel(), counts.ravel()
    if counts[expected == 0].any():
        return 0.0
    expected = expected / expected.sum() * counts.sum()
    rare = (expected > 0) & (expected < 10)
    e, c = expected[expected >= 10], counts[expected >= 10]
    if expected[rare].sum() >= 10:
        e, c = np.append(e, expected[rare].sum()), np.append(c, counts[rare].sum())
    elif rare.any():
        least = e.argmin()
        e[least] += expected[rare].sum()
        c[least] += counts[rare].sum()
    return float(stats.chi2.sf(((c - e) ** 2 / e).sum(), len(e) - 1)) if len(e) > 1 else 1.0


class Speculation:
    """A target and a proposer on a small vocabulary, both tables over all prefixes of two tokens.

    Prefix ``k`` followed by token ``x`` is prefix ``k * VOCAB + x + 1``.
    """

    def __init__(
        self,
        parents: Sequence[int],
        seed: int,
        drawn: bool,
        replacement: bool = False,
        claim: Callable[[Array, Array], Array] = lambda q, plain: q,
        **filters: float,
    ) -> None:
        """
        Args:
            drawn: draw from ``q`` and say so; else take the likeliest tokens.
            replacement: draw siblings without regard to each other, while claiming otherwise.
            claim: changes what is claimed, given the true distribution and that of a first sibling.
        """
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        prefixes = 1 + VOCAB + VOCAB**2
        logits = self.rng.normal(0, 1.2, (prefixes, 1, VOCAB)).astype(np.float32)
        guess = np.exp(0.7 * logits[:, 0] + self.rng.normal(0, 0.8, (prefixes, VOCAB)))
        self.q = guess / guess.sum(-1, keepdims=True)
        self.p = target_probs(torch.from_numpy(logits), make_sampling(prefixes, **filters))[:, 0]  # type: ignore[arg-type]
        self.parents, self.drawn, self.replacement, self.claim = list(parents), drawn, replacement, claim

    def step(self, verifier: Verifier, prefixes: Array, nodes: Sequence[int]) -> Verdict:
        """Draft the given nodes after each prefix and verify."""
        n, every = len(prefixes), np.arange(len(prefixes))
        at = {-1: prefixes}
        tokens = np.zeros((n, len(nodes)), np.int32)
        claims = np.zeros((n, len(nodes), VOCAB), np.float32)
        for k, node in enumerate(nodes):
            plain = self.q[at[self.parents[node]]]
            q = plain.copy()
            for earlier in nodes[:k]:
                if self.parents[earlier] == self.parents[node]:
                    q[every, tokens[:, nodes.index(earlier)]] = 0
            q /= q.sum(-1, keepdims=True)
            source = plain if self.replacement else q
            below = source.cumsum(-1)
            chosen = (below > self.rng.random((n, 1)) * below[:, -1:]).argmax(-1)
            tokens[:, k] = chosen if self.drawn else q.argmax(-1)
            claims[:, k] = self.claim(q, plain)
            at[node] = at[self.parents[node]] * VOCAB + tokens[:, k] + 1
        parents = None
        if self.parents != list(CHAIN):
            parents = np.tile(
                np.array(
                    [nodes.index(p) if p >= 0 else -1 for p in (self.parents[j] for j in nodes)], np.int32
                ),
                (n, 1),
            )
        probs = self.p[np.stack([prefixes, *(at[j] for j in nodes)], axis=1)]
        counts = np.full(n, len(nodes), np.int32)
        return verifier(
            probs, Drafts(tokens, counts, parents, list(torch.from_numpy(claims)) if self.drawn else None)
        )

    def run(self, verifier: Verifier) -> tuple[float, float]:
        """Generate two tokens ``SAMPLES`` times: the p-value, and the share of first tokens drafted."""
        roots = [j for j, p in enumerate(self.parents) if p < 0]
        verdict = self.step(verifier, np.zeros(SAMPLES, np.int64), range(len(self.parents)))
        first, short = verdict.tokens[:, 0].astype(np.int64), verdict.accepted == 0
        second = verdict.tokens[:, 1].astype(np.int64)
        if short.any():
            second[short] = self.step(verifier, first[short] + 1, roots).tokens[:, 0]
        p = self.p.numpy().astype(np.float64)
        counts = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
        return p_value(p[0][:, None] * p[1 : VOCAB + 1], counts), float(1 - short.mean())


def disagreement(verifier: Verifier, parents: Sequence[int], drawn: bool, **options: Any) -> float:
    """Fisher's combined p over all seeds that the output is the target's."""
    runs = [Speculation(parents, seed, drawn, **options).run(verifier) for seed in SEEDS]
    assert 0.05 < np.mean([share for _, share in runs]) < 0.999  # both outcomes were exercised
    values = np.maximum([p for p, _ in runs], 1e-300)
    return float(stats.chi2.sf(-2 * np.log(values).sum(), 2 * len(values)))


def ours(probs: torch.Tensor, drafts: Drafts) -> Verdict:
    return verify_sampled(probs, drafts, [None] * len(drafts))


FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("drawn", [False, True], ids=["deterministic", "drawn"])
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_sampling_is_exact(parents: Sequence[int], drawn: bool, filters: dict[str, float]) -> None:
    assert disagreement(ours, parents, drawn, **filters) > ALARM


def test_sampling_is_exact_with_a_generator_for_each_request() -> None:
    def verifier(probs: torch.Tensor, drafts: Drafts) -> Verdict:
        seeds = torch.randint(2**62, (len(drafts),)).tolist()
        return verify_sampled(probs, drafts, [torch.Generator().manual_seed(s) for s in seeds])

    assert disagreement(verifier, TREE, True, top_p=0.9) > ALARM


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_ignoring_where_tokens_were_drawn_from_costs_speed_but_not_exactness(parents: Sequence[int]) -> None:
    # A fixed draft is verified exactly whatever it is, so a random one is too; it is accepted less.
    def verifier(probs: torch.Tensor, drafts: Drafts) -> Verdict:
        return ours(probs, Drafts(drafts.tokens, drafts.counts, drafts.parents))

    assert disagreement(verifier, parents, True) > ALARM
    shares = [[Speculation(parents, s, True).run(v)[1] for s in SEEDS[:5]] for v in (ours, verifier)]
    assert np.mean(shares[0]) > np.mean(shares[1]) + 0.05


# --- broken on purpose: the test above must notice -------------------------------------------------


def chain_verifier(
    accept: Callable[[Array, Array], Array], residual: Callable[[Array, Array, Array], Array]
) -> Verifier:
    """Chains only. ``accept(p[x], q[x])`` is a probability; ``residual(p, q, hot[x])`` gives weights."""

    def verifier(probs: torch.Tensor, drafts: Drafts) -> Verdict:
        p = probs.double().numpy()
        n, depth, every = len(drafts), drafts.tokens.shape[1], np.arange(len(drafts))
        hot = np.eye(VOCAB)[drafts.tokens]
        q = (
            hot
            if drafts.probs is None
            else np.stack([row.numpy() for row in drafts.probs if row is not None])
        )
        weights, accepted, alive = p[:, depth].copy(), np.zeros(n, np.int32), np.ones(n, np.bool_)
        for d in range(depth):
            x = drafts.tokens[:, d]
            passed = torch.rand(n, dtype=torch.float64).numpy() < accept(p[every, d, x], q[every, d, x])
            out = alive & ~passed
            weights[out] = residual(p[out, d], q[out, d], hot[out, d])
            alive &= passed
            accepted += alive
        weights = np.where(weights.sum(-1, keepdims=True) > 0, weights, p[every, accepted])
        tokens = np.append(drafts.tokens, np.zeros((n, 1), np.int32), axis=1)
        tokens[every, accepted] = torch.from_numpy(weights).multinomial(1)[:, 0].numpy()
        return Verdict(accepted, np.zeros((n, depth), np.int32), tokens)

    return verifier


def ratio(p: Array, q: Array) -> Any:
    return p / q


def positive_part(p: Array, q: Array, hot: Array) -> Any:
    return np.maximum(p - q, 0)


def without_draft(p: Array, q: Array, hot: Array) -> Any:
    return p * (1 - hot)


BROKEN = {
    "typical acceptance": (lambda p, q: p > 0.15, positive_part),
    "resamples from p": (ratio, lambda p, q, hot: p),
    "ignores q in the residual": (ratio, without_draft),
    "ignores q in the acceptance": (lambda p, q: p, positive_part),
    "accepts a little too much": (lambda p, q: 1.2 * p / q, positive_part),
}


@pytest.mark.parametrize("drawn", [False, True], ids=["deterministic", "drawn"])
def test_the_frame_of_the_broken_verifiers_is_sound(drawn: bool) -> None:
    assert disagreement(chain_verifier(ratio, positive_part), CHAIN, drawn) > ALARM


@pytest.mark.parametrize(
    ("how", "drawn"),
    # To ignore q is right for deterministic drafts.
    [(how, drawn) for how in BROKEN for drawn in (False, True) if drawn or not how.startswith("ignores q")],
)
def test_a_broken_rule_is_caught(how: str, drawn: bool) -> None:
    assert disagreement(chain_verifier(*BROKEN[how]), CHAIN, drawn) < ALARM


def flattened(q: Array, plain: Array) -> Array:
    """The claim of a proposer that forgot its own temperature."""
    flat: Array = np.sqrt(q)
    flat /= flat.sum(-1, keepdims=True)
    return flat


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_false_claim_is_caught(parents: Sequence[int]) -> None:
    assert disagreement(ours, parents, True, claim=flattened) < ALARM


def test_siblings_drawn_with_replacement_but_claimed_without_are_caught() -> None:
    assert disagreement(ours, TREE, True, replacement=True) < ALARM


def test_siblings_drawn_without_replacement_but_claimed_with_are_caught() -> None:
    assert disagreement(ours, TREE, True, claim=lambda q, plain: plain) < ALARM
