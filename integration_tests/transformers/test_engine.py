"""The embedded engine with small random models in float64, where equal means equal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from scipy import stats  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from spec_plugins import ConfigError, Draft, Need, Proposer, Step, UnsupportedError  # noqa: E402
from spec_plugins.adapters.transformers import Engine, SamplingParams, engine, generate  # noqa: E402
from spec_plugins.verification import Verdict  # noqa: E402

VOCAB = 96
SPECS: dict[str, Any] = {
    "ngram": {"proposer": "ngram", "num_speculative_tokens": 5},
    "ngram-frequent": {"proposer": "ngram", "options": {"prefer": "most_frequent"}},
    "suffix": {"proposer": "suffix", "num_speculative_tokens": 6, "max_draft_nodes": 12},
    "suffix-chain": {"proposer": "suffix", "options": {"tree": False}},
    "lookahead": {"proposer": "lookahead", "num_speculative_tokens": 6, "max_draft_nodes": 24},
    "lookahead-narrow": {"proposer": "lookahead", "num_speculative_tokens": 3},
    "combine": {"proposer": "combine", "options": {"proposers": ["suffix", "ngram"]}},
    "combine-merged": {
        "proposer": "combine",
        "max_draft_nodes": 16,
        "options": {"proposers": ["suffix", "lookahead", "ngram"], "mode": "merged"},
    },
}


@pytest.fixture(scope="module")
def model(random_model: Any) -> Any:
    return random_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    repeating = [rng.integers(1, VOCAB, 6).tolist() * 3 for _ in range(4)]
    return [*repeating, *[rng.integers(1, VOCAB, n).tolist() for n in (1, 7, 40)]]


def plain(model: Any, prompts: list[list[int]], n: int = 40, eos: int | None = None) -> list[list[int]]:
    """transformers' own greedy answer, one prompt at a time."""
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return plain(model, prompts)


def outputs(model: Any, prompts: Any, spec: Any, **params: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, prompts, spec, **{"max_new_tokens": 40, **params})]


