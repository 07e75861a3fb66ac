"""The draft-model proposer alone, with steps made by hand and tiny random models."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from draft_models import LETTERS, byte_level, letters, make_model, metaspace, near, permuted, saved  # noqa: E402
from scipy import stats  # noqa: E402

from spec_plugins import (  # noqa: E402
    ConfigError,
    Drafts,
    Need,
    Sampling,
    Step,
    Target,
    UnavailableError,
    UnsupportedError,
)
from spec_plugins.config import check_options, load_config  # noqa: E402
from spec_plugins.proposers import draft_runner, draft_vocabulary  # noqa: E402
from spec_plugins.proposers.draft_model import DraftModelProposer  # noqa: E402
from spec_plugins.verification import target_probs, verify_sampled  # noqa: E402

VOCAB = 96
BOTH = frozenset({Need.SAMPLING, Need.PROBABILITIES})


def proposer(
    folder: str,
    *,
    vocab: int = VOCAB,
    target: str | None = None,
    provides: frozenset[Need] = BOTH,
    depth: int = 5,
    **options: Any,
) -> DraftModelProposer:
    made = DraftModelProposer(model=folder, **options)
    made.load(Target(vocab, 256, 8, provides, depth, depth, model=target, dtype="float64"))
    return made


class Texts:
    """Requests as an engine holds them, and steps over any of them."""

    def __init__(self, **texts: list[int]) -> None:
        self.texts = texts
        self.seen: dict[str, int] = {}

    def step(self, *names: str, depth: int | list[int] = 5, sampling: Sampling | None = None) -> Step:
        names = names or tuple(self.texts)
        n, most = len(names), max(len(self.texts[r]) for r in names)
        token_ids = np.full((n, most + 7), -1, np.int32)
        for i, r in enumerate(names):
            token_ids[i, : len(self.texts[r])] = self.texts[r]
        lengths = np.array([len(self.texts[r]) for r in names], np.int32)
        fresh = lengths - [self.seen.get(r, 0) for r in names]
        self.seen.update(zip(names, lengths.tolist(), strict=True))
        depths = np.broadcast_to(np.array(depth, np.int32), n).copy()
        rows = np.arange(n, dtype=np.int32)
        return Step(names, token_ids, rows, lengths, fresh.astype(np.int32), depths, depths, lengths,
                    sampling=sampling)  # fmt: skip


def greedy(model: Any, text: list[int], n: int) -> list[int]:
    """What a model says next, without any cache."""
    ids = list(text)
    with torch.inference_mode():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(text) :]


def tokens(drafts: Drafts) -> list[list[int]]:
    return [d.tokens.tolist() for d in drafts]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("draft"), model)


def rng_text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


# ------------------------------------------------------------------------------------- what is drafted


def test_drafts_are_what_the_model_says_whatever_became_of_the_last_ones(model: Any, folder: str) -> None:
    """Accepted in part, in whole or not at all; new, missed, joined, left: the cache never shows."""
    made, rng = proposer(folder), np.random.default_rng(0)
    texts = Texts(**{name: rng_text(n, n) for name, n in zip("abcde", (1, 3, 40, 18, 33), strict=True)})
    for turn in range(14):
        names = [r for r in texts.texts if rng.random() < 0.7] or ["a"]
        depths = rng.integers(0, 6, len(names))
        drafts = made.propose(texts.step(*names, depth=depths.tolist()))
        for r, depth, draft in zip(names, depths.tolist(), drafts, strict=True):
            assert draft.tokens.tolist() == greedy(model, texts.texts[r], depth)
            kept = int(rng.integers(0, len(draft) + 1))
            texts.texts[r] = [*texts.texts[r], *draft.tokens[:kept].tolist(), int(rng.integers(1, VOCAB))]
            if rng.random() < 0.1:
                texts.texts[r] += rng_text(turn, 25)  # steps that it did not see
        if rng.random() < 0.2:
            gone = names[0]
            made.finish(gone)
            made.finish(gone)
            texts.seen.pop(gone)
            texts.texts[gone] = rng_text(turn, int(rng.integers(1, 50)))
    for r in texts.texts:
        made.finish(r)
    assert made.gauges() == {"requests": 0, "rows": 0, "cache_bytes": 0}


def test_only_what_the_cache_lacks_is_fed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fed = proposer(folder), []
    forward = draft_runner.RowModel.forward
    monkeypatch.setattr(
        draft_runner.RowModel, "forward",
        lambda self, ids, *rest, **more: fed.append(tuple(ids.shape)) or forward(self, ids, *rest, **more),
    )  # fmt: skip
    texts = Texts(a=rng_text(0, 60), b=rng_text(1, 5))
    first = tokens(made.propose(texts.step()))
    assert fed == [(1, 59), (2, 5), *[(2, 1)] * 4]  # all but the newest, then both
    texts.texts["a"] += [*first[0], 7]  # all accepted: the last draft token was not fed
    texts.texts["b"] += [*first[1][:2], 8]
    fed.clear()
    made.propose(texts.step())
    assert fed == [(2, 2), *[(2, 1)] * 4]
    fed.clear()
    texts.texts["a"] += [1]
    made.propose(texts.step("a", depth=0))
    assert fed == []


def test_long_texts_are_taken_in_a_bounded_number_of_tokens_a_step(model: Any, folder: str) -> None:
    made = proposer(folder, prefill_tokens=64)
    texts = Texts(long=rng_text(0, 150), short=rng_text(1, 10))
    lengths = [[len(d) for d in made.propose(texts.step())] for _ in range(3)]
    assert lengths == [[0, 5], [0, 5], [5, 5]]
    assert tokens(made.propose(texts.step()))[0] == greedy(model, texts.texts["long"], 5)


def test_texts_are_taken_in_together_in_passes_of_a_bounded_size(
    model: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_runner, "PASS", 48)
    texts = Texts(**{f"{i}": rng_text(i, n) for i, n in enumerate((120, 20, 47, 18, 90, 3))})
    made = proposer(folder, prefill_tokens=500)
    assert tokens(made.propose(texts.step())) == [greedy(model, t, 5) for t in texts.texts.values()]


def test_the_end_of_the_drafts_context(tmp_path: Path) -> None:
    short = make_model(max_position_embeddings=32)
    made = proposer(saved(tmp_path, short))
    texts = Texts(a=rng_text(0, 29), b=rng_text(1, 4))
    assert [len(d) for d in made.propose(texts.step())] == [3, 5]
    texts.texts["a"] += rng_text(2, 2)
    first = tokens(made.propose(texts.step()))
    assert first[0] == greedy(short, texts.texts["a"], 1)
    texts.texts["a"] += rng_text(2, 2)
    assert [len(d) for d in made.propose(texts.step())] == [0, 5]
    assert made.gauges()["rows"] == 1


def test_the_cache_is_bounded_and_the_longest_go_without(model: Any, folder: str) -> None:
    made = proposer(folder, cache_tokens=128)
    texts = Texts(a=rng_text(0, 20), b=rng_text(1, 100), c=rng_text(2, 30))
    assert [len(d) for d in made.propose(texts.step())] == [5, 0, 5]
    assert made._runner is not None
    cache = made._runner.model.cache
    assert cache.num_rows * cache.capacity <= 128
    # Alone it fits: those that are not in the step make room, and come back.
    assert tokens(made.propose(texts.step("b"))) == [greedy(model, texts.texts["b"], 5)]
    assert tokens(made.propose(texts.step("c", "a"))) == [greedy(model, texts.texts[r], 5) for r in "ca"]
    assert cache.num_rows * cache.capacity <= 128


def test_other_tokens_than_before_are_noticed(model: Any, folder: str) -> None:
    made = proposer(folder)
    texts = Texts(a=rng_text(0, 20))
    made.propose(texts.step())
    texts.texts["a"] = rng_text(5, 12)
    texts.seen["a"] = 0
    assert tokens(made.propose(texts.step())) == [greedy(model, texts.texts["a"], 5)]
    texts.texts["a"] = rng_text(6, 14)
    texts.seen["a"] = 0
    assert tokens(made.propose(texts.step())) == [greedy(model, texts.texts["a"], 5)]


# ------------------------------------------------------------------------------------------- sampling


def settings(n: int, *kinds: tuple[float, int, float, float]) -> Sampling:
    return Sampling.of([kinds[i % len(kinds)] for i in range(n)])


def test_probabilities_are_those_at_the_requests_settings(model: Any, folder: str) -> None:
    kinds = ((0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.05))
    texts = Texts(**{f"{i}": rng_text(i, 3 + 6 * i) for i in range(8)})
    sampling = settings(8, *kinds)
    drafts = proposer(folder).propose(texts.step(sampling=sampling, depth=[1, 2, 3, 4, 5, 4, 3, 2]))
    for i, (text, draft) in enumerate(zip(texts.texts.values(), drafts, strict=True)):
        if i % 4 == 0:
            assert draft.probs is None
            assert draft.tokens.tolist() == greedy(model, text, len(draft))
            continue
        assert draft.probs is not None
        whole = torch.tensor([[*text, *draft.tokens.tolist()]])
        with torch.inference_mode():
            logits = model(whole).logits[:, len(text) - 1 : -1]
        want = target_probs(logits, settings(1, kinds[i % 4]))[0]
        torch.testing.assert_close(draft.probs, want, atol=1e-6, rtol=0)
        assert (draft.probs.gather(1, torch.tensor(draft.tokens[:, None].astype(np.int64))) > 0).all()


def fisher(p_values: list[float]) -> float:
    return float(stats.combine_pvalues(p_values).pvalue)


SMALL, N = 6, 2000


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    """Target and draft of 6 tokens that differ clearly, and the draft's folder."""
    size = {"vocab": SMALL, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.4}
    target, draft = make_model(3, **size), make_model(4, **size)
    return target, draft, saved(tmp_path_factory.mktemp("small"), draft)


