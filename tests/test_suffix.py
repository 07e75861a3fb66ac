"""The suffix proposer against a slow oracle that counts substrings, and its caches' bounds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_plugins.proposer import Draft, Need, Step, Target
from spec_plugins.proposers import suffix, suffix_automaton
from spec_plugins.proposers.suffix import SuffixProposer
from spec_plugins.proposers.suffix_automaton import (
    CAPACITY,
    COUNT,
    DOUBT,
    EDGE_SIZE,
    EDGE_TARGET,
    EDGE_TOKEN,
    EDGES,
    FURTHER,
    LAST,
    LENGTH,
    LINK,
    NEXT,
    SPAN,
    STATE_SIZE,
    STATES,
    TARGET,
    TOKEN,
    TOKENS,
)

Tokens = Sequence[int]


def target(trees: bool = False, vocab_size: int = 2**31 - 1, max_model_len: int = 2**20) -> Target:
    provides = frozenset({Need.TREES}) if trees else frozenset[Need]()
    return Target(vocab_size, max_model_len, 64, provides, 64, 64)


class Host:
    """Shows a proposer texts, as a driver would."""

    def __init__(self, *, trees: bool = False, vocab_size: int = 2**31 - 1, **options: object) -> None:
        self.proposer = SuffixProposer(**options)  # type: ignore[arg-type]
        self.proposer.load(target(trees, vocab_size))
        self.seen: dict[str, int] = {}

    def step(
        self,
        texts: Mapping[str, Tokens],
        budget: int = 8,
        depth: int = 8,
        prompts: Mapping[str, int] | None = None,
        tenants: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> dict[str, Draft]:
        """Propose for requests; ``anew``: as if none had been seen before."""
        n = len(texts)
        longest = max(map(len, texts.values()))
        rows = np.array(random.Random(longest).sample(range(n + 2), n), np.int32)
        token_ids = np.full((n + 2, longest + 1), -1, np.int32)
        for row, text in zip(rows, texts.values(), strict=True):
            token_ids[row, : len(text)] = text
        lengths = np.array([len(text) for text in texts.values()], np.int32)
        fresh = lengths - [0 if anew else self.seen.get(r, 0) for r in texts]
        fresh = np.where(fresh < 0, lengths, fresh).astype(np.int32)
        many = np.ones(n, np.int32)
        numbers = (token_ids, rows, lengths, fresh, budget * many, depth * many)
        for array in numbers:
            array.flags.writeable = False
        answer = self.proposer.propose(
            Step(
                list(texts),
                *numbers,
                np.array([prompts.get(r, 0) if prompts else 0 for r in texts], np.int32),
                [tenants[r] for r in texts] if tenants else None,
            )
        )
        self.seen.update(zip(texts, lengths.tolist(), strict=True))
        return dict(zip(texts, answer, strict=True))

    def draft(self, text: Tokens, budget: int = 8, depth: int = 8, **more: str) -> Draft:
        """What is drafted for a text on its own."""
        (draft,) = self.step({"one": text}, budget, depth, tenants=more and {"one": more["tenant"]}).values()
        self.proposer._release("one")  # not finish: the text must not enter the cache
        del self.seen["one"]
        return draft

    def cache(self, text: Tokens, name: str = "cached", prompt: int = 0, tenant: str = "") -> None:
        """Have a request with this text come and go."""
        self.step({name: text}, 0, prompts={name: prompt}, tenants={name: tenant})
        self.finish(name)

    def finish(self, name: str) -> None:
        self.proposer.finish(name)
        self.seen.pop(name, None)


class Texts:
    """A source of continuations: texts in the order they came, searched naively."""

    def __init__(self, texts: Sequence[Tokens], own: bool = False) -> None:
        self.texts, self.own = [tuple(t) for t in texts], own

    def count(self, string: Tokens) -> int:
        return sum(self._ends(string, False).values())

    def next(self, string: Tokens) -> Counter[int]:
        """Continuations by frequency, the most frequent first and the latest first among equals."""
        counts = self._ends(string, True)
        latest = {token: k for k, token in enumerate(counts)}  # a dict keeps the first place of a key ...
        order = sorted(counts, key=lambda token: (-counts[token], -latest[token]))
        return Counter({token: counts[token] for token in order})

    def _ends(self, string: Tokens, continued: bool) -> Counter[int]:
        string, m = tuple(string), len(string)
        found: Counter[int] = Counter()
        for text in self.texts:
            for end in range(m, len(text) + (not continued)):
                if text[end - m : end] == string:
                    token = text[end] if continued else 0
                    count = found.pop(token, 0)  # ... so a key seen again moves to the end
                    found[token] = count + 1
        return found

    def match(self, text: Tokens) -> Tokens:
        """The longest suffix of ``text`` that occurs here; in the text itself, once more than at its end."""
        for m in range(len(text) - 1 if self.own else min(len(text), SPAN), 0, -1):
            if self.count(text[len(text) - m :]) > self.own:
                return text[len(text) - m :]
        return ()

    def follow(
        self, string: Tokens, matched: int, ending: int, likelihood: float, min_match: int, threshold: float
    ) -> list[tuple[int, float, Tokens, int]]:
        """What may follow: token, likelihood, the string then, how much of it matched."""
        while string and not self.next(string):
            occurrences = self.count(string)
            string = next(
                string[k:]
                for k in range(1, len(string) + 1)
                if k == len(string) or self.count(string[k:]) > occurrences
            )
            matched, ending = matched if self.own else len(string), 1
        if not string or matched < min_match:
            return []
        continuations = self.next(string)
        scale = likelihood / (self.count(string) - ending + DOUBT / matched)
        return [
            (token, scale * count, (*string, token), matched + 1)
            for token, count in continuations.items()
            if scale * count >= threshold
        ]


class Oracle:
    """What is to be drafted for a text, given sources besides itself."""

    def __init__(
        self,
        text: Tokens,
        caches: Sequence[Sequence[Tokens]] = (),
        *,
        budget: int = 8,
        depth: int = 8,
        min_match: int = 1,
        min_probability: float = 0.1,
        length_factor: float = 4.0,
    ) -> None:
        self.budget, self.min_match, self.threshold = budget, min_match, min_probability
        text = tuple(text)
        self.roots = []
        for k, texts in enumerate([[text], *caches]):
            source = Texts(texts, k == 0)
            match = source.match(text)
            if match:
                limit = min(depth, int(length_factor * len(match)))
                self.roots.append((source, match, len(match), int(k == 0), 1.0, limit))

    def paths(self) -> dict[Tokens, float]:
        """All paths that are likely enough, with their likelihoods."""
        found: dict[Tokens, float] = {}

        def expand(
            path: Tokens, source: Texts, string: Tokens, matched: int, ending: int, p: float, limit: int
        ) -> None:
            if len(path) < limit:
                for token, q, longer, m in source.follow(
                    string, matched, ending, p, self.min_match, self.threshold
                ):
                    found[(*path, token)] = max(q, found.get((*path, token), 0.0))
                    expand((*path, token), source, longer, m, 0, q, limit)

        for root in self.roots:
            expand((), *root)
        return found

    def check_tree(self, draft: Draft) -> None:
        assert draft.parents is not None
        known = self.paths()
        likelihoods = [known[path] for path in paths(draft)]
        assert likelihoods == sorted(known.values(), reverse=True)[: self.budget]

    def check_chain(self, draft: Draft) -> None:
        assert draft.parents is None
        agreeing = self.roots
        for level, token in enumerate([*draft.tokens.tolist(), None]):
            best = []
            for source, string, matched, ending, p, limit in agreeing:
                if level < limit:
                    follow = source.follow(string, matched, ending, p, self.min_match, self.threshold)[:1]
                    best += [(source, *guess, limit) for guess in follow]
            if token is None:
                assert level == self.budget or not best
                return
            assert token in {guess[1] for guess in best if guess[2] == max(g[2] for g in best)}
            agreeing = [(s, string, m, 0, p, limit) for s, t, p, string, m, limit in best if t == token]


def paths(draft: Draft) -> list[Tokens]:
    """The path from the root to every node; checks the shape of a draft."""
    found: list[Tokens] = []
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents.tolist()
    for j, (token, parent) in enumerate(zip(draft.tokens.tolist(), parents, strict=True)):
        assert -1 <= parent < j
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return found


def periodic(unit: list[int], times: int, noise: list[int]) -> list[int]:
    return (unit * times)[:55] + noise


def texts(most: int = 60, alphabet: int = 4) -> st.SearchStrategy[list[int]]:
    tokens = st.integers(0, alphabet - 1)
    return st.one_of(
        st.lists(tokens, min_size=1, max_size=most),
        st.lists(st.integers(0, 1), min_size=1, max_size=most),
        st.builds(
            periodic,
            st.lists(tokens, min_size=1, max_size=5),
            st.integers(1, 12),
            st.lists(tokens, max_size=4),
        ).map(lambda text: text[:most]),
    )


class Automaton:
    """An automaton's buffer, for reading."""

    def __init__(self, proposer: SuffixProposer, slot: int) -> None:
        self.row, buffer = proposer._table[slot], proposer._buffers[slot]
        assert buffer is not None
        size = STATE_SIZE * (2 * int(self.row[CAPACITY]) + 2)
        self.states, self.edges = buffer[:size].tolist(), buffer[size:].tolist()

    def children(self, state: int) -> dict[int, int]:
        """Targets by token, the first edge first."""
        found = {}
        if self.states[state + TARGET]:
            found[self.states[state + TOKEN]] = self.states[state + TARGET]
        e = self.states[state + FURTHER]
        while e:
            assert self.edges[e + EDGE_TOKEN] not in found
            found[self.edges[e + EDGE_TOKEN]] = self.edges[e + EDGE_TARGET]
            e = self.edges[e + NEXT]
        return found

    def check(self, texts: Sequence[Tokens]) -> None:
        source = Texts(texts)
        tokens = sum(map(len, texts))
        assert self.row[STATES] <= STATE_SIZE * (2 * tokens + 1)
        assert self.row[EDGES] <= EDGE_SIZE * max(1, tokens + 2 * len(texts) - 1)
        assert self.row[STATES] <= STATE_SIZE * (2 * self.row[CAPACITY] + 2)
        assert self.row[EDGES] <= EDGE_SIZE * (self.row[CAPACITY] + 1)
        strings = {
            tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, min(len(t), a + 7) + 1)
        }
        for string in strings:
            state = 0
            for token in string:
                state = self.children(state)[token]
            assert self.states[state + COUNT] == source.count(string)
            assert (
                self.states[self.states[state + LINK] + LENGTH] < len(string) <= self.states[state + LENGTH]
            )
            following = source.next(string)
            children = self.children(state)
            assert children.keys() == following.keys()
            assert list(children)[:1] == list(following)[:1]


