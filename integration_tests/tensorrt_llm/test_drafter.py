"""The drafter against a stand-in of TensorRT-LLM's executor: its output, its state, its faults.

No test here runs TensorRT-LLM; ``test_real_engine.py`` has those that do where it is installed.
"""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_stand_in import (
    VOCAB,
    ExecutorStandIn,
    RequestStandIn,
    engine_stand_in,
    target_says,
    without_drafting,
)
from toy_drafts import Garbage, Raises

from spec_plugins import Draft, Proposer, Step, statistics, token_store
from spec_plugins.adapters.tensorrt_llm import request_state
from spec_plugins.adapters.tensorrt_llm.request_state import RequestState
from spec_plugins.errors import UnavailableError, UnsupportedError

pytestmark = pytest.mark.usefixtures("engine")

K = 4
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "lookahead": {"proposer": "lookahead"},
    "combine": {
        "proposer": "combine",
        "options": {"proposers": [{"name": "suffix"}, {"name": "ngram", "options": {"max_ngram": 2}}]},
    },
}
OFF_AND_ON = dict.fromkeys(range(12, 20), 0) | dict.fromkeys(range(20, 24), 2)
"""The engine's limit of draft tokens by step, where it is not the most."""


class Oracle(Proposer):
    """Says what the target will say after the text that it is shown: never wrong, unless that text is."""

    bounded = True

    def propose(self, step: Step) -> list[Draft]:
        drafts = []
        for i in range(len(step)):
            text = step.tokens(i).tolist()
            room = int(min(step.budgets[i], step.depths[i]))
            drafts.append(Draft(np.array(without_drafting(text, room)[len(text) :], np.int32)))
        return drafts


class BranchingOracle(Proposer):
    """A tree whose first branch is right."""

    bounded = True

    def propose(self, step: Step) -> list[Draft]:
        drafts = []
        for i in range(len(step)):
            right = target_says(step.tokens(i).tolist())
            tokens, parents = [right, (right + 1) % VOCAB], [-1, -1]
            drafts.append(Draft(np.array(tokens, np.int32), np.array(parents, np.int32)))
        return drafts


def run(config: Any, crowd: Callable[..., Any], **settings: Any) -> tuple[ExecutorStandIn, list[Any]]:
    """Serve the crowd; the executor, and its requests."""
    arrivals = crowd()
    requests = [r for group in arrivals.values() for r in group]
    executor = ExecutorStandIn(
        config.drafter,
        config.resource_manager,
        **{"limits": OFF_AND_ON, "skipped": range(26, 32), "preempt_every": 5, **settings},
    )
    executor.run(arrivals)
    return executor, requests


def assert_same_as_without(executor: ExecutorStandIn, requests: Sequence[RequestStandIn]) -> None:
    assert len(executor.done) == len(requests) == 64
    for request in requests:
        prompt = request.tokens[: request.py_orig_prompt_len]
        assert executor.done[request.request_id] == without_drafting(prompt, request.py_max_new_tokens)


@pytest.mark.parametrize("name", PROPOSERS)
def test_output_is_that_without_drafting(name: str, made: Any, crowd: Any) -> None:
    config = made({**PROPOSERS[name], "num_speculative_tokens": K})
    executor, requests = run(config, crowd)
    assert_same_as_without(executor, requests)
    assert executor.accepted > 100
    plain = ExecutorStandIn(None, None, preempt_every=5)
    plain.run(crowd())
    assert executor.forwards < plain.forwards
    driver = config.drafter.worker.state.driver
    assert not driver.statistics.faults
    assert driver.requests_held == 0