def outcomes(target: Any, made: DraftModelProposer, *, lie: bool = False) -> float:
    """p of the committed tokens of many requests against the target's exact distributions."""
    prompt, at = [1, 2, 3, 4, 1], settings(N, (0.8, 0, 1.0, 0.0))
    texts = Texts(**{f"{i}": prompt for i in range(N)})
    drafts = made.propose(texts.step(sampling=at, depth=2))
    probs = list(drafts.probs or ())
    assert len(probs) == N
    if lie:
        probs = [torch.full_like(p, 1 / SMALL) for p in probs]  # type: ignore[arg-type]
    with torch.inference_mode():
        every = torch.tensor([[*prompt, t] for t in range(SMALL)])
        exact = (
            target_probs(target(every).logits[:, -2:], settings(SMALL, (0.8, 0, 1.0, 0.0))).double().numpy()
        )
        logits = target(torch.tensor([[*prompt, *d] for d in tokens(drafts)])).logits[:, len(prompt) - 1 :]
    torch.manual_seed(0)
    verdict = verify_sampled(
        target_probs(logits, at), Drafts(drafts.tokens, drafts.counts, None, probs), [None] * N
    )
    first, second = verdict.tokens[:, 0], verdict.tokens[:, 1]
    values = [_p(first, exact[0, 0])]
    # Whatever the first was, the second is as the target has it after that one.
    values += [_p(second[(first == t) & (second >= 0)], exact[t, 1]) for t in range(SMALL)]
    return fisher(values)


