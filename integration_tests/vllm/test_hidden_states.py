"""A proposer inside vLLM is shown the hidden states that the contract promises."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_proposers
from offline import drafter_of, greedy

pytestmark = pytest.mark.contract


def test_hidden_states_are_the_models(make_engine: Any, tiny_model: Path, prompts: list[list[int]]) -> None:
    """Over chunked prompts, a prefix cache, rejected and accepted drafts, and rows that move."""
    import torch
    from transformers import AutoModelForCausalLM

    toy_proposers.register()
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with make_engine("toy-watcher", k=3, max_num_seqs=4, max_num_batched_tokens=32) as llm:
        texts = greedy(llm, [p * 2 for p in prompts[6:]] + prompts[:2], 30)
        drafter = drafter_of(llm)
        sights, target, figures = drafter.proposer.sights, drafter.proposer.target, drafter.statistics()
        embeddings, lm_head = (m() if m else None for m in (target.embeddings, target.lm_head))
        assert embeddings is None or torch.equal(embeddings, model.model.embed_tokens.weight)
        assert lm_head is None or torch.equal(lm_head, model.lm_head.weight)
    assert embeddings is not None
    assert figures["faults"] == {}
    assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]

    seen: dict[str, list[int]] = defaultdict(list)
    newest = {s.request_id: s.tokens for s in sights}  # the last sight of a request is the longest
    assert len(newest) == len(texts)
    with torch.no_grad():
        states = {
            r: model(torch.tensor([t]), output_hidden_states=True).hidden_states for r, t in newest.items()
        }
    for sight in sights:
        count, end = len(sight.hidden), len(sight.tokens) - 1
        assert sight.tokens == newest[sight.request_id][: end + 1]
        layers = [layer[0, end - count : end] for layer in states[sight.request_id]]
        assert count > 0
        assert torch.allclose(sight.hidden, layers[-1], atol=1e-4)
        assert torch.allclose(sight.aux, torch.cat(layers[1:3], -1), atol=1e-4)
        seen[sight.request_id] += range(end - count, end)
    for r, positions in seen.items():
        # Each position once, in order; those before the first came from the prefix cache.
        assert (np.diff(positions) == 1).all(), r
        assert positions[-1] == len(newest[r]) - 2
