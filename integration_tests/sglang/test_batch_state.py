"""What is kept of requests between steps, where SGLang gives no word of their end."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make environment-sglang")

import torch
from toys import Head

from spec_plugins.adapters.sglang import batch_state
from spec_plugins.adapters.sglang.batch_state import BatchState
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.proposer import Need, Target


@pytest.fixture
def state() -> BatchState:
    provides = Head.needs
    target = Target(128, 256, 4, provides, lm_head=lambda: torch.zeros(128, 8))
    return BatchState(Driver(Head(), target, Config()))


def prefill(state: BatchState, *ids: str, chunked: str | None = None) -> None:
    """Two tokens of each request; one of them has more to come."""
    requests = {rid: Some(rid=rid) for rid in ids}
    batch = Some(reqs=list(requests.values()), extend_lens=[2] * len(ids), chunked_req=requests.get(chunked))
    shown = {
        Need.HIDDEN_STATES: torch.zeros(2 * len(ids), 8),
        Need.AUX_HIDDEN_STATES: torch.zeros(2 * len(ids), 16),
    }
    state.see_prefill(batch, shown)


def kept(state: BatchState) -> dict[str, int]:
    """How many parts there are of each request, the same of both kinds."""
    last, layers = ({rid: len(parts) for rid, parts in kind.items()} for kind in state._states.values())
    assert last == layers
    return last


def test_a_prompt_that_is_aborted_between_its_parts_leaves_no_hidden_states(state: BatchState) -> None:
    prefill(state, "a", chunked="a")
    prefill(state, "a", "b", chunked="b")
    assert kept(state) == {"a": 2, "b": 1}
    prefill(state, "c")  # b does not come again
    assert kept(state).keys() == {"a", "c"}
    prefill(state, "d", chunked="d")
    prefill(state, "e", chunked="e")
    prefill(state, "e")
    assert kept(state).keys() == {"a", "c", "e"}


def test_prompts_that_wait_keep_a_bounded_number_of_hidden_states(
    state: BatchState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_state, "MOST_STATES", 6)
    prefill(state, "a", "b", chunked="b")
    prefill(state, "b", "c")
    assert kept(state) == {"b": 2, "c": 1}
    prefill(state, "d", chunked="d")
    assert kept(state) == {"c": 1, "d": 1}
    prefill(state, "d", "e", "f")  # the first part of d goes with the rest of it
    assert kept(state) == {"e": 1, "f": 1}