def _p(seen: Any, exact: Any) -> float:
    counts = np.bincount(seen, minlength=SMALL)
    return float(stats.chisquare(counts, exact / exact.sum() * len(seen)).pvalue)


def test_sampled_output_is_the_targets(small_pair: tuple[Any, Any, str]) -> None:
    target, _, folder = small_pair
    assert outcomes(target, proposer(folder, vocab=SMALL)) > 1e-4
    assert outcomes(target, proposer(folder, vocab=SMALL), lie=True) < 1e-6, "the control must be caught"


def test_drafts_are_drawn_from_what_they_say(small_pair: tuple[Any, Any, str]) -> None:
    _, draft, folder = small_pair
    texts = Texts(**{f"{i}": [1, 2, 3] for i in range(N)})
    drafts = proposer(folder, vocab=SMALL).propose(
        texts.step(sampling=settings(N, (1.0, 0, 1.0, 0.0)), depth=1)
    )
    seen = np.bincount(drafts.tokens[:, 0], minlength=SMALL)
    with torch.inference_mode():
        want = draft(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1).numpy()
    assert stats.chisquare(seen, want * N).pvalue > 1e-4


def test_chance_is_each_requests_own_and_not_torchs(folder: str) -> None:
    def drafted(*names: str) -> list[list[int]]:
        texts = Texts(**dict.fromkeys(names, rng_text(0, 9)))
        before = torch.random.get_rng_state()
        made = proposer(folder).propose(texts.step(sampling=settings(len(names), (1.5, 0, 1.0, 0.0))))
        assert torch.equal(before, torch.random.get_rng_state())
        return tokens(made)

    alone, together = drafted("a"), drafted("a", "b")
    assert alone[0] == together[0] != together[1]
    assert drafted("a", "b") == together


