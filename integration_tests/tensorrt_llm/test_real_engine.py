"""What a user who has TensorRT-LLM can check: the adapter against the engine's own classes.

Where this project was built it cannot be installed, so none of these has been seen to pass.
"""

from __future__ import annotations

import importlib.util
import pickle

import pytest
from executor_stand_in import VOCAB, ExecutorStandIn, RequestStandIn, without_drafting

if importlib.util.find_spec("tensorrt_llm") is None:
    pytest.skip(
        "needs TensorRT-LLM, which is in the vendor's index only and wants a GPU: pip install tensorrt-llm",
        allow_module_level=True,
    )

from spec_plugins.adapters.tensorrt_llm import speculative_config
from spec_plugins.adapters.tensorrt_llm.drafter import engine_part
from spec_plugins.adapters.tensorrt_llm.hooks import BASE_DRAFTER, BASE_RESOURCE_MANAGER, HOOKS, USER_PROVIDED
from spec_plugins.hooks import check


def test_the_hook_table_fits() -> None:
    assert [(s.hook.path, s.detail) for s in map(check, HOOKS) if s.status != "ok"] == []


def test_the_configuration_is_made_of_the_engines_classes() -> None:
    made = speculative_config("suffix", "toy", vocab_size=VOCAB, max_seq_len=512)
    assert isinstance(made, engine_part(USER_PROVIDED))
    assert isinstance(made.drafter, engine_part(BASE_DRAFTER))
    assert isinstance(made.resource_manager, engine_part(BASE_RESOURCE_MANAGER))
    assert made.max_draft_len == 8
    there = pickle.loads(pickle.dumps((made.drafter, made.resource_manager)))
    assert there[1].drafter is there[0]


def test_a_drafter_of_the_engines_class_drafts() -> None:
    """The engine's class, in the stand-in's steps."""
    made = speculative_config("suffix", "toy", vocab_size=VOCAB, max_seq_len=512)
    made.drafter.pad_draft_tokens_for_cuda_graph = lambda batch: None
    made.drafter._needs_padding_kv_extension = True
    executor = ExecutorStandIn(made.drafter, made.resource_manager)
    made.drafter.should_use_spec_decode = lambda requests: True
    made.drafter.update_max_total_draft_tokens = lambda new: None
    executor.submit(RequestStandIn(1, [1, 2, 3], 60))
    assert executor.run()[1] == without_drafting([1, 2, 3], 60)
    assert executor.accepted > 0