@settings(deadline=None)
@given(texts())
def test_automaton_counts_substrings(text: list[int]) -> None:
    host = Host(cache_tokens=0)
    host.step({"r": text})
    automaton = Automaton(host.proposer, host.proposer._slots["r"])
    automaton.check([text])
    match = automaton.states[int(automaton.row[LAST]) + LINK]
    assert automaton.states[match + LENGTH] == len(Texts([text], True).match(tuple(text)))


@settings(deadline=None)
@given(st.lists(texts(25), min_size=1, max_size=4))
def test_cache_counts_substrings_of_documents(documents: list[list[int]]) -> None:
    host = Host(cache_tokens=1000)
    for k, document in enumerate(documents):
        host.cache(document, f"r{k}")
    (tenant,) = host.proposer._tenants.values()
    Automaton(host.proposer, tenant.caches[tenant.young]).check(documents)


LIMITS = st.fixed_dictionaries(
    {"budget": st.integers(1, 12), "depth": st.integers(1, 10)},
    optional={
        "min_match": st.integers(1, 3),
        "min_probability": st.sampled_from([0.01, 0.05, 0.2, 0.4]),
        "length_factor": st.sampled_from([0.5, 1.0, 100.0]),
    },
)


@settings(deadline=None)
@given(texts(40), st.lists(texts(25), max_size=3), LIMITS, st.booleans())
def test_drafts_follow_the_likeliest_paths(
    text: list[int], documents: list[list[int]], limits: dict[str, float], trees: bool
) -> None:
    budget, depth = int(limits["budget"]), int(limits["depth"])
    options = {k: v for k, v in limits.items() if k not in ("budget", "depth")}
    host = Host(trees=trees, cache_tokens=1000, **options)
    for k, document in enumerate(documents):
        host.cache(document, f"r{k}")
    draft = host.draft(text, budget, depth)
    oracle = Oracle(text, [documents], **limits)  # type: ignore[arg-type]
    if trees:
        oracle.check_tree(draft)
    else:
        oracle.check_chain(draft)
    assert len(draft) <= budget
    assert max(map(len, paths(draft)), default=0) <= depth