class Oracle(Proposer):
    """Drafts the true answer as one branch of a tree, wrong tokens as the others."""

    bounded = True

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong_first: bool) -> None:
        self.answers, self.wrong_first = answers, wrong_first

    def propose(self, step: Step) -> list[Draft]:
        return [self._draft(step, i) for i in range(len(step))]

    def _draft(self, step: Step, i: int) -> Draft:
        prompt = tuple(step.tokens(i)[: step.prompt_lengths[i]].tolist())
        done = int(step.lengths[i] - step.prompt_lengths[i])
        right = self.answers[prompt][done : done + min(step.depths[i], step.budgets[i] // 2)]
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in right:
            pair = [(token + 1) % VOCAB, token] if self.wrong_first else [token, (token + 1) % VOCAB]
            tokens += pair
            parents += [last, last]
            last = len(tokens) - 1 if self.wrong_first else len(tokens) - 2
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class TestGreedy:
    @pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
    def test_plain_equals_transformers(
        self, model: Any, prompts: list[list[int]], expected: list[list[int]], max_num_seqs: int
    ) -> None:
        assert outputs(model, prompts, None, max_num_seqs=max_num_seqs) == expected

    @pytest.mark.parametrize("max_num_seqs", [1, 3])
    @pytest.mark.parametrize("name", SPECS)
    def test_every_proposer_leaves_output_as_it_is(
        self, model: Any, prompts: list[list[int]], expected: list[list[int]], name: str, max_num_seqs: int
    ) -> None:
        made = Engine(model, None, SPECS[name], max_num_seqs=max_num_seqs)
        answers = made.generate(prompts, SamplingParams(max_new_tokens=40))
        assert [a.token_ids for a in answers] == expected
        assert made.driver is not None
        figures = made.driver.statistics
        assert not figures.faults
        assert figures.accepted_tokens > 20, "too little was accepted to prove anything"

    @pytest.mark.parametrize("wrong_first", [False, True])
    def test_trees_are_followed_to_the_end(
        self, model: Any, prompts: list[list[int]], expected: list[list[int]], wrong_first: bool
    ) -> None:
        answers = {tuple(p): a for p, a in zip(prompts, expected, strict=True)}
        made = Engine(
            model, None, {"num_speculative_tokens": 6, "max_draft_nodes": 12}, max_num_seqs=3,
            proposer=Oracle(answers, wrong_first),
        )  # fmt: skip
        done = made.generate(prompts, SamplingParams(max_new_tokens=40))
        assert [a.token_ids for a in done] == expected
        # 39 tokens after the prefill's, 7 a step
        assert {a.statistics.verify_steps for a in done} == {6}

    def test_a_verifier_that_accepts_everything_is_caught(
        self, model: Any, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def accept_all(logits: Any, drafts: Any, *_: Any) -> Verdict:
            honest = verify(logits, drafts, *_)
            if drafts.parents is not None or not drafts.counts.any():
                return honest
            width = drafts.tokens.shape[1]
            last = logits.argmax(-1).numpy()
            rows = np.arange(len(drafts))
            tokens = np.full((len(drafts), width + 1), -1, np.int32)
            tokens[:, :width] = drafts.tokens
            tokens[rows, drafts.counts] = last[rows, drafts.counts]
            path = np.where(np.arange(width) < drafts.counts[:, None], np.arange(width), -1)
            return Verdict(accepted=drafts.counts, path=path.astype(np.int32), tokens=tokens)

        verify = engine.verify
        monkeypatch.setattr(engine, "verify", accept_all)
        assert outputs(model, prompts, SPECS["ngram"]) != expected

    def test_misplaced_keys_are_caught(
        self, model: Any, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = {tuple(p): a for p, a in zip(prompts, expected, strict=True)}
        monkeypatch.setattr("spec_plugins.row_cache.RowCache.move", lambda *_: None)
        made = Engine(model, None, {"max_draft_nodes": 12}, proposer=Oracle(answers, wrong_first=True))
        done = made.generate(prompts, SamplingParams(max_new_tokens=40))
        assert [a.token_ids for a in done] != expected

    def test_eager_attention(self, random_model: Any, prompts: list[list[int]]) -> None:
        eager = random_model(attn_implementation="eager")
        assert outputs(eager, prompts, SPECS["suffix"]) == plain(eager, prompts)

    def test_end_token(self, model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        eos = expected[0][11]
        model.generation_config.eos_token_id = eos
        try:
            want = plain(model, prompts, eos=eos)
            for spec in (None, SPECS["ngram"], SPECS["suffix"]):
                done = generate(model, prompts, spec, max_new_tokens=40, max_num_seqs=3)
                assert [c.token_ids for c in done] == want
                assert done[0].finish_reason == "stop"
                assert outputs(model, prompts, spec, ignore_eos=True) == expected
        finally:
            model.generation_config.eos_token_id = None

    def test_stop_token(self, model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        stop = expected[1][7]
        cut = [a[: a.index(stop) + 1] if stop in a else a for a in expected]
        for spec in (None, SPECS["ngram"]):
            assert outputs(model, prompts, spec, stop_token_ids=(stop,)) == cut

    def test_the_end_of_the_context(self, model: Any) -> None:
        prompt = [1, 2, 3] * 82  # 246 of 256
        for spec in (None, *SPECS.values()):
            (done,) = generate(model, [prompt], spec, max_new_tokens=40)
            assert len(done.token_ids) == 10
            assert done.finish_reason == "length"

    def test_one_token(self, model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        assert outputs(model, prompts, SPECS["ngram"], max_new_tokens=1) == [a[:1] for a in expected]

    def test_no_state_is_left(self, model: Any, prompts: list[list[int]]) -> None:
        for spec in SPECS.values():
            made = Engine(model, None, spec, max_num_seqs=3)
            made.generate(prompts, SamplingParams(max_new_tokens=12))
            assert made.driver is not None
            assert len(made.tokens) == 0
            assert not made._states
            assert not made._predictions
            gauges = made.driver.proposer.gauges()
            assert all(v == 0 for k, v in gauges.items() if k.endswith("requests")), gauges
            gone = weakref.ref(made)
            del made
            gc.collect()
            assert gone() is None

    def test_a_cache_that_grows(self, model: Any, prompts: list[list[int]]) -> None:
        made = Engine(model, None, SPECS["suffix"], max_num_seqs=2)
        made.target.cache.capacity = 8
        done = made.generate(prompts, SamplingParams(max_new_tokens=60))
        assert [a.token_ids for a in done] == plain(model, prompts, 60)


class TestRequests:
    def test_opting_out(self, model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        made = Engine(model, None, SPECS["ngram"])
        off = SamplingParams(max_new_tokens=40, num_speculative_tokens=0)
        short = SamplingParams(max_new_tokens=40, num_speculative_tokens=1)
        done = made.generate(prompts[:3], [SamplingParams(max_new_tokens=40), off, short])
        assert [a.token_ids for a in done] == expected[:3]
        assert done[0].statistics.draft_tokens > done[2].statistics.draft_tokens > 0
        assert done[1].statistics.draft_tokens == 0
        assert done[2].statistics.draft_tokens == done[2].statistics.drafts

    def test_leaving_a_stream_aborts(self, model: Any, prompts: list[list[int]]) -> None:
        made = Engine(model, None, SPECS["suffix"], max_num_seqs=2)
        stream = made.stream(prompts, SamplingParams(max_new_tokens=40))
        next(stream)
        stream.close()
        assert not made.running
        assert not made.waiting
        assert len(made.tokens) == 0

    def test_streamed_tokens(self, model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        got: list[list[int]] = [[] for _ in prompts]
        reasons = []
        for delta in Engine(model, None, SPECS["ngram"], max_num_seqs=3).stream(
            prompts, SamplingParams(max_new_tokens=40)
        ):
            got[delta.index] += delta.token_ids
            reasons += [delta.finish_reason] if delta.finish_reason else []
        assert got == expected
        assert reasons == ["length"] * len(prompts)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "prompt 0 is empty"),
            ([1] * 300, "300 tokens"),
            ([5, 96], "token 96"),
            ("text", "needs a tokenizer"),
        ],
    )
    def test_bad_prompts(self, model: Any, prompt: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            generate(model, [prompt])

    def test_stop_strings_need_a_tokenizer(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="stop_token_ids"):
            generate(model, [[1]], stop=("x",))

    def test_native_route_is_refused(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="route"):
            Engine(model, None, {"route": "native"})

    def test_bad_sampling_settings(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="temperature"):
            generate(model, [[1]], temperature=-1)
        with pytest.raises(ConfigError, match="max_new_tokens"):
            generate(model, [[1]], max_tokens=3)


class TestModels:
    def test_sliding_windows_are_refused(self) -> None:
        windowed = MistralForCausalLM(
            MistralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                sliding_window=8,
            )
        )
        with pytest.raises(UnsupportedError, match="layers of sliding_attention"):
            Engine(windowed)

    def test_models_without_positions_are_refused(self) -> None:
        bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
        with pytest.raises(UnsupportedError, match="position_ids"):
            Engine(bloom)

    @pytest.mark.parametrize("family", ["gpt2", "qwen2", "gpt_neox"])
    def test_other_families(self, family: str, prompts: list[list[int]]) -> None:
        torch.manual_seed(2)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        if family == "qwen2":
            sizes["num_key_value_heads"] = 2
        if family == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        config = AutoConfig.for_model(
            family,
            vocab_size=VOCAB,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            initializer_range=0.2,
            **sizes,
        )
        other = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
        want = plain(other, prompts, 24)
        for spec in (None, SPECS["suffix"], SPECS["lookahead"]):
            assert outputs(other, prompts, spec, max_new_tokens=24, max_num_seqs=3) == want

    def test_other_attention_is_refused(self, random_model: Any) -> None:
        other = random_model()
        other.config._attn_implementation = "flex_attention"
        with pytest.raises(UnsupportedError, match="sdpa"):
            Engine(other)


class Watcher(Proposer):
    """Drafts like prompt lookup, wrong half the time, and keeps every step it is given."""

    bounded = True
    needs: ClassVar[frozenset[Need]] = frozenset(
        {
            Need.HIDDEN_STATES,
            Need.AUX_HIDDEN_STATES,
            Need.PREDICTIONS,
            Need.SAMPLING,
            Need.EMBEDDINGS,
            Need.LM_HEAD,
        }
    )

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.target: Any = None

    def load(self, target: Any) -> None:
        self.target = target

    def propose(self, step: Step) -> Sequence[Draft]:
        drafts = []
        for i in range(len(step)):
            assert step.hidden_states is not None
            assert step.aux_hidden_states is not None
            assert step.predictions is not None
            assert step.verified is not None
            self.seen.append(
                {
                    "tokens": step.tokens(i).copy(),
                    "hidden": step.hidden_states[i].clone(),
                    "aux": step.aux_hidden_states[i].clone(),
                    "verified": step.verified[i],
                    "predictions": step.predictions[i].copy(),
                    "fresh": int(step.fresh[i]),
                }
            )
            last = step.tokens(i)[-6:]
            drafts.append(Draft(last[: min(len(last), int(step.depths[i]))].copy()))
        return drafts


def test_what_a_proposer_sees_is_the_targets(model: Any, prompts: list[list[int]]) -> None:
    watcher = Watcher()
    made = Engine(model, None, {"num_speculative_tokens": 6}, proposer=watcher, max_num_seqs=3)
    made.generate(prompts, SamplingParams(max_new_tokens=20))
    assert watcher.target.embeddings() is model.get_input_embeddings().weight
    assert watcher.target.lm_head() is model.get_output_embeddings().weight
    assert any(s["fresh"] > 1 and s["verified"] is not None for s in watcher.seen), "nothing was accepted"
    for seen in watcher.seen:
        tokens = seen["tokens"]
        with torch.inference_mode():
            out = model(torch.tensor(tokens[None], dtype=torch.long), output_hidden_states=True)
        m = len(seen["hidden"])
        assert m == (seen["fresh"] if seen["verified"] is not None else len(tokens) - 1)
        where = slice(len(tokens) - 1 - m, len(tokens) - 1)
        torch.testing.assert_close(seen["hidden"], out.hidden_states[-1][0, where])
        aux = torch.cat([out.hidden_states[1][0, where], out.hidden_states[2][0, where]], -1)
        torch.testing.assert_close(seen["aux"], aux)
        if seen["verified"] is None:
            assert not len(seen["predictions"])
            continue
        before = tokens[: len(tokens) - seen["fresh"]]
        drafted = np.concatenate([before, seen["verified"].tokens]).astype(np.int64)
        best = model(torch.tensor(drafted[None])).logits[0, len(before) - 1 :].argmax(-1)
        assert seen["predictions"].tolist() == best.tolist()


class Raising(Proposer):
    """Fails every time."""

    def propose(self, step: Step) -> list[Draft]:
        raise RuntimeError("on purpose")


class Garbage(Proposer):
    """Anything but drafts."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, step: Step) -> Any:
        self.calls += 1
        n = len(step)
        return [
            None,
            [Draft(np.array([VOCAB, -1, 2**31 - 1], np.int32))] * n,
            [Draft(np.array([1, 2], np.int32), np.array([5, 5], np.int32))] * n,
            [Draft(np.array([[1.5]]))] * n,  # type: ignore[arg-type]
            [Draft(np.array([3], np.int32), probs=torch.full((1, VOCAB), torch.nan))] * n,
        ][self.calls % 5]


@pytest.mark.parametrize("proposer", [Raising, Garbage])
def test_a_failing_proposer_changes_nothing(
    model: Any, prompts: list[list[int]], expected: list[list[int]], proposer: type[Proposer]
) -> None:
    spec = {"containment": {"max_faults": 1000, "time_allowance_ms": 60_000}}
    made = Engine(model, None, spec, proposer=proposer(), max_num_seqs=3)
    done = made.generate(prompts, SamplingParams(max_new_tokens=40))
    assert [a.token_ids for a in done] == expected
    assert made.driver is not None
    assert made.driver.statistics.faults.total() > 10


class TestSampling:
    """Two tokens from a small model against its exact probabilities."""

    VOCAB, SAMPLES, SEEDS = 6, 192, 20

    @pytest.fixture
    def small(self, random_model: Any) -> Any:
        return random_model(3, vocab=self.VOCAB, initializer_range=0.3, num_hidden_layers=1, hidden_size=16)

    def joint(self, model: Any, prompt: list[int], temperature: float) -> np.ndarray:
        """P(second, third | prompt, first = greedy): what the verified step commits, and the one after."""
        probs = np.zeros((self.VOCAB, self.VOCAB))
        with torch.inference_mode():
            first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
            for a in range(self.VOCAB):
                after = torch.softmax(model(torch.tensor([[*prompt, a]])).logits[0, -1] / temperature, -1)
                probs[a] = (first[a] * after).numpy()
        return probs

    def p_values(self, model: Any, spec: Any, proposer: Proposer | None = None) -> list[float]:
        prompt, temperature = [1, 2, 3, 4, 1, 2, 3], 0.8
        # The prefill's token is discarded by forcing it: three tokens are sampled, the first is marginalised.
        triple = np.zeros((self.VOCAB,) * 3)
        with torch.inference_mode():
            first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1).numpy()
        for a in range(self.VOCAB):
            triple[a] = first[a] * self.joint(model, [*prompt, a], temperature)
        made = Engine(model, None, spec, proposer=proposer, max_num_seqs=32)
        values = []
        for seed in range(self.SEEDS):
            params = [
                SamplingParams(max_new_tokens=3, temperature=temperature, seed=1000 * seed + i)
                for i in range(self.SAMPLES)
            ]
            done = made.generate([prompt] * self.SAMPLES, params)
            counts = np.zeros_like(triple)
            for answer in done:
                counts[tuple(answer.token_ids)] += 1
            # Second and third token together, summed over the first: 36 cells.
            values.append(
                float(stats.chisquare(counts.sum(0).ravel(), triple.sum(0).ravel() * self.SAMPLES).pvalue)
            )
        return values

    def is_exact(self, values: list[float]) -> bool:
        """Fisher's method over the seeds; a false alarm once in a million."""
        return bool(stats.combine_pvalues(values).pvalue > 1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [None, "ngram", "suffix", "lookahead"])
    def test_distribution(self, small: Any, name: str | None) -> None:
        assert self.is_exact(self.p_values(small, SPECS[name] if name else None))

    @pytest.mark.slow
    def test_a_broken_verifier_is_caught(self, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        verify = engine.verify

        def greedy_on_drafts(logits: Any, drafts: Any, sampling: Any, *rest: Any) -> Verdict:
            return verify(logits, drafts, None if drafts.counts.any() else sampling, *rest)

        monkeypatch.setattr(engine, "verify", greedy_on_drafts)
        assert not self.is_exact(self.p_values(small, SPECS["ngram"]))

    def test_seeds_repeat(self, small: Any) -> None:
        params = SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.9, top_k=4, min_p=0.02, seed=5)
        for spec in (None, SPECS["ngram"]):
            alone = outputs(small, [[1, 2, 3]], spec, **params.model_dump())
            batch = outputs(small, [[3, 1], [1, 2, 3], [2]], spec, **params.model_dump())
            assert alone[0] == batch[1]
