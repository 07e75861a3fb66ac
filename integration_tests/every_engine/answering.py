"""``python answering.py ENGINE MODEL``: reads lists of prompts, prints the tokens of each one's answers.

Run by the engine's own Python. The prompts of a list are asked at once, the lists one after the other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

Batches = list[list[list[int]]]
FIELDS = {"num_speculative_tokens": 6, "containment": {"time_allowance_ms": 60_000.0}}
CONTEXT = 256
TOKENS = 40


def transformers(model: str, batches: Batches) -> Batches:
    """The embedded engine."""
    import torch

    from spec_plugins.adapters.transformers import Engine, SamplingParams

    torch.set_num_threads(1)
    engine = Engine(model, spec={"proposer": "recording", **FIELDS}, dtype="float32")
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    return [[a.token_ids for a in engine.generate(prompts, params)] for prompts in batches]


def vllm(model: str, batches: Batches) -> Batches:
    """vLLM, inside this process."""
    from offline import engine, greedy

    fields = {key: value for key, value in FIELDS.items() if key != "num_speculative_tokens"}
    k = FIELDS["num_speculative_tokens"]
    with engine(model, "recording", k=k, fields=fields, max_model_len=CONTEXT) as llm:
        return [greedy(llm, prompts, TOKENS) for prompts in batches]


def sglang(model: str, batches: Batches) -> Batches:
    """SGLang."""
    from offline import engine
    from speculating import configured
    from workloads import ask, greedy, ids

    with (
        configured({"proposer": "recording", **FIELDS}) as algorithm,
        engine(model, speculative_algorithm=algorithm, context_length=CONTEXT) as it,
    ):
        return [ids(ask(it, prompts, greedy(TOKENS))) for prompts in batches]


ENGINES: dict[str, Callable[[str, Batches], Batches]] = {
    "transformers": transformers, "vllm": vllm, "sglang": sglang,
}  # fmt: skip

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    sys.path.append(str(Path(__file__).parents[1] / name))
    printed = os.dup(1)
    os.dup2(2, 1)  # what engines print is no answer
    answers = ENGINES[name](folder, json.load(sys.stdin))
    with os.fdopen(printed, "w") as out:
        json.dump(answers, out)
