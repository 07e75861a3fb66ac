"""Sampling from drafts gives the target's own distribution, with draft probabilities and without; SGLang's
own verification on a CPU does not."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from engine_settings import ON_CPU
from speculating import configured, figures_of
from trained_drafts import HEADS, METHODS, save_heads

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 14, 9, 14]
VOCAB, REQUESTS, TEMPERATURE = 128, 2400, 0.8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.1},
}


@pytest.fixture(scope="module")
def logits(tiny_model: Path) -> Any:
    """Hugging Face's, ``[heads, vocab]``: after the prompt, with each token after it, and with each pair."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def after(heads: Any) -> Any:
        with torch.no_grad():
            prompt = torch.tensor(PROMPT).expand(len(heads), -1)
            return model(torch.cat([prompt, heads], 1)).logits[:, -1].double().numpy()

    every = torch.arange(VOCAB)
    pairs = torch.cartesian_prod(every, every).split(2048)
    third = np.concatenate([after(part) for part in pairs])
    return after(torch.empty(1, 0, dtype=torch.long)), after(every[:, None]), third


def filtered(logits: Any, top_p: float = 1.0, top_k: int = VOCAB, min_p: float = 0.0) -> Any:
    """Probabilities of each row, written out in numpy: what SGLang's own sampler does, in its order."""
    scaled = logits / TEMPERATURE
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for row in p:
        order = np.argsort(-row, kind="stable")
        ranked = row[order]
        before = np.cumsum(ranked) - ranked
        dropped = (np.arange(VOCAB) >= top_k) | (before > top_p) | (ranked < min_p * ranked[0])
        row[order[dropped]] = 0
    return p / p.sum(-1, keepdims=True)


