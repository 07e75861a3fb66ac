"""A draft model in the embedded engine: outputs stay, and a draft that is the target is always right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from spec_plugins import Draft, Proposer, Step, Target  # noqa: E402
from spec_plugins.adapters.transformers import Engine, SamplingParams  # noqa: E402
from spec_plugins.config import load_config  # noqa: E402

VOCAB, LONG = 96, SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def model(random_model: Any) -> Any:
    return random_model()


@pytest.fixture(scope="module")
def folders(model: Any, random_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Drafts: the target itself, one that is often right, and a small one that is not."""
    near, generator = random_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in near.parameters():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    small = random_model(5, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    made = {}
    for name, draft in {"itself": model, "near": near, "small": small}.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        draft.save_pretrained(made[name])
    return made


def spec(folder: str, **options: Any) -> dict[str, Any]:
    return {
        "proposer": "draft_model",
        "num_speculative_tokens": 5,
        "options": {"model": folder, **options},
        "containment": {"time_allowance_ms": 60_000.0},  # loaded machines
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, VOCAB, n).tolist() for n in (1, 18, 7, 40, 30)]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [a.token_ids for a in Engine(model, None, None).generate(prompts, LONG)]


@pytest.mark.parametrize(("name", "max_num_seqs"), [("itself", 1), ("itself", 3), ("near", 3), ("small", 3)])
def test_greedy_output_stays(
    model: Any, prompts: list[list[int]], expected: list[list[int]], folders: dict[str, str], name: str,
    max_num_seqs: int,
) -> None:  # fmt: skip
    engine = Engine(model, None, spec(folders[name]), max_num_seqs=max_num_seqs)
    answers = engine.generate(prompts, LONG)
    assert [a.token_ids for a in answers] == expected
    assert engine.driver is not None
    figures = engine.driver.statistics
    assert not figures.faults
    if name == "itself":
        assert figures.accepted_tokens == figures.draft_tokens > 80
    if name == "near":
        assert 0.1 * figures.draft_tokens < figures.accepted_tokens < 0.9 * figures.draft_tokens
    assert set(engine.driver.gauges().values()) == {0.0}


class Corrupted(Proposer):
    """Another's drafts with one token made wrong, from which on they must be rejected; some steps are hidden
    from it, and some requests taken away from it."""

    def __init__(self, inner: Proposer, seed: int = 0) -> None:
        self.inner, self.rng = inner, np.random.default_rng(seed)
        self.uses = inner.uses  # type: ignore[misc]
        self.right = self.hidden = 0
        self.missed: dict[str, int] = {}

    def load(self, target: Target) -> None:
        self.inner.load(target)

    def propose(self, step: Step) -> Sequence[Draft]:
        import dataclasses

        none = [Draft(np.empty(0, np.int32)) for _ in range(len(step))]
        chance = self.rng.random()
        if chance < 0.2:
            self.hidden += 1
            for r, fresh in zip(step.request_ids, step.fresh.tolist(), strict=True):
                self.missed[r] = self.missed.get(r, 0) + fresh
            return none
        if chance < 0.3:
            self.finish(step.request_ids[0])
        fresh = step.fresh + [self.missed.pop(r, 0) for r in step.request_ids]
        if chance < 0.3:
            fresh[0] = step.lengths[0]
        made = []
        for draft in self.inner.propose(dataclasses.replace(step, fresh=fresh.astype(np.int32))):
            tokens, cut = draft.tokens.copy(), int(self.rng.integers(0, len(draft) + 1))
            tokens[cut : cut + 1] = (tokens[cut : cut + 1] + 1) % VOCAB
            self.right += cut
            made.append(Draft(tokens, probs=None))
        return made

    def finish(self, request_id: str) -> None:
        self.missed.pop(request_id, None)
        self.inner.finish(request_id)


def test_after_rejections_and_missed_steps_the_cache_is_right(
    model: Any, prompts: list[list[int]], expected: list[list[int]], folders: dict[str, str]
) -> None:
    config = load_config(spec(folders["itself"]))
    corrupted = Corrupted(config.create_proposer())
    engine = Engine(model, None, config, proposer=corrupted, max_num_seqs=3)
    assert [a.token_ids for a in engine.generate(prompts, LONG)] == expected
    assert engine.driver is not None
    figures = engine.driver.statistics
    assert not figures.faults
    assert corrupted.hidden > 3
    assert figures.accepted_tokens == corrupted.right > 20
    assert figures.accepted_tokens < figures.draft_tokens