@pytest.mark.parametrize(
    ("options", "provides"),
    [({"draft_sample_method": "greedy"}, BOTH), ({}, BOTH - {Need.PROBABILITIES}), ({}, frozenset())],
)
def test_greedy_drafts_where_asked_or_nothing_else_can_be_verified(
    model: Any, folder: str, options: Any, provides: frozenset[Need]
) -> None:
    texts = Texts(a=rng_text(0, 9))
    made = proposer(folder, provides=provides, **options)
    (draft,) = made.propose(texts.step(sampling=settings(1, (1.0, 0, 1.0, 0.0))))
    assert draft.probs is None
    assert draft.tokens.tolist() == greedy(model, texts.texts["a"], 5)


def test_asking_for_what_the_engine_cannot_verify_is_said(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spec_plugins"):
        proposer(folder, provides=frozenset(), draft_sample_method="probabilistic")
    assert "does not verify with draft probabilities" in caplog.text


# --------------------------------------------------------------------------------------- vocabularies

OWN = LETTERS
SHUFFLED = "".join(np.random.default_rng(2).permutation(list(LETTERS)))
SIZE = 2 + len(LETTERS)


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A target whose tokens are letters, and its folder."""
    made = make_model(6, vocab=SIZE)
    return made, saved(tmp_path_factory.mktemp("letters"), made, letters(OWN))


@pytest.fixture(scope="module")
def shuffled(lettered: tuple[Any, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model and letters in another order."""
    order = [0, 1, *(2 + OWN.index(letter) for letter in SHUFFLED)]
    other = permuted(lettered[0], order)
    return saved(tmp_path_factory.mktemp("shuffled"), other, letters(SHUFFLED))


def lettered_text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, SIZE, n).tolist()


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_the_same_model_with_its_tokens_in_another_order(
    lettered: tuple[Any, str], shuffled: str, vocabulary: str
) -> None:
    """Its drafts are the target's own continuation, step after step."""
    target, folder = lettered
    made = proposer(shuffled, vocab=SIZE, target=folder, vocabulary=vocabulary)
    texts, rng = Texts(a=lettered_text(0, 100), b=lettered_text(1, 2)), np.random.default_rng(0)
    drafted = 0
    for _ in range(12):
        for r, draft in zip(texts.texts, made.propose(texts.step()), strict=True):
            want = greedy(target, texts.texts[r], 5)
            # Text ends where a special token would be drafted.
            special = next((j for j, t in enumerate(want) if t < 2), 5) if vocabulary == "text" else 5
            assert draft.tokens.tolist()[:special] == want[:special]
            drafted += special
            kept = int(rng.integers(0, 1 + min(special, len(draft))))
            texts.texts[r] = [*texts.texts[r], *draft.tokens[:kept].tolist(), int(rng.integers(2, SIZE))]
    assert drafted > 80, "too little was drafted to prove anything"


