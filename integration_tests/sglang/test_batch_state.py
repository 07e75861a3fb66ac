"""What is kept of requests between steps, where SGLang gives no word of their end."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make environment-sglang")

import torch
from toys import Head

from spec_plugins.adapters.sglang.batch_state import BatchState
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.proposer import Need, Target


@pytest.fixture
def state() -> BatchState:
    provides = frozenset({Need.HIDDEN_STATES, Need.LM_HEAD})
    target = Target(128, 256, 4, provides, lm_head=lambda: torch.zeros(128, 8))
    return BatchState(Driver(Head(), target, Config()))


def prefill(state: BatchState, *ids: str, chunked: str | None = None) -> None:
    """Two tokens of each request; one of them has more to come."""
    requests = {rid: Some(rid=rid) for rid in ids}
    batch = Some(reqs=list(requests.values()), extend_lens=[2] * len(ids), chunked_req=requests.get(chunked))
    state.see_prefill(batch, torch.zeros(2 * len(ids), 8))


def test_a_prompt_that_is_aborted_between_its_parts_leaves_no_hidden_states(state: BatchState) -> None:
    prefill(state, "a", chunked="a")
    prefill(state, "a", "b", chunked="b")
    assert {rid: len(parts) for rid, parts in state._states.items()} == {"a": 2, "b": 1}
    prefill(state, "c")  # b does not come again
    assert state._states.keys() == {"a", "c"}
    prefill(state, "d", chunked="d")
    prefill(state, "e", chunked="e")
    prefill(state, "e")
    assert state._states.keys() == {"a", "c", "e"}
