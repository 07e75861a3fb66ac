"""What the embedded engine relies on inside transformers."""

from __future__ import annotations

from spec_plugins.hooks import Hook

__all__ = ["HOOKS"]

_SEEN = "5.0, 5.24"
_CACHE = "transformers.cache_utils:"
_LAYER = f"{_CACHE}CacheLayerMixin."

HOOKS = (
    Hook("transformers:AutoModelForCausalLM.from_pretrained", None, _SEEN, "loads a model"),
    Hook(
        "transformers:AutoTokenizer.from_pretrained",
        ("pretrained_model_name_or_path",),
        _SEEN,
        "loads a tokenizer",
    ),
    Hook(
        "transformers.models.llama.modeling_llama:LlamaForCausalLM.forward",
        (
            "input_ids",
            "attention_mask",
            "position_ids",
            "cache|past_key_values",
            "use_cache",
            "logits_to_keep",
        ),
        _SEEN,
        "runs the target over a batch of drafts; Llama stands for the decoders",
    ),
    Hook(
        "transformers:PreTrainedConfig.get_text_config", (), _SEEN, "reads the language model's configuration"
    ),
    Hook("transformers:PreTrainedModel.get_input_embeddings", (), _SEEN, "gives proposers the embeddings"),
    Hook("transformers:PreTrainedModel.get_output_embeddings", (), _SEEN, "gives proposers the LM head"),
    Hook(f"{_CACHE}Cache.__init__", ("layers",), _SEEN, "is the base of the cache with a row a request"),
    Hook(
        f"{_CACHE}Cache.update",
        ("key_states", "value_states", "layer_idx"),
        _SEEN,
        "hands each layer's keys and values over",
    ),
    Hook(f"{_LAYER}update", ("key_states", "value_states"), _SEEN, "stores a layer's keys and values"),
    Hook(
        f"{_LAYER}lazy_initialization", ("key_states", "value_states"), _SEEN, "is overridden to do nothing"
    ),
    Hook(f"{_LAYER}get_mask_sizes", ("query_length|cache_position",), _SEEN, "says how wide a mask is"),
    Hook(f"{_LAYER}get_seq_length", (), _SEEN, "says how much the cache holds"),
    Hook(
        f"{_CACHE}CacheLayerMixin.get_max_length|CacheLayerMixin.get_max_cache_shape",
        (),
        _SEEN,
        "says that the cache has no bound",
    ),
    Hook(
        "transformers:GenerationMixin.generate",
        ("custom_generate",),
        _SEEN,
        "takes `speculate(...)` as its decoding method",
    ),
    Hook(
        "transformers:GenerationMixin._sample",
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "streamer"),
        _SEEN,
        "shows what `generate` calls a decoding method with",
    ),
)