def test_sampled_drafts_of_an_intersection_have_the_targets_ids(
    lettered: tuple[Any, str], shuffled: str
) -> None:
    target, folder = lettered
    made = proposer(shuffled, vocab=SIZE, target=folder, vocabulary="intersection")
    texts = Texts(a=lettered_text(0, 12))
    (draft,) = made.propose(texts.step(sampling=settings(1, (1.0, 0, 0.9, 0.0))))
    whole = torch.tensor([[*texts.texts["a"], *draft.tokens.tolist()]])
    with torch.inference_mode():
        want = target_probs(target(whole).logits[:, 11:-1], settings(1, (1.0, 0, 0.9, 0.0)))[0]
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs, want, atol=1e-6, rtol=0)


def test_an_intersection_drafts_shared_tokens_only_and_reads_all(
    tmp_path: Path, lettered: tuple[Any, str]
) -> None:
    _, folder = lettered
    some = OWN[:20] + OWN[30:]
    draft = make_model(8, vocab=2 + len(some))
    made = proposer(
        saved(tmp_path / "d", draft, letters(some)), vocab=SIZE, target=folder, vocabulary="intersection"
    )
    missing = {2 + OWN.index(letter) for letter in OWN[20:30]}
    texts = Texts(**{f"{i}": lettered_text(i, 30) for i in range(6)})
    assert any(missing & set(t) for t in texts.texts.values())
    for sampling in (None, settings(6, (1.0, 0, 1.0, 0.0))):
        for d in made.propose(texts.step(sampling=sampling)):
            assert not missing & set(d.tokens.tolist())
            assert len(d) == 5
            if d.probs is not None:
                assert d.probs.shape == (5, SIZE)
                assert float(d.probs[:, list(missing)].abs().sum()) == 0
                torch.testing.assert_close(d.probs.sum(-1), torch.ones(5))


def test_what_one_tokenizer_calls_a_token_is_spelled_for_the_other() -> None:
    a, b = draft_vocabulary.Tokens(byte_level(300), 300), draft_vocabulary.Tokens(metaspace(90), 90)
    assert b.first == []
    assert draft_vocabulary.Tokens(metaspace(90, ("<unk>", "</s>", "<s>")), 90).special == {0, 1, 2}
    shared = a.by_spelling.keys() & b.by_spelling.keys()
    assert {b"t", b" the", b"at"} <= shared, "spaces are written in two ways"
    both = draft_vocabulary.Intersection("d", a, b)
    text = "the cat sat on the mat!"
    ids = np.array(b.tokenizer(text)["input_ids"], np.int32)
    fed, _ = both.read("r", ids)
    assert a.spell(fed) == b.spell(ids) == b" " + text.encode()
    assert a.encode(" the").tolist() == [a.by_spelling[b" the"]]
    assert b.encode(" the").tolist() == [b.by_spelling[b" the"]], "no second space"
    assert b.encode_exactly("at the").tolist() != b.encode("at the").tolist()
    assert b.spell(b.encode_exactly("at the")) == b"at the", "and none where none is"
    assert both.choices is not None
    assert both.targets is not None
    eos = dict(zip(both.choices.tolist(), both.targets.tolist(), strict=True))[a.tokenizer.eos_token_id]
    assert eos == b.tokenizer.eos_token_id


def test_text_is_encoded_anew_at_its_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = draft_vocabulary.Tokens(byte_level(300), 300), draft_vocabulary.Tokens(metaspace(90), 90)
    made, encoded = draft_vocabulary.Text(ours, theirs), []
    encode = draft_vocabulary.Tokens._encode
    monkeypatch.setattr(
        draft_vocabulary.Tokens, "_encode", lambda self, text: encoded.append(len(text)) or encode(self, text)
    )
    rng = np.random.default_rng(0)
    ids = np.array(theirs.tokenizer("the cat sat on the mat and " * 40)["input_ids"])
    previous = np.empty(0, np.int32)
    for turn in range(60):
        fed, same = made.read("r", ids.astype(np.int32))
        assert fed[:same].tolist() == previous[:same].tolist()
        assert ours.spell(fed) == theirs.spell(ids)
        assert same >= len(previous) - 70
        previous = fed.copy()
        ids = np.append(ids, rng.integers(3, 90, 3))
        if turn > 1:
            assert max(encoded[-2:]) < 400
    made.forget("r")
    assert len(made._store) == 0