def test_a_model_that_drafts(made: Any, crowd: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    source = {
        "proposer": "draft_model", "route": "plugin", "num_speculative_tokens": 2,
        "options": {"model": str(tmp_path)}, "containment": {"time_allowance_ms": 60_000},
    }  # fmt: skip
    executor, requests = run(made(source), crowd)
    assert_same_as_without(executor, requests)
    assert executor.drafted > 100


def test_the_comparison_would_find_other_output(made: Any, crowd: Any) -> None:
    class Trusting(ExecutorStandIn):
        """Takes drafts unverified."""

        def agrees(self, text: Sequence[int], token: int) -> bool:
            return True

    config, arrivals = made({"proposer": "suffix", "num_speculative_tokens": K}), crowd()
    requests = [r for group in arrivals.values() for r in group]
    executor = Trusting(config.drafter, config.resource_manager)
    executor.run(arrivals)
    with pytest.raises(AssertionError):
        assert_same_as_without(executor, requests)


@pytest.mark.parametrize("managed", [True, False])
def test_a_proposer_sees_the_very_text_also_after_draft_length_zero(
    managed: bool, made: Any, crowd: Any, toy: Any
) -> None:
    config = made({"proposer": toy(Oracle), "num_speculative_tokens": K})
    if not managed:
        config.resource_manager = None
    executor, requests = run(config, crowd)
    assert_same_as_without(executor, requests)
    assert executor.drafted > 500
    assert executor.accepted == executor.drafted
    if managed:  # else nobody tells of a request's last step
        counted = config.drafter.worker.state.driver.statistics
        assert (counted.draft_tokens, counted.accepted_tokens) == (executor.drafted, executor.accepted)


def test_an_adapter_with_stale_text_would_be_found(
    made: Any, crowd: Any, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = RequestState._take_in

    def stale(self: RequestState, ids: Any, requests: Any) -> Any:
        """Forgets to take in what came while nothing was drafted."""
        lengths = {name: self.tokens.length(name) for name in ids if not self._drafts.counts.any()}
        found = take_in(self, ids, requests)
        for name in lengths.keys() & self._tenants.keys():
            self.tokens.tokens(name)[lengths[name] :] = 0
        return found

    monkeypatch.setattr(RequestState, "_take_in", stale)
    config = made({"proposer": toy(Oracle), "num_speculative_tokens": K})
    executor, _ = run(config, crowd)
    assert executor.accepted < executor.drafted


@pytest.mark.parametrize("name", ["suffix", "lookahead"])
def test_acceptance_is_counted_as_the_engine_counts_it(name: str, made: Any, crowd: Any) -> None:
    config = made({**PROPOSERS[name], "num_speculative_tokens": K})
    executor, _ = run(config, crowd)
    counted = config.drafter.worker.state.driver.statistics
    assert counted.accepted_tokens == executor.accepted
    assert counted.draft_tokens == executor.drafted


def test_trees_are_cut_to_chains(made: Any, crowd: Any, toy: Any) -> None:
    config = made({"proposer": toy(BranchingOracle), "num_speculative_tokens": K})
    executor, requests = run(config, crowd)
    assert_same_as_without(executor, requests)
    assert executor.accepted == executor.drafted > 100


def test_only_new_tokens_are_read(made: Any) -> None:
    request = RequestStandIn(1, list(range(40)) * 10, 50)
    config = made({"proposer": "ngram", "num_speculative_tokens": K})
    executor = ExecutorStandIn(config.drafter, config.resource_manager)
    executor.submit(request)
    executor.run()
    # The prompt and the first token once; then each new token, and a look at the last known one.
    assert request.reads <= 401 + 50 + executor.steps + 2


def test_a_step_compiles_nothing(made: Any, crowd: Any) -> None:
    config = made({"proposer": "ngram", "num_speculative_tokens": K})
    config.resource_manager.prepare_resources(None)  # makes the state
    kernels = request_state._accept, token_store._write, statistics._count
    before = [list(kernel.signatures) for kernel in kernels]
    assert all(before)
    run(config, crowd)
    assert [list(kernel.signatures) for kernel in kernels] == before


# ------------------------------------------------------------------------------------ the engine's classes


def test_every_form_of_the_constructor(form: str, made: Any, crowd: Any) -> None:
    with engine_stand_in(form):
        config = made({"proposer": "suffix", "num_speculative_tokens": K})
        drafter = config.drafter
        assert (drafter.max_draft_len, drafter.max_total_draft_tokens) == (K, K)
        assert drafter._needs_padding_kv_extension is True
        assert config.max_draft_len == K
        executor, requests = run(config, crowd)
    assert_same_as_without(executor, requests)


@pytest.mark.parametrize("name", ["max_draft_len", "_needs_padding_kv_extension"])
def test_what_the_engine_reads_must_be_set(name: str, made: Any, crowd: Any) -> None:
    with engine_stand_in("first"):
        config = made({"proposer": "suffix", "num_speculative_tokens": K})
        setattr(config.drafter, name, None)
        with pytest.raises((TypeError, AssertionError)):
            run(config, crowd)


def test_concurrency_and_schedule_go_to_the_engine(form: str, made: Any) -> None:
    more = {"max_concurrency": 3, "draft_len_schedule": {1: K, 8: 0}}
    with engine_stand_in(form):
        if form == "first":
            with pytest.raises(UnsupportedError, match="draft_len_schedule: this TensorRT-LLM's drafters"):
                made("suffix", **more)
            more.pop("draft_len_schedule")
        config = made("suffix", **more)
        assert config.fields == {"max_draft_len": 8, **more}
        assert config.drafter.max_concurrency == 3
        if form != "first":
            assert pickle.loads(pickle.dumps(config.drafter)).draft_len_schedule == {1: K, 8: 0}


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy])
def test_settings_alone_travel_to_the_worker(copied: Any, made: Any, crowd: Any) -> None:
    config = made({**PROPOSERS["combine"], "num_speculative_tokens": K})
    run(config, crowd)
    assert config.drafter.worker.state is not None
    there = copied(SimpleNamespace(drafter=config.drafter, resource_manager=config.resource_manager))
    assert there.resource_manager.drafter is there.drafter
    assert there.drafter.worker.state is None
    assert there.drafter.worker.settings == config.drafter.worker.settings
    executor, requests = run(there, crowd)
    assert_same_as_without(executor, requests)
    assert executor.accepted > 100