def surprise(tokens: Any, probabilities: Any) -> float:
    """Pearson's chi-squared in standard deviations (Wilson and Hilferty), rare outcomes taken together."""
    seen = np.bincount(tokens, minlength=probabilities.size).astype(float)
    expected = probabilities.reshape(-1) * len(tokens)
    if seen[expected == 0].any():
        return math.inf
    common = expected >= 8
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    free = len(seen) - 1
    chi2 = float(((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    return float(((chi2 / free) ** (1 / 3) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free)))


def sampled(engine: Any, **settings: Any) -> Any:
    """``[requests, 3]`` tokens after the prompt, by drafts without probabilities."""
    params = {"temperature": TEMPERATURE, "max_new_tokens": 4, "ignore_eos": True, **settings}
    answers = engine.generate(input_ids=[PROMPT] * REQUESTS, sampling_params=params)
    return np.array([a["output_ids"][:3] for a in answers])


@pytest.fixture(scope="module")
def likely(logits: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Drafts of which some are accepted: two tokens and another, as a tree; with a salt, drawn ones."""
    first, second, _ = logits
    probabilities = filtered(first)[0]
    after = probabilities @ filtered(second)
    order = np.argsort(-after)
    tokens = [int(order[0]), int(order[0]), int(order[1])]
    file = tmp_path_factory.mktemp("after") / "after.npy"
    np.save(file, filtered(second).astype(np.float32))
    heads = save_heads(tmp_path_factory.mktemp("heads"), tiny_model)
    set_here = {toys.LIKELY: json.dumps(tokens), toys.AFTER: str(file), HEADS: str(heads)}
    os.environ |= set_here
    fields = {"proposer": "toy-drawn", "num_speculative_tokens": 2, "max_draft_nodes": 3}
    with configured(fields) as algorithm:
        yield algorithm
    for name in set_here:
        del os.environ[name]


def surprises(tokens: Any, logits: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Of the first token, and of the first two together."""
    first, second = (filtered(each, **settings) for each in logits[:2])
    both = first[0][:, None] * second
    return {
        "first": surprise(tokens[:, 0], first[0]),
        "second": surprise(tokens[:, 1], both.sum(0)),
        "both": surprise(tokens[:, 0] * VOCAB + tokens[:, 1], both),
    }


def surprises_of_drawn(tokens: Any, logits: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Of each token by itself; there are fewer requests, and so none of pairs."""
    first, second = (filtered(each, **settings) for each in logits[:2])
    both = first[0][:, None] * second
    found = {"first": surprise(tokens[:, 0], first[0]), "second": surprise(tokens[:, 1], both.sum(0))}
    if not settings:
        found["third"] = surprise(tokens[:, 2], both.reshape(-1) @ filtered(logits[2]))
    return found


DRAWN: list[tuple[str, dict[str, Any]]] = [
    ("same", {}), ("chain", {}), ("tree", {}), ("liar", {}), ("", {}),
    ("chain", {"top_p": 0.8}), ("tree", {"top_k": 12}), ("chain", {"min_p": 0.1}),
    *((method, {}) for method in METHODS), ("chain", {"top_k": 1}),
]  # fmt: skip
"""Ways to draw, and settings; the last is greedy."""


def drawn(engine: Any, requests: int) -> tuple[list[Any], list[float]]:
    """All of :data:`DRAWN` in the same batches: for each ``[requests, 3]`` tokens after the prompt, and how
    many draft tokens of a request were accepted."""
    each = DRAWN * requests
    answers = engine.generate(
        input_ids=[PROMPT] * len(each),
        sampling_params=[
            {"temperature": TEMPERATURE, "max_new_tokens": 4, "ignore_eos": True, **settings}
            for _, settings in each
        ],
        cache_salt=[way for way, _ in each],
    )
    tokens = np.array([a["output_ids"][:3] for a in answers]).reshape(requests, len(DRAWN), 3)
    accepted = [a["meta_info"]["spec_num_correct_drafts"] for a in answers]
    return list(tokens.swapaxes(0, 1)), np.array(accepted).reshape(requests, len(DRAWN)).mean(0).tolist()


def test_the_distribution_is_the_targets(make_engine: Any, likely: str, logits: Any) -> None:
    """With every setting, and greedy requests beside them; trees are drafted in every step. Then with draft
    probabilities, true ones and, as the control, false ones."""
    with make_engine(
        speculative_algorithm=likely, max_running_requests=200, max_total_tokens=16000
    ) as engine:
        found = {name: surprises(sampled(engine, **s), logits, s) for name, s in SETTINGS.items()}
        (greedy,) = engine.generate(
            input_ids=[PROMPT], sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        )
        figures = figures_of(engine)
        tokens, accepted = drawn(engine, REQUESTS // 4)
        faults = figures_of(engine)["faults"]
    assert faults == {}
    assert figures["accepted_tokens"] > 0.01 * REQUESTS * len(SETTINGS)
    assert max(max(each.values()) for each in found.values()) < 4, found
    assert greedy["output_ids"][0] == int(logits[0][0].argmax())

    same, chain, tree, _, certain, *_ = accepted
    assert min(accepted[-5:-1]) > 0.02, dict(zip(METHODS, accepted[-5:-1], strict=True))
    assert same > 0.999, "all that was drawn from the target's own distribution"
    assert chain > 4 * certain
    assert tree > chain
    for (way, settings), outcome in zip(DRAWN[:-1], tokens, strict=False):
        by_token = surprises_of_drawn(outcome, logits, settings)
        if way != "liar":
            assert max(by_token.values()) < 4, (way, settings, by_token)
        else:
            assert by_token["first"] < 4
            assert by_token["second"] > 8, by_token
            assert by_token["third"] > 8, by_token
    assert {tuple(t) for t in tokens[-1].tolist()} == {tuple(greedy["output_ids"][:3])}


@pytest.mark.skipif(not ON_CPU, reason="needs a CPU, where SGLang commits the argmax")
def test_sglangs_own_verification_is_noticed(
    make_engine: Any, likely: str, logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same engine with SGLang's own verification left in place."""
    monkeypatch.setenv(toys.SGLANGS_VERIFICATION, "1")
    with make_engine(
        speculative_algorithm=likely, max_running_requests=200, max_total_tokens=16000
    ) as engine:
        found = surprises(sampled(engine), logits, {})
    assert found["first"] < 4, "the first token comes from a prefill, which is sampled"
    assert found["second"] > 8, found
    assert found["both"] > 8, found