class Generations:
    """Which documents a cache of one tenant holds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.young: list[list[int]] = []
        self.old: list[list[int]] = []

    def add(self, document: list[int]) -> None:
        document = document[-(self.most - 2) :]
        if sum(len(d) + 2 for d in self.young) + len(document) + 2 > self.most:
            self.young, self.old = [], self.young
        self.young.append(document)


@settings(deadline=None, max_examples=50)
@given(st.lists(texts(30, 3), min_size=2, max_size=6), texts(30, 3), st.booleans())
def test_generations_rotate(documents: list[list[int]], text: list[int], trees: bool) -> None:
    host, model = Host(trees=trees, cache_tokens=60), Generations(30)
    for k, document in enumerate(documents):
        host.cache(document, f"r{k}")
        model.add(document)
        assert host.proposer.gauges()["cached_tokens"] <= 60
    oracle = Oracle(text, [model.old, model.young])
    draft = host.draft(text)
    if trees:
        oracle.check_tree(draft)
    else:
        oracle.check_chain(draft)


def same(a: Draft, b: Draft) -> bool:
    if (a.parents is None) != (b.parents is None):
        return False
    return np.array_equal(a.tokens, b.tokens) and (
        a.parents is None or b.parents is None or np.array_equal(a.parents, b.parents)
    )


def words(rng: random.Random, n: int, vocabulary: int = 50) -> list[int]:
    """Text in which words and phrases return."""
    out: list[int] = []
    while len(out) < n:
        if out and rng.random() < 0.5:
            start = rng.randrange(len(out))
            out += out[start : start + rng.randint(1, 20)]
        else:
            out += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))]
    return out[:n]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("cache_tokens", [0, 200, 100_000])
def test_any_history_is_as_good_as_a_new_start(trees: bool, cache_tokens: int) -> None:
    """Requests come, grow, shrink, pause, are preempted and end; one proposer sees every request as new
    in each step, and drafts the same."""
    rng = random.Random(1)
    options = {"trees": trees, "cache_tokens": cache_tokens}
    incremental, rebuilt = Host(**options), Host(**options)
    texts = {f"r{k}": words(rng, rng.randint(1, 300)) for k in range(8)}
    for turn in range(150):
        for name, text in list(texts.items()):
            event = rng.random()
            if event < 0.03:
                del text[rng.randrange(len(text)) + 1 :]
                incremental.seen[name] = 0  # a host says so, even if the text grows again before it is shown
            elif event < 0.05:
                incremental.finish(name)  # preempted
                rebuilt.finish(name)
            elif event < 0.08:
                incremental.finish(name)
                rebuilt.finish(name)
                del texts[name]
                texts[f"t{turn}{name}"] = words(rng, rng.randint(1, 300))
            elif event < 0.9:
                more = text[-40:-30] if rng.random() < 0.5 else words(rng, 4)
                text.extend(more[: rng.randint(1, 5)])
        names = rng.sample(list(texts), rng.randint(1, 8))
        shown = {name: texts[name] for name in names}
        budget = rng.choice([0, 1, 5, 16])
        prompts = dict.fromkeys(names, 3)
        a = incremental.step(shown, budget, prompts=prompts)
        b = rebuilt.step(shown, budget, prompts=prompts, anew=True)
        for name in names:
            assert same(a[name], b[name])
            assert len(a[name]) <= budget
            paths(a[name])


def test_fresh_that_contradicts_the_state_starts_over() -> None:
    host = Host(cache_tokens=0)
    host.step({"r": [1, 2, 3, 4]})
    host.seen["r"] = 7  # what a faulty host may believe
    other = [5, 6, 5, 6, 5, 6, 5, 6, 5]
    assert host.step({"r": other})["r"].tokens.tolist() == host.draft(other).tokens.tolist() != []


def test_same_request_twice_in_a_step_does_no_harm() -> None:
    proposer = SuffixProposer()
    tokens = np.array([[1, 2, 1, 2, 1, 2], [3, 3, 3, 0, 0, 0]], np.int32)
    four, lengths = np.full(2, 4, np.int32), np.array([6, 3], np.int32)
    for _ in range(3):
        drafts = proposer.propose(Step(["a", "a"], tokens, np.arange(2), lengths, lengths, four, four, four))
        assert len(drafts) == 2


def test_rows_and_lengths_out_of_range_are_not_read() -> None:
    proposer = SuffixProposer(cache_tokens=0)
    tokens = np.array([[1, 2, 1, 2]], np.int32)
    rows, lengths = np.array([5, -1, 0, 0], np.int32), np.array([4, 4, 9, 0], np.int32)
    four = np.full(4, 4, np.int32)
    drafts = proposer.propose(Step(list("abcd"), tokens, rows, lengths, lengths, four, four, four))
    assert drafts.counts.tolist() == [0, 0, 0, 0]


def test_a_batch_is_its_requests() -> None:
    rng = random.Random(2)
    batch = {f"r{k}": words(rng, 10 * k + 1) for k in range(32)}
    host = Host(trees=True)
    host.cache(words(rng, 500))
    for name, draft in host.step(batch).items():
        assert same(draft, host.draft(batch[name]))
    assert (
        len(host.proposer.propose(Step([], *[np.zeros((0, 0), np.int32)] + [np.zeros(0, np.int32)] * 6))) == 0
    )


def test_array_types_of_any_host_compile_nothing_new() -> None:
    proposer = SuffixProposer()
    proposer.load(target(True))
    tokens = np.array([[7, 8, 9, 7, 8]], np.int32)
    four, length = np.full(1, 4), np.full(1, 5)
    for token_ids in (
        tokens,
        np.asfortranarray(tokens),
        np.repeat(tokens, 2, 1)[:, ::2],
        tokens.astype(np.int64),
    ):
        for kind in (np.int32, np.int64):
            numbers = [a.astype(kind) for a in (np.zeros(1), length, length, four, four, length)]
            draft = proposer.propose(Step(["r"], token_ids, *numbers))[0]
            assert draft.tokens.tolist()[:1] == [9]
    kernels = suffix_automaton.propose, suffix_automaton.insert, suffix_automaton._move
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1, 1]


def test_huge_token_ids_and_the_vocabulary() -> None:
    top = 2**31 - 1
    text = [5, top - 1, top] * 4
    assert Host(vocab_size=top + 1).draft(text, 4).tokens.tolist() == [5, top - 1, top, 5]
    assert Host(vocab_size=top).draft(text, 4).tokens.tolist() == [5, top - 1]
    assert Host(vocab_size=top + 1).draft([-1, 3, -1, 3], 4).tokens.tolist() == []


def test_one_token_repeated() -> None:
    host = Host(trees=True)
    text = [3] * 50_000
    for _ in range(8):
        host.step({"r": text}, 0)
    for _ in range(20):
        draft = host.step({"r": text})["r"]
        assert draft.tokens.tolist() == [3] * 8
        text = [*text, 3]
    host.finish("r")
    assert host.draft([1, 3, 3, 3]).tokens.tolist() == [3] * 8


def test_buffers_grow_with_a_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "INGEST", 2**20)
    rng = random.Random(3)
    text = words(rng, 100_000, 5000)
    host = Host(trees=True, cache_tokens=0)
    at = 10
    capacities = set()
    while at < len(text):
        draft = host.step({"r": text[:at]})["r"]
        capacities.add(int(host.proposer._table[host.proposer._slots["r"], CAPACITY]))
        at += 1 + at // 8
    assert len(capacities) > 10
    assert len(draft)
    assert same(draft, Host(trees=True, cache_tokens=0).step({"r": text[: host.seen["r"]]})["r"])


def test_long_prompts_are_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    batch = {"long": words(rng, 1000), "short": words(rng, 50)}
    expected = {name: Host(cache_tokens=0).draft(text) for name, text in batch.items()}
    monkeypatch.setattr(suffix, "INGEST", 300)
    host = Host(cache_tokens=0)
    drafts = [host.step(batch) for _ in range(8)]
    assert len(drafts[0]["long"]) == 0
    assert all(same(draft["short"], expected["short"]) for draft in drafts)
    assert same(drafts[-1]["long"], expected["long"])
    assert host.proposer._table[host.proposer._slots["long"], TOKENS] == 1000


STORY = list(range(100, 160))


def test_earlier_outputs_are_found() -> None:
    host = Host()
    assert host.draft([1, 2, *STORY[:5]]).tokens.tolist() == []
    host.cache([9, 9, *STORY], prompt=2)
    assert host.draft([1, 2, *STORY[:5]]).tokens.tolist() == STORY[5:13]
    assert host.proposer.gauges()["cached_tokens"] == len(STORY) + 4


def test_a_running_request_finds_what_others_finish_meanwhile() -> None:
    host = Host()
    assert len(host.step({"running": STORY[:5]})["running"]) == 0
    host.cache(STORY)
    assert host.step({"running": STORY[:5]})["running"].tokens.tolist() == STORY[5:13]
    assert host.step({"running": STORY[:7]})["running"].tokens.tolist() == STORY[7:15]


def test_a_match_in_the_cache_is_of_a_bounded_span() -> None:
    host = Host(trees=True)
    host.cache([*STORY[:40], 1], "longer")
    host.cache([9, *STORY[40 - SPAN : 40], 2], "shorter")
    for length in range(1, 41):
        draft = host.step({"grown": STORY[:length]})["grown"]
        assert same(draft, host.draft(STORY[:length]))
    assert paths(draft) == [(2,), (1,)]


@pytest.mark.parametrize("cache_prompts", [False, True])
def test_prompts_are_cached_on_request(cache_prompts: bool) -> None:
    host = Host(cache_prompts=cache_prompts)
    host.cache([*STORY, 7, 7], prompt=len(STORY))
    found = host.draft(STORY[:5]).tokens.tolist()
    assert found == (STORY[5:13] if cache_prompts else [])
    # The end of a prompt leads to its output either way.
    assert host.draft(STORY[-5:]).tokens.tolist()[0] == 7
    host.cache([50, 51, 52], prompt=3)  # no output
    assert host.draft([50]).tokens.tolist() == ([51, 52] if cache_prompts else [])


def test_tenants_share_nothing() -> None:
    host = Host()
    host.cache(STORY, tenant="a")
    before = host.draft([*STORY[:9], 1, *STORY[:3]], tenant="b")
    assert host.draft(STORY[:5], tenant="a").tokens.tolist() == STORY[5:13]  # the control
    assert host.draft(STORY[:5], tenant="b").tokens.tolist() == []
    for k in range(50):
        host.cache(STORY[k:] + STORY[:k], f"r{k}", tenant="a")
    assert same(before, host.draft([*STORY[:9], 1, *STORY[:3]], tenant="b"))


@pytest.mark.parametrize("trees", [False, True])
def test_tenants_draft_as_if_alone(trees: bool) -> None:
    rng = random.Random(5)
    outputs = {tenant: [words(rng, 80, 12) for _ in range(6)] for tenant in "abc"}
    together = Host(trees=trees)
    for k in range(6):
        for tenant, some in outputs.items():
            together.cache(some[k], f"{tenant}{k}", tenant=tenant)
    for tenant, some in outputs.items():
        alone = Host(trees=trees)
        for k, output in enumerate(some):
            alone.cache(output, f"{k}", tenant="x")
        for text in (words(rng, 30, 12) for _ in range(20)):
            assert same(together.draft(text, tenant=tenant), alone.draft(text, tenant="x"))


def test_an_evicted_tenants_running_request_sees_no_other_tenant() -> None:
    host = Host(cache_tenants=1, cache_tokens=200)
    running, tenants = {"running": STORY[:5]}, {"running": "a"}
    host.step(running, tenants=tenants)
    for k in range(20):
        host.cache(STORY, f"r{k}", tenant=f"b{k}")
        assert len(host.step(running, tenants=tenants)["running"]) == 0
    assert host.proposer.gauges()["tenants"] == 2  # the running one's, and one with a cache
    host.finish("running")
    # A request that returns as another tenant's sees that one's cache.
    host.cache(STORY, tenant="c")
    host.step(running, tenants={"running": "a"})
    assert len(host.step(running, tenants={"running": "c"}, anew=True)["running"]) == 8


def test_caches_stay_within_bounds() -> None:
    rng = random.Random(6)
    host = Host(cache_tokens=1000, cache_tenants=5)
    kept = []
    for k in range(400):
        text = words(rng, rng.choice([1, 20, 100, 700]))
        host.cache(text, f"r{k}", tenant=f"t{rng.randrange(12)}")
        gauges = host.proposer.gauges()
        assert gauges["cached_tokens"] <= 1000
        assert gauges["tenants"] <= 5
        table = host.proposer._table
        assert gauges["cached_tokens"] == sum(
            table[slot, TOKENS] for t in host.proposer._tenants.values() for slot in t.caches
        )
        kept.append(gauges["cached_tokens"])
        assert len(host.proposer._table) <= 64
    assert max(kept) > 700
    assert len(host.proposer._finished) <= suffix.FINISHED


def test_the_least_recent_tenant_is_evicted_first() -> None:
    host = Host(cache_tokens=200)
    host.cache(STORY, "1", tenant="a")
    host.cache(STORY, "2", tenant="b")
    assert len(host.draft(STORY[:5], tenant="a"))
    host.cache(STORY, "3", tenant="c")
    host.cache(STORY, "4", tenant="d")
    assert [len(host.draft(STORY[:5], tenant=t)) > 0 for t in "abcd"] == [True, False, True, True]


def test_a_document_longer_than_a_generation_is_cut() -> None:
    host = Host(cache_tokens=60)
    host.cache(STORY)
    assert host.proposer.gauges()["cached_tokens"] == 30
    assert host.draft(STORY[40:45]).tokens.tolist() == STORY[45:53]
    assert host.draft(STORY[20:25]).tokens.tolist() == []
    tiny = Host(cache_tokens=3)
    tiny.cache(STORY)
    assert tiny.proposer.gauges()["cached_tokens"] == 0


def test_output_of_a_preempted_request_is_cached_once() -> None:
    host = Host()
    host.cache(STORY[:40], "r")
    host.cache(STORY[:40], "r")  # back, and away again with nothing new
    host.cache(STORY, "r")
    assert host.proposer.gauges()["cached_tokens"] == 40 + 2 + (60 - 40 + suffix.LEAD) + 2
    assert host.draft(STORY[35:40]).tokens.tolist()[:7] == STORY[40:47]
    # Another request by the same name is told by its text.
    other = list(range(300, 350))
    host.cache(other, "r")
    assert host.draft(other[:9]).tokens.tolist() == other[9:17]


@pytest.mark.parametrize("cache_tokens", [0, 10_000])
def test_finish_frees(cache_tokens: int) -> None:
    host = Host(cache_tokens=cache_tokens)
    sizes = set()
    for _ in range(3):
        names = {f"r{k}": words(random.Random(k), 100) for k in range(40)}
        host.step(names)
        gauges = host.proposer.gauges()
        assert gauges["requests"] == 40
        assert gauges["bytes"] > 40 * 100 * 40
        for name in names:
            host.finish(name)
        gauges = host.proposer.gauges()
        assert gauges["requests"] == 0
        if cache_tokens == 0:
            assert set(gauges.values()) == {0}
        sizes.add(len(host.proposer._table))
    assert len(sizes) == 1
    host.finish("never seen")


def test_trees_only_where_the_host_verifies_them() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    assert Host(trees=False).draft(text).parents is None
    assert Host(trees=True, tree=False).draft(text).parents is None
    draft = Host(trees=True).draft(text)
    assert draft.parents is not None
    assert {path[0] for path in paths(draft)} == {3, 4}


def test_length_follows_certainty() -> None:
    host = Host(cache_tokens=0)
    once = [*range(20), 0]  # a match of one token that occurred once
    assert len(host.draft(once, 16, 16)) < len(host.draft([*range(20), *range(5)], 16, 16)) < 15
    assert len(host.draft([*([0, 1, 2, 3] * 3), 0], 16, 16)) == 16
    assert len(Host(cache_tokens=0, min_match=2).draft(once)) == 0
    assert len(Host(cache_tokens=0, min_probability=0.5).draft(once)) == 0
    assert len(Host(cache_tokens=0, length_factor=1).draft(once)) == 1


@pytest.mark.slow
def test_no_memory_fault_with_bounds_checks(tmp_path: object) -> None:
    """The same tests with kernels that check every index."""
    if os.environ.get("NUMBA_BOUNDSCHECK"):
        pytest.skip("this is them")
    chosen = "oracle or likeliest or rotate or history or grow or repeated or counts or bounds or twice"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-cov",
            "-p",
            "no:cacheprovider",
            __file__,
            "-k",
            chosen,
        ],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