def test_a_pickle_names_two_functions_of_ours_and_the_engine_is_told(made: Any, engine: Any) -> None:
    config = made("suffix")
    pickled = pickle.dumps((config.drafter, config.resource_manager), protocol=2)
    named = {f"{f.__module__} {f.__name__}" for f in engine.approved}
    assert {line.decode().replace("\n", " ") for line in _globals(pickled)} == named
    assert len(named) == 2


def _globals(pickled: bytes) -> set[bytes]:
    import pickletools

    return {str(arg).encode() for code, arg, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}


def test_the_resource_manager_claims_no_capacity(made: Any) -> None:
    manager = made("suffix", max_batch_size=17).resource_manager
    assert manager.get_max_resource_count() == 17
    assert manager.get_needed_resource_to_completion(RequestStandIn(1, [1], 1)) == 0


def test_without_the_engine_the_reason_is_said(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Undone here: after the stand-in is gone, it would come back.
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt_llm", None)
        patch.setitem(sys.modules, "tensorrt_llm._torch.speculative.drafter", None)
        with pytest.raises(UnavailableError, match="is the class that drafters derive from, cannot be had"):
            made("suffix")


# --------------------------------------------------------------------------------------- state and faults


def test_state_is_freed_when_requests_end(made: Any, crowd: Any) -> None:
    config = made({"proposer": "suffix", "num_speculative_tokens": K})
    run(config, crowd)
    state = config.drafter.worker.state
    assert state.told_of_ends
    assert len(state.tokens) == len(state._tenants) == len(state._over) == state.driver.requests_held == 0


def test_ends_that_are_never_told_do_not_add_up(made: Any) -> None:
    config = made({"proposer": "ngram", "num_speculative_tokens": K}, max_batch_size=2)
    for number in range(20):
        batch = SimpleNamespace(generation_requests=[RequestStandIn(number, [1, 2, 1], 9)])
        config.resource_manager.prepare_resources(batch)
        config.drafter.prepare_draft_tokens(batch)
        state = config.drafter.worker.state
        assert max(len(state.tokens), state.driver.requests_held) <= 5
    config.resource_manager.shutdown()
    assert len(state.tokens) == state.driver.requests_held == 0


def test_waiting_requests_keep_their_state_where_ends_are_told(made: Any) -> None:
    config = made({"proposer": "ngram", "num_speculative_tokens": K})
    first, second = (RequestStandIn(i, [1, 2, 3, 1, 2], 20) for i in (1, 2))
    batch = SimpleNamespace(generation_requests=[first, second], context_requests=[])
    alone = SimpleNamespace(generation_requests=[first], context_requests=[])
    for told in (False, True):
        if told:
            config.resource_manager.prepare_resources(batch)
        config.drafter.prepare_draft_tokens(batch)
        config.drafter.prepare_draft_tokens(alone)
        assert len(config.drafter.worker.state.tokens) == (2 if told else 1)


def test_a_request_whose_text_was_rewritten_is_taken_in_anew(made: Any, toy: Any) -> None:
    config = made({"proposer": toy(Oracle), "num_speculative_tokens": K})
    request = RequestStandIn(1, [1, 2, 3, 4, 5], 50)
    batch = SimpleNamespace(generation_requests=[request], context_requests=[])
    for text in ([1, 2, 3, 4, 5, 6], [9, 8, 7], [9, 8, 1, 2, 3, 4, 5]):
        request.tokens = text
        config.drafter.prepare_draft_tokens(batch)
        assert text + request.py_draft_tokens == without_drafting(text, K)


def test_lists_are_fresh(made: Any, toy: Any) -> None:
    config = made({"proposer": toy(Oracle), "num_speculative_tokens": K})
    request = RequestStandIn(1, [1, 2, 3], 50)
    batch = SimpleNamespace(generation_requests=[request], context_requests=[])
    config.drafter.prepare_draft_tokens(batch)
    drafted = list(request.py_draft_tokens)
    request.py_draft_tokens[:] = [VOCAB] * 9
    request.tokens += without_drafting(request.tokens, K + 1)[-K - 1 :]
    config.drafter.prepare_draft_tokens(batch)
    assert request.tokens[3:-1] == drafted
    assert config.drafter.worker.state.driver.statistics.accepted_tokens == K


@pytest.mark.parametrize("bad", [Raises, Garbage])
def test_a_misbehaving_proposer_costs_its_drafts_alone(bad: type, made: Any, crowd: Any, toy: Any) -> None:
    executor, requests = run(made({"proposer": toy(bad), "num_speculative_tokens": K}), crowd)
    assert_same_as_without(executor, requests)


class CannotLoad(Raises):
    """Fails at the start."""

    def load(self, target: Any) -> None:
        raise RuntimeError("no weights")


def test_a_proposer_that_cannot_start_is_told_of_once(
    made: Any, crowd: Any, toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    executor, requests = run(made({"proposer": toy(CannotLoad)}), crowd)
    assert_same_as_without(executor, requests)
    assert executor.drafted == 0
    assert caplog.text.count("nothing can be drafted") == 1
    assert "no weights" in caplog.text


def test_the_adapters_own_fault_reaches_no_engine(
    made: Any, crowd: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = 0
    take_in = RequestState._take_in

    def fails(self: RequestState, ids: Any, requests: Any) -> Any:
        nonlocal texts
        before, texts = texts, texts + len(requests)
        if before // 50 < texts // 50:
            raise KeyError("a bug")
        return take_in(self, ids, requests)

    monkeypatch.setattr(RequestState, "_take_in", fails)
    with caplog.at_level(logging.ERROR):
        executor, requests = run(made({"proposer": "suffix", "num_speculative_tokens": K}), crowd)
    assert_same_as_without(executor, requests)
    assert texts > 100
    assert executor.accepted > 100
    assert caplog.text.count("the TensorRT-LLM adapter failed") == 1


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_what_needs_hidden_states_is_refused_and_the_native_way_named(method: str, made: Any) -> None:
    with pytest.raises(UnsupportedError) as refused:
        made({"proposer": method, "route": "plugin", "options": {"model": "HEAD"}})
    assert "needs hidden states" in str(refused.value)
    assert f"{method} on tensorrt-llm (native)" in str(refused.value) or "eagle3" in str(refused.value)
