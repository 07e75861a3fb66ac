"""SmolLM2-135M-Instruct, and real prompts in its tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(os.environ.get("SPEC_PLUGINS_MODEL", "missing"))
NEEDS_MODEL = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs the model: `make model`, and SPEC_PLUGINS_MODEL set to it"
    ),
]
CONTEXT = 1024
"""Room for every prompt and an answer."""
HEADS = Path(__file__).resolve().parents[2] / "examples" / "smollm2_heads"
METHODS = ("medusa", "eagle3", "suffix", "draft_model")
"""In the order in which a request is offered to them."""


def every_method(trees: bool) -> dict[str, Any]:
    """Fields of a configuration: the example's heads and draft model, and suffix; each gets its share.

    Args:
        trees: all in one tree, and the heads' drafts trees; or one method for a request and step, the first
            that is sure.
    """
    own: dict[str, dict[str, Any]] = {
        "medusa": {"model": str(HEADS / "medusa")},
        "eagle3": {"model": str(HEADS / "eagle3")},
        "suffix": {},
        "draft_model": {"model": str(HEADS / "draft")},
    }
    if trees:
        own["medusa"] |= {"tree": True, "max_draft_nodes": 3}
        own["eagle3"] |= {"topk": 2, "max_draft_nodes": 4}
        own["suffix"] |= {"tree": False}
    else:
        own["medusa"] |= {"min_probability": 0.5}
        own["eagle3"] |= {"min_probability": 0.4}
    parts = [{"name": method, "options": own[method]} for method in METHODS]
    return {
        "proposer": "combine", "num_speculative_tokens": 3, "max_draft_nodes": 12 if trees else None,
        "options": {"proposers": parts, "mode": "merged" if trees else "ordered"},
    }  # fmt: skip


def assert_all_were_accepted(figures: Mapping[str, Any]) -> None:
    """That drafts of every method were accepted, by the driver's figures."""
    accepted = {name: of["accepted_tokens"] for name, of in figures["sources"].items()}
    assert accepted.keys() == set(METHODS), accepted
    assert min(accepted.values()) >= 3, accepted
    assert not figures["faults"]


def real_prompts() -> list[list[int]]:
    """Token ids of 64: 32 of HumanEval, 24 of MT-bench, and the last turn of 8 agents, cut to 700 tokens."""
    from transformers import AutoTokenizer

    from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench

    data = MODEL.parent.parent / "data"
    chosen = [list(p.messages) for p in [*humaneval(data)[:32], *mtbench(data)[:24]]]
    chosen += [[dict(p.messages[-1], role="user")] for p in agent_replays(data)[:8]]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rendered = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in chosen
    ]
    return [ids[-700:] for ids in rendered]
