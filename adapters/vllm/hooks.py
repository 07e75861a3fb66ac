"""What the adapter relies on inside vLLM."""

from __future__ import annotations

from spec_plugins.hooks import Hook

__all__ = ["AUX_HIDDEN_STATES", "EXPAND", "HOOKS", "NEW_REQUEST", "PROPOSE", "TOP_K_TOP_P", "UPDATE_STATES"]

_SEEN = "0.22.1, 0.26, 0.29, 0.32, 0.33"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

PROPOSE = Hook(
    f"{_RUNNER}.propose_draft_token_ids",
    (
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
    ),
    _SEEN,
    "shows the drafter the engine's requests: ids, settings, hidden states, the scheduler's limits",
    passes_on=True,
)
UPDATE_STATES = Hook(
    f"{_RUNNER}._update_states",
    ("scheduler_output",),
    _SEEN,
    "says which requests are new and which are over",
    passes_on=True,
)
AUX_HIDDEN_STATES = Hook(
    f"{_RUNNER}._setup_eagle3_aux_hidden_state_outputs",
    (),
    _SEEN,
    "switches on the hidden states of the layers that a proposer wants",
    passes_on=True,
)
NEW_REQUEST = Hook(
    "vllm.v1.core.sched.output:NewRequestData.from_request",
    ("request",),
    _SEEN,
    "carries a request's cache salt to the worker, so that tenants stay apart",
    passes_on=True,
)
EXPAND = Hook(
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    _SEEN,
    "is replaced where a check finds that it reads wrong settings (on the CPU)",
)
TOP_K_TOP_P = Hook(
    "vllm.v1.sample.rejection_sampler:apply_top_k_top_p",
    ("logits", "k", "p"),
    _SEEN,
    "is replaced where a check finds that it fails over no logits (on the CPU)",
)

HOOKS = (
    Hook(
        "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
        ("vllm_config",),
        _SEEN,
        "makes the drafter: vLLM's method `custom_class`",
    ),
    PROPOSE,
    UPDATE_STATES,
    AUX_HIDDEN_STATES,
    NEW_REQUEST,
    EXPAND,
    TOP_K_TOP_P,
    Hook(
        f"{_RUNNER}._get_spec_decode_draft_probs",
        ("spec_decode_metadata",),
        _SEEN,
        "hands draft probabilities to the rejection sampler",
    ),
    Hook(
        "vllm.model_executor.models.interfaces:supports_eagle3",
        ("model",),
        _SEEN,
        "says whether a model can show the hidden states of its layers",
    ),
    Hook(
        "vllm.distributed.parallel_state:get_tp_group",
        (),
        _SEEN,
        "finds the rank that drafts",
    ),
    Hook(
        "vllm.v1.metrics.loggers:StatLoggerBase.record",
        ("scheduler_stats", "iteration_stats"),
        _SEEN,
        "adds the project's metrics to vLLM's",
    ),
)
