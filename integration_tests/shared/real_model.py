"""SmolLM2-135M-Instruct, and real prompts in its tokens."""

from __future__ import annotations

import os
from pathlib import Path

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