def test_sampled_drafts_of_the_target_itself_are_all_accepted(
    model: Any, prompts: list[list[int]], folders: dict[str, str]
) -> None:
    kinds = [(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 12, 1.0, 0.0), (1.2, 0, 0.8, 0.02)]
    params = [
        SamplingParams(max_new_tokens=24, temperature=t, top_k=k, top_p=p, min_p=m, seed=i)
        for i, (t, k, p, m) in enumerate((kinds * 2)[: len(prompts)])
    ]
    answers = []
    for method in ("probabilistic", "probabilistic", "greedy"):
        engine = Engine(model, None, spec(folders["itself"], draft_sample_method=method), max_num_seqs=3)
        answers.append([a.token_ids for a in engine.generate(prompts, params)])
        assert engine.driver is not None
        figures = engine.driver.statistics
        assert not figures.faults
        assert (figures.accepted_tokens == figures.draft_tokens) == (method == "probabilistic")
        assert figures.accepted_tokens > 30
    assert answers[0] == answers[1], "the same requests in the same order give the same"
    assert answers[0] != answers[2]


def test_requests_that_do_not_speculate_cost_nothing(
    model: Any, prompts: list[list[int]], expected: list[list[int]], folders: dict[str, str]
) -> None:
    engine = Engine(model, None, spec(folders["near"]), max_num_seqs=3)
    off = SamplingParams(max_new_tokens=24, num_speculative_tokens=0)
    done = engine.generate(prompts, [LONG if i % 2 else off for i in range(len(prompts))])
    assert [a.token_ids for a in done] == expected
    assert done[0].statistics.draft_tokens == 0 < done[1].statistics.draft_tokens


def test_in_a_combination(
    model: Any, prompts: list[list[int]], expected: list[list[int]], folders: dict[str, str]
) -> None:
    parts = ["ngram", {"name": "draft_model", "options": {"model": folders["near"]}}]
    for mode in ("ordered", "merged"):
        config = {**spec(""), "proposer": "combine", "options": {"proposers": parts, "mode": mode}}
        engine = Engine(model, None, config, max_num_seqs=3)
        assert [a.token_ids for a in engine.generate(prompts, LONG)] == expected
        assert engine.driver is not None
        assert not engine.driver.statistics.faults


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_a_draft_with_another_tokenizer(tiny_pair: tuple[Any, Any, str], vocabulary: str) -> None:
    target, tokenizer, folder = tiny_pair
    asked = ["the cat sat", "on the mat", "abc def", "!"]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    want = [a.token_ids for a in Engine(target, tokenizer, None).generate(asked, params)]
    engine = Engine(target, tokenizer, spec(folder, vocabulary=vocabulary), max_num_seqs=3)
    assert [a.token_ids for a in engine.generate(asked, params)] == want
    assert engine.driver is not None
    assert not engine.driver.statistics.faults
    assert engine.driver.statistics.draft_tokens > 10
    sampled = SamplingParams(max_new_tokens=16, temperature=1.0, ignore_eos=True)
    engine.generate(asked, sampled)
    assert not engine.driver.statistics.faults


@pytest.fixture(scope="module")
def tiny_pair(random_model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    """Two random models whose tokenizers share some tokens: Llama 2's kind, and GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = [
        "the cat sat on the mat and that was that",
        "abcdefghijklmnopqrstuvwxyz",
        "a boat on the sea!",
    ] * 3
    found = []
    for kind, size in ((pre_tokenizers.Metaspace(), 90), (pre_tokenizers.ByteLevel(), 300)):
        byte_level = isinstance(kind, pre_tokenizers.ByteLevel)
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = kind
        made.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
        alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(text, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
        folder: Path = tmp_path_factory.mktemp("pair")
        model = random_model(7, vocab=len(tokenizer.get_vocab()), eos_token_id=1)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        model.name_or_path = model.config._name_or_path = str(folder)
        found.append((model, tokenizer, str(folder)))
    return found[0][0], found[0][1], found[1][2]
