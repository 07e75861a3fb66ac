"""What a proposer is shown of requests, and proposers that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys
from speculating import configured, figures_of
from workloads import Prompts, ask, greedy, ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(make_engine: Any, prompts: Prompts) -> list[list[int]]:
    """SGLang's own answers."""
    with make_engine() as engine:
        return ids(ask(engine, prompts, greedy(24)))


@pytest.mark.parametrize("settings", [{}, {"disable_overlap_schedule": False, "chunked_prefill_size": 16}])
def test_hidden_states_are_those_of_the_target(
    make_engine: Any,
    tiny_model: Path,
    prompts: Prompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    """They are Hugging Face's, of the last layer and of others, and the LM head on the last says what was
    then sampled: in prefills, whole and in parts, after accepted and rejected chains and trees."""
    import torch
    from transformers import AutoModelForCausalLM

    log = tmp_path / "seen"
    monkeypatch.setenv(toys.SEEN, str(log))
    fields = {"proposer": "toy-head", "num_speculative_tokens": 4, "max_draft_nodes": 5}
    with configured(fields) as algorithm, make_engine(speculative_algorithm=algorithm, **settings) as engine:
        answers = ask(engine, prompts, greedy(30)) + ask(engine, [[*prompts[5], 77]], greedy(30))
        statistics = figures_of(engine)
    assert statistics["faults"] == {}
    assert 10 < statistics["accepted_tokens"] < statistics["draft_tokens"]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    newest = {each["request"]: each["tokens"] for each in seen}
    with torch.no_grad():
        states = {
            r: model(torch.tensor([t]), output_hidden_states=True).hidden_states for r, t in newest.items()
        }
    begun, shown = {}, 0
    for each in seen:
        tokens, told, prompt = each["tokens"], each["told"], each["prompt"]
        if each["request"] not in begun:
            begun[each["request"]] = prompt - len(told)
            # From the prompt's first token on, but for what the radix cache had.
            assert 1 <= len(told) <= prompt
        last, layers = (torch.tensor(values) for values in each["states"])
        of_all = [
            layer[0, len(tokens) - 1 - len(told) : len(tokens) - 1] for layer in states[each["request"]]
        ]
        assert torch.allclose(last, of_all[-1], atol=1e-4)
        assert torch.allclose(layers, torch.cat([of_all[2], of_all[0]], -1), atol=1e-4)
        generated = min(len(told), len(tokens) - prompt)
        assert told[len(told) - generated :] == tokens[len(tokens) - generated :]
        shown += generated
    assert len(begun) == 13
    assert min(begun.values()) == 0
    assert max(begun.values()) > 40, "the radix cache had it, and brings none"
    assert shown >= sum(len(a["output_ids"]) - 6 for a in answers)


@pytest.mark.parametrize("proposer", ["toy-raises", "toy-garbage", "toy-sleeps"])
def test_a_misbehaving_proposer_changes_no_answer(
    make_engine: Any, prompts: Prompts, expected: list[list[int]], proposer: str
) -> None:
    fields = {
        "proposer": proposer,
        "containment": {"time_allowance_ms": 100.0, "max_faults": 2, "rest_seconds": 0.2},
    }
    with configured(fields) as algorithm, make_engine(speculative_algorithm=algorithm) as engine:
        assert ids(ask(engine, prompts, greedy(24))) == expected
        statistics = figures_of(engine)
    kinds = {"toy-raises": {"raised"}, "toy-sleeps": {"late"}}
    faults = set(statistics["faults"])
    assert faults >= kinds.get(proposer, set())
    assert len(faults) >= (2 if proposer == "toy-garbage" else 1)
    assert statistics["skipped_steps"] > 0
