"""What the adapter relies on inside SGLang."""

from __future__ import annotations

from spec_plugins.hooks import Hook

__all__ = [
    "EAGLE_SAMPLE",
    "FILTER",
    "FINISH",
    "HOOKS",
    "INTERNAL_STATE",
    "LAST_STATES",
    "LAYERS",
    "META_INFO",
    "REQUIRED",
    "ROW_WIDTH",
]

_SEEN = "0.5.23"
_SPECULATIVE = "sglang.srt.speculative"
_WORKER = f"{_SPECULATIVE}.ngram_worker:NGRAMWorker"

EAGLE_SAMPLE = Hook(
    f"{_SPECULATIVE}.ngram_worker:eagle_sample",
    ("verify_input", "batch", "logits_output", "grammar_mask"),
    _SEEN,
    "verifies drafts; replaced where it would not give the target's distribution",
    passes_on=True,
)
META_INFO = Hook(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
    ("meta_info", "recv_obj", "i"),
    _SEEN,
    "counts draft tokens for a request's meta_info, by the widest draft alone",
    passes_on=True,
)
INTERNAL_STATE = Hook(
    "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
    ("recv_req",),
    _SEEN,
    "answers /server_info, to which the project's figures are added",
    passes_on=True,
)
FINISH = Hook(
    "sglang.srt.managers.schedule_batch:Req.update_finish_state",
    ("new_accepted_len",),
    _SEEN,
    "says whether a request is over; asked for one token after the other where it has stop strings",
)
ROW_WIDTH = Hook(
    "sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
    (),
    _SEEN,
    "sizes a request's row of KV slots; made wide enough for what is reserved near the context's end",
)

LAYERS = Hook(
    "sglang.srt.models.llama:LlamaForCausalLM.set_eagle3_layers_to_capture",
    ("layer_ids",),
    _SEEN,
    "keeps the hidden states of chosen layers; models that have it all take the same",
)
LAST_STATES = Hook(
    "sglang.srt.layers.logits_processor:LogitsProcessor._get_last_hidden_states_to_store",
    ("hidden_states", "aux_hidden_states", "logits_metadata"),
    _SEEN,
    "keeps those of the last layer beside them, where it is told to",
)
FILTER = Hook(
    "sglang.srt.layers.sampler:Sampler._sample_from_probs",
    ("probs", "sampling_info", "positions", "simple_sampling_case"),
    _SEEN,
    "tells what top-k, top-p and min-p leave, for verifying with draft probabilities",
)

REQUIRED = (
    Hook(
        f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
        _SEEN,
        "registers an algorithm",
    ),
    Hook(f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm.create_future_map", None, _SEEN, "is borrowed"),
    Hook(
        f"{_WORKER}.__init__",
        ("server_args", "gpu_id", "nccl_port", "target_worker"),
        _SEEN,
        "is the worker that ours is derived from",
    ),
    Hook(f"{_WORKER}.alloc_memory_pool", None, _SEEN, "tells when the target is loaded"),
    Hook(f"{_WORKER}._init_preallocated_tensors", (), _SEEN, "makes the buffers of one draft width"),
    Hook(
        f"{_WORKER}._prepare_for_speculative_decoding", ("batch",), _SEEN, "turns drafts into a verify batch"
    ),
    Hook(f"{_WORKER}._prepare_draft_tokens", ("batch",), _SEEN, "asks for the drafts"),
    Hook(f"{_WORKER}._update_ngram_corpus", ("batch",), _SEEN, "is switched off: there is no corpus"),
    Hook(
        f"{_WORKER}.forward_batch_generation",
        ("batch", "on_publish", "pp_proxy_tensors"),
        _SEEN,
        "drafts and verifies a step",
    ),
    Hook(
        f"{_WORKER}.on_verify_complete_cpu",
        ("num_correct_drafts_per_req", "batch_size"),
        _SEEN,
        "tells that a step's tokens are handed out next",
    ),
    Hook(f"{_SPECULATIVE}.ngram_worker:NgramCorpus", None, _SEEN, "is kept from being built"),
    Hook(
        f"{_SPECULATIVE}.base_spec_worker:BaseSpecWorker.note_request_finished",
        ("rid", "natural_stop"),
        _SEEN,
        "says which requests are over",
    ),
    Hook(
        f"{_SPECULATIVE}.eagle_utils:verify_tree_greedy_func",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "target_predict",
            "topk",
        ),
        _SEEN,
        "walks the tree along the tokens that were sampled",
    ),
    EAGLE_SAMPLE,
    ROW_WIDTH,
    Hook(
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode",
        (),
        _SEEN,
        "says how many KV slots a step reserves",
    ),
)
"""Without these no algorithm is registered."""

HOOKS = (*REQUIRED, FINISH, META_INFO, INTERNAL_STATE, LAYERS, LAST_STATES, FILTER)