def test_characters_of_several_bytes_wait_for_their_end() -> None:
    tokens_ = draft_vocabulary.Tokens(byte_level(300), 300)
    made = draft_vocabulary.Text(tokens_, tokens_)
    whole = np.array(tokens_.tokenizer("aé€")["input_ids"], np.int32)
    assert len(whole) == 6
    for n, text in ((1, "a"), (2, "a"), (3, "aé"), (4, "aé"), (5, "aé"), (6, "aé€")):
        fed, _ = made.read("r", whole[:n])
        assert tokens_.spell(fed) == text.encode()
    made.read("s", whole[:2])  # half of é is there: the draft goes on with what is left of it
    assert made.write("s", whole[1:4]).tolist() == whole[2:3].tolist()
    assert made.write("s", whole[:1]).tolist() == []


# ------------------------------------------------------------------------------------------- refusals


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(
    lettered: tuple[Any, str], shuffled: str
) -> None:
    first = next(i for i, (a, b) in enumerate(zip(OWN, SHUFFLED, strict=True)) if a != b)
    with pytest.raises(
        UnsupportedError, match=rf"token {2 + first} is '{OWN[first]}' in the target and .* draft"
    ):
        proposer(shuffled, vocab=SIZE, target=lettered[1])


def test_a_vocabulary_with_more_tokens_is_refused(tmp_path: Path, lettered: tuple[Any, str]) -> None:
    more = saved(tmp_path, make_model(vocab=SIZE + 1), letters(OWN + "~"))
    with pytest.raises(UnsupportedError, match=rf"token {SIZE} is none in the target and '~' in the draft"):
        proposer(more, vocab=SIZE, target=lettered[1])


def test_sizes_are_compared_where_there_is_no_tokenizer(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spec_plugins"):
        proposer(folder, target=folder)
    assert "tokenizer cannot be read" in caplog.text
    with pytest.raises(UnsupportedError, match="has 96 tokens and the target 100"):
        proposer(folder, vocab=100)


@pytest.mark.parametrize("padded", ["draft", "target"])
def test_a_padded_head_is_no_other_vocabulary(tmp_path: Path, padded: str) -> None:
    sizes = {"draft": SIZE, "target": SIZE, padded: SIZE + 7}
    draft, target = (saved(tmp_path / who, make_model(2, vocab=n), letters(OWN)) for who, n in sizes.items())
    made = proposer(draft, vocab=sizes["target"], target=target)
    texts = Texts(a=lettered_text(0, 9), b=lettered_text(1, 5))
    at = settings(2, (9.0, 0, 1.0, 0.0))
    for d in made.propose(texts.step(sampling=at)):
        assert d.tokens.max() < sizes["target"]
        assert d.probs is not None
        assert d.probs.shape == (5, sizes["target"])
    texts.texts["a"].append(sizes["target"] - 1)  # one that no draft of SIZE tokens can be fed
    lengths = [len(d) for d in made.propose(texts.step())]
    texts.texts["a"].append(5)
    assert [len(d) for d in made.propose(texts.step())] == lengths == [5 if padded == "draft" else 0, 5]


def test_a_head_that_lacks_tokens_of_its_tokenizer_is_refused(
    tmp_path: Path, lettered: tuple[Any, str]
) -> None:
    cut = saved(tmp_path, make_model(vocab=SIZE - 1), letters(OWN))
    for vocabulary in ("same", "intersection"):
        with pytest.raises(UnsupportedError, match=f"LM head of {SIZE - 1} tokens, and token {SIZE - 1}"):
            proposer(cut, vocab=SIZE, target=lettered[1], vocabulary=vocabulary)


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_other_vocabularies_need_tokenizers(folder: str, lettered: tuple[Any, str], vocabulary: str) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer of .*cannot be read"):
        proposer(folder, vocab=SIZE, target=lettered[1], vocabulary=vocabulary)
    with pytest.raises(ConfigError, match="tokenizer of the target"):
        proposer(lettered[1], vocab=SIZE, target=None, vocabulary=vocabulary)


def test_vocabularies_with_nothing_in_common_are_refused(tmp_path: Path, lettered: tuple[Any, str]) -> None:
    other = saved(tmp_path, make_model(vocab=5), letters("~#%", ("<unk>", "</s>")))
    proposer(other, vocab=SIZE, target=lettered[1], vocabulary="intersection")  # the special ones are shared
    lone = draft_vocabulary.Tokens(letters("~#%", ("<unk>", "</s>")), 5)
    lone.special, lone.tokenizer = set(), type("None", (), {"bos_token_id": None, "eos_token_id": None})
    with pytest.raises(UnsupportedError, match="0 tokens in common"):
        draft_vocabulary.Intersection("d", lone, draft_vocabulary.Tokens(letters(OWN), SIZE))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="draft_sample_method"):
        check_options(
            DraftModelProposer,
            {"model": "x", "vocabulary": "text", "draft_sample_method": "probabilistic"}, "draft_model",
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"options\.model: missing"):
        load_config("draft_model")
    with pytest.raises(ConfigError, match=r"options\.vocabulary: 'other' is not known"):
        load_config({"proposer": "draft_model", "options": {"model": "x", "vocabulary": "other"}})


