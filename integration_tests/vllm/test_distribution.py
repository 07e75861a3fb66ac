"""Sampling from drafts gives the target's own distribution, with draft probabilities and without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_proposers
from offline import ask, statistics_of, token_ids
from trained_drafts import HEADS, METHODS, save_heads

PROMPT = [5, 9, 14, 9, 14]
VOCAB, REQUESTS, TEMPERATURE = 128, 3000, 0.8


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> list[Any]:
    """What transformers gives: the probabilities of the first three tokens after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def after(heads: Any) -> Any:
        with torch.no_grad():
            prompt = torch.tensor(PROMPT).expand(len(heads), -1)
            logits = model(torch.cat([prompt, heads], 1)).logits[:, -1]
        return (logits.double() / TEMPERATURE).softmax(-1).numpy()

    every = torch.arange(VOCAB)
    first = after(torch.empty(1, 0, dtype=torch.long))[0]
    second = after(every[:, None])
    pairs = torch.cartesian_prod(every, every)
    third = np.concatenate([after(part) for part in pairs.reshape(-1, 4096, 2)])
    both = first[:, None] * second
    return [first, both.sum(0), both.reshape(-1) @ third, both]


def surprise(tokens: Any, probabilities: Any) -> float:
    """Pearson's chi-squared in standard deviations (Wilson and Hilferty), rare outcomes taken together."""
    seen = np.bincount(tokens, minlength=probabilities.size).astype(float)
    expected = probabilities.reshape(-1) * len(tokens)
    common = expected >= 8
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    free = len(seen) - 1
    chi2 = float(((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    return float(((chi2 / free) ** (1 / 3) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free)))


def surprises(tokens: Any, exact: list[Any]) -> dict[str, float]:
    """Of each of the first three tokens, and of the first two together."""
    first, second, third, both = exact
    return {
        "first": surprise(tokens[:, 0], first),
        "second": surprise(tokens[:, 1], second),
        "third": surprise(tokens[:, 2], third),
        "both": surprise(tokens[:, 0] * VOCAB + tokens[:, 1], both),
    }


@pytest.mark.parametrize("proposer", ["toy-sampled", "toy-likely", "toy-wrong-q"])
def test_the_distribution_is_the_targets(
    make_engine: Any, exact: list[Any], proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens are drafted after the first. The last proposer lies about its probabilities: the control."""
    from vllm import SamplingParams

    toy_proposers.register()
    likely = [int(p.argmax()) for p in exact[1:3]]
    monkeypatch.setattr(toy_proposers.Likely, "tokens", likely)
    with make_engine(proposer, k=2, max_num_seqs=256) as llm:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=4, ignore_eos=True)
        tokens = np.array(token_ids(ask(llm, [PROMPT] * REQUESTS, params)))
        figures = statistics_of(llm).snapshot()
    assert figures["faults"] == {}
    assert figures["accepted_by_position"][0] > 0.005 * REQUESTS
    found = surprises(tokens, exact)
    assert found["first"] < 4
    if proposer == "toy-wrong-q":
        assert found["second"] > 8, found
        assert found["third"] > 8, found
    else:
        assert max(found.values()) < 4, found


def test_trained_proposers_keep_the_distribution(
    make_engine: Any,
    tiny_model: Path,
    exact: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They draw their drafts from distributions of their own."""
    from vllm import SamplingParams

    toy_proposers.register()
    monkeypatch.setenv(HEADS, str(save_heads(tmp_path, tiny_model)))
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=4, ignore_eos=True)
    with make_engine("toy-trained", k=2, max_num_seqs=256, enable_prefix_caching=False) as llm:
        for method in METHODS:
            accepted = statistics_of(llm).snapshot()["accepted_tokens"]
            answers = ask(llm, [PROMPT] * (REQUESTS // 2), params, cache_salt=method)
            found = surprises(np.array(token_ids(answers)), exact)
            figures = statistics_of(llm).snapshot()
            assert figures["faults"] == {}
            assert figures["accepted_tokens"] - accepted > 0.02 * REQUESTS, method
            assert max(found.values()) < 4, (method, found)


def test_vllms_own_faults_are_mended_and_nothing_else_is_touched(make_engine: Any) -> None:
    """Without the mending the test above fails, and a request with top_k may end the engine."""
    import torch
    from vllm.v1.sample import rejection_sampler

    from spec_plugins.adapters.vllm.engine_faults import mend

    with make_engine("suffix"):
        spread = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 3)
        assert spread.tolist() == [0.5, 2.0, 2.0]
        none = torch.empty(0, dtype=torch.int32)
        assert rejection_sampler.apply_top_k_top_p(torch.empty(0, 4), none, None).shape == (0, 4)
    assert mend("cpu") == [], "it is right by now"
    right = rejection_sampler.expand_batch_to_tokens

    def wrong(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        return torch.zeros(num_tokens)

    try:
        rejection_sampler.expand_batch_to_tokens = wrong
        assert mend("cuda") == [], "only the CPU's is known to be wrong"
        assert mend("cpu") == ["expand_batch_to_tokens"]
        rejection_sampler.expand_batch_to_tokens = unknown = lambda x: x
        assert mend("cpu") == [], "one that is not as expected is left alone"
        assert rejection_sampler.expand_batch_to_tokens is unknown
    finally:
        rejection_sampler.expand_batch_to_tokens = right
