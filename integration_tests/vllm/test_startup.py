"""How engines start: without the wrapped methods, with a worker of ours, with a bad configuration."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from offline import drafter_of, greedy, our_warnings, statistics_of

from spec_plugins import hooks

plugin = pytest.importorskip("spec_plugins.adapters.vllm.plugin", reason="needs vLLM: make environment-vllm")

LENGTHS = [5 + 23 * i % 60 for i in range(12)]


def moving_rows(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """More requests than rows, which leave at different times."""
    from offline import ask, token_ids
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    return token_ids(ask(llm, prompts, params))


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own methods, as in a process in which nothing was wrapped yet."""
    pytest.importorskip("vllm", reason="needs vLLM: make environment-vllm")
    for hook in plugin.WRAPPERS:
        owner, name = hooks.place(hook)
        if hooks.is_wrapped(hook):
            monkeypatch.setattr(owner, name, owner.__dict__[name].__wrapped__)
        else:
            monkeypatch.setattr(owner, name, owner.__dict__[name])  # so that it is put back
    monkeypatch.setattr(plugin, "_installed", None)


@pytest.fixture(scope="module")
def rich(make_engine: Any, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The output with all hooks, checked to be vLLM's own, and how many drafts were accepted."""
    with make_engine(max_num_seqs=4) as llm:
        plain = moving_rows(llm, prompts)
    with make_engine("ngram", max_num_seqs=4) as llm:
        assert moving_rows(llm, prompts) == plain
        return plain, statistics_of(llm).accepted_tokens


def wrong(hook: Any) -> Any:
    return dataclasses.replace(hook, parameters=("no_such_parameter",))


@pytest.mark.parametrize("name", ["PROPOSE", "UPDATE_STATES", "AUX_HIDDEN_STATES"])
def test_a_method_that_is_not_as_expected_is_left_alone(
    make_engine: Any, prompts: list[list[int]], rich: Any, unwrapped: None, name: str, monkeypatch: Any
) -> None:
    """Without the first, vLLM's bare ``custom_class`` hook drafts nearly as well, over rows that move."""
    hook = getattr(plugin, name)
    monkeypatch.setattr(plugin, name, wrong(hook))
    with our_warnings() as warnings, make_engine("ngram", max_num_seqs=4) as llm:
        assert not hooks.is_wrapped(hook)
        assert (drafter_of(llm).state is None) == (name == "PROPOSE")
        assert moving_rows(llm, prompts) == rich[0]
        figures = statistics_of(llm).snapshot()
        assert greedy(llm, prompts[:1], 20) == greedy(llm, prompts[:1], 20)
    assert any(hook.path in w and "no longer takes no_such_parameter" in w for w in warnings)
    assert figures["faults"] == {}
    assert figures["accepted_tokens"] > 0
    # The bare hook does not know max_tokens, and so counts what is accepted past the end.
    assert figures["accepted_tokens"] >= 0.9 * rich[1]


def test_without_salts_each_request_is_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = hooks.place(plugin.NEW_REQUEST)
    found = owner.__dict__[name]
    inner = getattr(found.__func__, "__wrapped__", None)
    monkeypatch.setattr(owner, name, found if inner is None else inner)
    monkeypatch.setattr(plugin, "NEW_REQUEST", wrong(plugin.NEW_REQUEST))
    with our_warnings() as warnings:
        plugin.register()
    assert "NewRequestData.from_request is not as expected" in warnings[0]
    assert not plugin.salts_are_carried()


WORKER = """
import json, sys
from test_startup import moving_rows
from offline import drafter_of, engine, statistics_of
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

names = ("propose_draft_token_ids", "_update_states", "_setup_eagle3_aux_hidden_state_outputs")
own = [Runner.__dict__[n] for n in names]
model, prompts = json.loads(sys.argv[1])
with engine(model, "ngram", max_num_seqs=4,
            worker_cls="spec_plugins.adapters.vllm.worker.Worker") as llm:
    found = moving_rows(llm, prompts)
    assert drafter_of(llm).state is not None
    accepted = statistics_of(llm).accepted_tokens
    rpc = llm.collective_rpc("spec_plugins_statistics")[0]["accepted_tokens"]
print(json.dumps([[Runner.__dict__[n] for n in names] == own, found, accepted, rpc]))
"""


def test_a_worker_of_ours_patches_nothing(tiny_model: Path, prompts: list[list[int]], rich: Any) -> None:
    here = Path(__file__).parent
    script = f"import sys; sys.path += {[str(here), str(here.parent / 'shared')]!r}\n{WORKER}"
    command = [sys.executable, "-P", "-c", script, json.dumps([str(tiny_model), prompts])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    untouched, found, accepted, rpc = json.loads(done.stdout.splitlines()[-1])
    assert untouched
    assert found == rich[0]
    assert accepted == rpc == rich[1]


BAD: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "unknown proposer": ("sufix", {}, ["no proposer is registered as 'sufix'", "did you mean 'suffix'"]),
    "unknown option": ("ngram", {"options": {"max_ngramm": 3}}, ["max_ngramm", "did you mean 'max_ngram'"]),
    "other proposer": ("ngram", {"proposer": "suffix"}, ["'suffix' in additional_config", "make them equal"]),
    "other length": ("ngram", {"num_speculative_tokens": 9}, ["9 in additional_config", "but 6 in"]),
    "unknown field": ("ngram", {"propser": "x"}, ["propser"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_ends_the_start(make_engine: Any, case: str) -> None:
    proposer, fields, words = BAD[case]
    with pytest.raises(Exception) as raised, make_engine(proposer, fields=fields):  # noqa: PT011
        pass
    said, error = "", cast("BaseException | None", raised.value)
    while error is not None:
        said += f"{error}\n"
        error = error.__cause__ or error.__context__
    for word in words:
        assert word in said