# ------------------------------------------------------------------------------------------ bad files


def test_bad_folders(tmp_path: Path, model: Any) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ConfigError) as error:
            proposer(str(folder))
        return str(error.value)

    assert "is no folder with a config.json" in refused(tmp_path / "nothing")
    assert "is no folder with a config.json" in refused(tmp_path)
    assert "cannot be loaded" in refused(_damaged(tmp_path / "truncated", model, lambda data: data[:-1000]))
    assert "cannot be loaded" in refused(_damaged(tmp_path / "garbage", model, lambda data: b"\xff" * 100))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{")
    assert "cannot be loaded" in refused(tmp_path / "config")
    pickled = _damaged(tmp_path / "pickled", model, lambda data: data)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "cannot be loaded" in refused(pickled)


def _damaged(folder: Path, model: Any, change: Any) -> Path:
    saved(folder, model)
    weights = folder / "model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))
    return folder


def test_foreign_code_is_not_run(tmp_path: Path, model: Any) -> None:
    import json

    folder = Path(saved(tmp_path, model))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('foreign code ran')")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        proposer(str(folder))


def test_weights_that_are_no_numbers_or_are_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = make_model()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ConfigError, match=r"no numbers, in model\.layers\.1\.mlp\.up_proj\.weight"):
        proposer(saved(tmp_path / "nan", broken))
    folder = Path(saved(tmp_path / "less", make_model()))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        proposer(str(folder))


def test_models_that_cannot_be_batched_are_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    windowed = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
        )
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="draft_model takes full attention only"):
        proposer(saved(tmp_path, windowed))


def test_a_missing_package_is_named_with_its_extra(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "spec_plugins.proposers.draft_runner")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnavailableError, match=r"pip install 'spec-plugins\[transformers\]'"):
        proposer(folder)


def test_the_class_is_imported_without_torch() -> None:
    import subprocess

    code = "import sys, spec_plugins.proposers.draft_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_near_draft_is_not_the_target(model: Any) -> None:
    """What other tests take for granted: such a draft is right in part only."""
    other = near(model)
    same = [greedy(model, rng_text(i, 9), 1) == greedy(other, rng_text(i, 9), 1) for i in range(30)]
    assert 0 < sum(same) < 30
