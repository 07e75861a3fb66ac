"""EAGLE's own layout, what vLLM and SGLang read, and the ``speculators`` layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from spec_plugins.checkpoints.head import EagleConfig, Head, HeadConfig
from spec_plugins.checkpoints.layout import TARGET_KEY, Layout, Wanted, is_zero, renamed
from spec_plugins.config import validated
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from spec_plugins.checkpoints.files import Stored

__all__ = ["EagleLayout", "SglangEagleLayout", "SpeculatorsLayout", "VllmEagleLayout"]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NO_BIAS = "fc_bias"
"""Ours, ``false``: the bias of ``fc`` is there because an engine wants one, and the head has none."""
_KEPT = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_layers": "num_hidden_layers",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "attention_bias": "attention_bias",
    "vocab_size": "vocab_size",
}
"""Fields of :class:`EagleConfig`, and what Hugging Face's Llama configuration calls them."""
_REFUSED = {
    "mlp_bias": "biases in the MLP",
    "norm_before_fc": "a norm before fc",
    "fc_norm": "norms before fc",
    "use_aux_norm": "norms before fc",
    "quantization_config": "quantized weights",
    "parallel_drafting": "all draft tokens at once",
    "pard_token": "all draft tokens at once",
}


class _Eagle(Layout):
    """All of them: a Llama configuration, and a decoder layer's tensors."""

    methods: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    engines = ("vllm", "sglang")
    architectures: ClassVar[Mapping[str, str]]
    """What ``config.json`` calls each method."""
    has_t2d: ClassVar[bool] = False
    """Whether files of EAGLE-3 hold the mask ``t2d`` beside ``d2t``."""

    def recognises(self, stored: Stored) -> bool:
        return _architecture(stored.config) in self.architectures.values()

    def read(self, stored: Stored) -> Head:
        return _read(stored, stored.config, _method(stored), _layers_of(stored.config))

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        bias = head.tensors.get("fc.bias")
        return ["the bias of fc, which is not zero"] if bias is not None and not is_zero(bias) else []

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = _eagle(head)
        return {
            "architectures": [self.architectures[config.method]],
            **({TARGET_KEY: config.target} if config.target else {}),
            **_llama(head),
            **(_eagle3(config) if config.method == "eagle3" else {}),
        }

    def tensors(self, head: Head) -> dict[str, torch.Tensor]:
        tensors = super().tensors(head)
        tensors.pop("fc.bias", None)
        if self.has_t2d and "d2t" in tensors:
            tensors["t2d"] = _mask(tensors["d2t"], head.config.vocab_size)
        return tensors

    def obstacles(self, head: Head, config: Mapping[str, Any], engine: str, wanted: Wanted) -> list[str]:
        reader, named = _READERS[engine], _architecture(config)
        found = reader.lost(head, wanted)
        known = _LOADED[engine, _eagle(head).method]
        if named not in known:
            found.append(
                f"config.json names the architecture {named or 'of nothing'}, not {' or '.join(known)}"
            )
        if engine == "vllm" and "fc.bias" in head.tensors and not found:
            found.append("fc has a bias, if only of zeros, and vLLM's has none")
        inputs, outputs = _LAYER_IDS in config, _LAYER_IDS in (config.get("eagle_config") or {})
        if (inputs, outputs) == ((False, True) if engine == "vllm" else (True, False)):
            other = "SGLang" if engine == "vllm" else "vLLM"
            found.append(f"config.json names the target's layers as {other} counts them")
        if head.config.num_layers > 1 and (self.name == "sglang") != (engine == "sglang"):
            found.append("its later layers' norms have other names there")
        return found


class EagleLayout(_Eagle):
    """EAGLE's own, in which EAGLE-3 has one layer, called ``midlayer``."""

    name = "eagle"
    architectures: ClassVar[Mapping[str, str]] = {
        "eagle": "LlamaForCausalLM",
        "eagle3": "LlamaForCausalLMEagle3",
    }
    has_t2d = True

    def recognises(self, stored: Stored) -> bool:
        # The last to be asked: a plain Llama has this architecture too.
        return "fc.weight" in stored.tensors or "Eagle" in _architecture(stored.config)

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        config = _eagle(head)
        found = []
        if config.method == "eagle3":
            found += super().lost(head, wanted)
            if config.num_layers > 1:
                found.append(f"layers: {config.num_layers}, and it has one")
            if config.norm_before_residual:
                found.append("norm_before_residual")
            if config.norm_output:
                found.append("norm_output")
            if config.aux_layers and not _default(config, wanted):
                layers = ", ".join(map(str, config.aux_layers))
                found.append(
                    f"aux_layers {layers}, since EAGLE's own code takes 2, the middle one and the last but 2 "
                    "(where these are the same layers, --target MODEL_DIR shows it)"
                )
        if config.attention_bias:
            found.append("the biases of the attention")
        return found

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = _eagle(head)
        written = super().config(head, wanted)
        if config.method == "eagle" and not config.fc_bias:
            written["bias"] = False
        if config.aux_layers:
            written[_LAYER_IDS] = list(config.aux_layers)
        return written

    def tensors(self, head: Head) -> dict[str, torch.Tensor]:
        tensors = super().tensors(head)
        if "fc.bias" in head.tensors and _eagle(head).method == "eagle":
            tensors["fc.bias"] = head.tensors["fc.bias"]
        return tensors

    def stored_name(self, name: str, config: HeadConfig) -> str:
        first = isinstance(config, EagleConfig) and config.method == "eagle3"
        return (
            f"midlayer.{name.removeprefix('layers.0.')}" if first and name.startswith("layers.0.") else name
        )


class VllmEagleLayout(_Eagle):
    """vLLM's: canonical names, and its own architectures."""

    name = "vllm"
    architectures: ClassVar[Mapping[str, str]] = {
        "eagle": "EagleLlamaForCausalLM",
        "eagle3": "Eagle3LlamaForCausalLM",
    }

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = _eagle(head)
        written = super().config(head, wanted)
        if config.aux_layers:
            written[_LAYER_IDS] = list(config.aux_layers)
        if config.norm_before_residual:
            written["norm_before_residual"] = True
        return written


class SglangEagleLayout(_Eagle):
    """SGLang's, which counts from a layer's output, and always has a bias in EAGLE-1's ``fc``."""

    name = "sglang"
    architectures: ClassVar[Mapping[str, str]] = {
        "eagle": "LlamaForCausalLMEagle",
        "eagle3": "LlamaForCausalLMEagle3",
    }

    def recognises(self, stored: Stored) -> bool:
        return super().recognises(stored) and not any(name.startswith("midlayer.") for name in stored.tensors)

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        config = _eagle(head)
        found = []
        if config.method == "eagle3":
            found += super().lost(head, wanted)
            if config.norm_before_residual:
                found.append("norm_before_residual, which SGLang does not have")
            if config.attention_bias:
                found.append("the biases of the attention, which SGLang's EAGLE-3 does not have")
        if config.own_embeddings and config.hidden_size == config.target_hidden_size:
            if wanted.target is None:
                found.append(
                    "the head's own embeddings, since SGLang takes the target's; where they are the same, "
                    "--target MODEL_DIR shows it"
                )
            elif not _same(head.tensors["embed_tokens.weight"], wanted.target.embeddings()):
                found.append("the head's own embeddings, which are not the target's, and SGLang takes those")
        return found

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = _eagle(head)
        written = super().config(head, wanted)
        if config.method == "eagle" and not config.fc_bias:
            written[_NO_BIAS] = False
        if config.aux_layers:
            ids = [layer - 1 for layer in config.aux_layers]
            written["eagle_config"] = {_LAYER_IDS: ids, "use_aux_hidden_state": True}
        return written

    def tensors(self, head: Head) -> dict[str, torch.Tensor]:
        tensors = super().tensors(head)
        if _eagle(head).method == "eagle":
            weight = head.tensors["fc.weight"]
            tensors["fc.bias"] = head.tensors.get("fc.bias", weight.new_zeros(len(weight)))
        return tensors

    def stored_name(self, name: str, config: HeadConfig) -> str:
        later = (
            isinstance(config, EagleConfig) and config.method == "eagle3" and not name.startswith("layers.0.")
        )
        return name.replace(".input_layernorm.", ".hidden_norm.") if later else name


class SpeculatorsLayout(_Eagle):
    """The ``speculators`` library's, which vLLM loads by itself."""

    name = "speculators"
    methods = ("eagle3",)
    architectures: ClassVar[Mapping[str, str]] = {"eagle3": "Eagle3Speculator"}
    has_t2d = True

    def recognises(self, stored: Stored) -> bool:
        return "speculators_model_type" in stored.config or "speculators_config" in stored.config

    def read(self, stored: Stored) -> Head:
        config = stored.config
        kind, llama = config.get("speculators_model_type"), config.get("transformer_layer_config")
        if kind != "eagle3":
            raise ConfigError(f"config.json: speculators_model_type {kind!r} is not supported, only 'eagle3'")
        if not isinstance(llama, dict):
            raise ConfigError("config.json: transformer_layer_config is missing")
        said = config.get("speculators_config")
        verifier = said.get("verifier") if isinstance(said, dict) else None
        own = {
            "draft_vocab_size": config.get("draft_vocab_size"),
            "target_hidden_size": config.get("target_hidden_size"),
            # As vLLM reads it.
            "norm_before_residual": config.get("norm_before_residual", True),
            "norm_output": config.get("norm_output", False),
            TARGET_KEY: verifier.get("name_or_path") if isinstance(verifier, dict) else None,
            **{key: config[key] for key in _REFUSED if key in config},
        }
        return _read(stored, {**llama, **own}, "eagle3", _ids(config, _LAYER_IDS))

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = _eagle(head)
        llama, more = _llama(head), _eagle3(config)
        if "num_aux_hidden_states" in more:
            llama["num_aux_hidden_states"] = more.pop("num_aux_hidden_states")
        more.pop("norm_output", None)
        return {
            "architectures": [self.architectures["eagle3"]],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": wanted.num_speculative_tokens}
                ],
                "verifier": {
                    "architectures": list(wanted.target.architectures) if wanted.target else [],
                    "name_or_path": config.target,
                },
            },
            "transformer_layer_config": llama,
            **more,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            **({_LAYER_IDS: list(config.aux_layers)} if config.aux_layers else {}),
            "tie_word_embeddings": False,
            "torch_dtype": llama["torch_dtype"],
        }


_READERS: Mapping[str, _Eagle] = {"vllm": VllmEagleLayout(), "sglang": SglangEagleLayout()}
_LOADED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("vllm", "eagle"): ("EagleLlamaForCausalLM", "LlamaForCausalLM"),
    ("vllm", "eagle3"): ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator"),
    ("sglang", "eagle"): ("LlamaForCausalLMEagle",),
    ("sglang", "eagle3"): ("LlamaForCausalLMEagle3",),
}
"""The architectures that an engine takes for a head of each method."""


# ----------------------------------------------------------------------------------------- configurations


def _eagle(head: Head) -> EagleConfig:
    assert isinstance(head.config, EagleConfig)
    return head.config


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _method(stored: Stored) -> str:
    eagle3 = "Eagle3" in _architecture(stored.config) or any(
        n.endswith("hidden_norm.weight") for n in stored.tensors
    )
    return "eagle3" if eagle3 else "eagle"


def _llama(head: Head) -> dict[str, Any]:
    """The decoder layer's configuration, in words that old and new versions of transformers know."""
    config = _eagle(head)
    scaling = dict(config.rope_scaling or {})
    return {
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _KEPT.items()},
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **scaling},
        "tie_word_embeddings": False,
        "torch_dtype": str(head.tensors["fc.weight"].dtype).removeprefix("torch."),
    }


def _eagle3(config: EagleConfig) -> dict[str, Any]:
    """What all readers of EAGLE-3 take beside the decoder layer's configuration."""
    other = config.target_hidden_size != config.hidden_size
    return {
        "draft_vocab_size": config.draft_vocab_size,
        **({"target_hidden_size": config.target_hidden_size} if other else {}),
        **({"num_aux_hidden_states": config.features} if config.features != 3 else {}),
        **({"norm_output": True} if config.norm_output else {}),
    }


def _read(stored: Stored, llama: Mapping[str, Any], method: str, aux_layers: list[int]) -> Head:
    """A head from a Llama configuration with what EAGLE adds to it."""
    for key, what in _REFUSED.items():
        if llama.get(key):
            raise ConfigError(f"config.json: {key} is {llama[key]!r}; heads with {what} are not supported")
    for key, only in (("model_type", "llama"), ("hidden_act", "silu")):
        if llama.get(key, only) != only:
            raise ConfigError(f"config.json: {key} is {llama[key]!r}, and only {only!r} is supported")
    given = {ours: llama[theirs] for ours, theirs in _KEPT.items() if llama.get(theirs) is not None}
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    given.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        given.setdefault("head_dim", width // heads)
    theta, scaling = _rope(llama)
    tensors = renamed(stored, _canonical)
    if llama.get(_NO_BIAS) is False and "fc.bias" in tensors and is_zero(tensors["fc.bias"]):
        del tensors["fc.bias"]
    vocabulary = given.get("vocab_size")
    drafts = llama.get("draft_vocab_size") if method == "eagle3" else None
    fields = {
        "rms_norm_eps": 1e-6,  # Llama's default
        **given,
        "method": method,
        "target": llama.get(TARGET_KEY),
        "draft_vocab_size": drafts or vocabulary,
        "target_hidden_size": llama.get("target_hidden_size") or width,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "aux_layers": aux_layers if method == "eagle3" else (),
        "norm_before_residual": llama.get("norm_before_residual", False),
        "norm_output": llama.get("norm_output", False),
        "fc_bias": "fc.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }
    config = validated(EagleConfig, {k: v for k, v in fields.items() if v is not None}, "config.json")
    if llama.get("num_aux_hidden_states", config.features) != config.features:
        raise ConfigError(
            f"config.json: num_aux_hidden_states is {llama['num_aux_hidden_states']}, and {_LAYER_IDS} names "
            f"{len(config.aux_layers) or 'none'}"
        )
    return Head(config, _vocabulary(tensors, config))


def _rope(llama: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    found = llama.get("rope_parameters") or llama.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: the scaling of rope must be an object, and is {found!r}")
    scaling = dict(found)
    theta = scaling.pop("rope_theta", None) or llama.get("rope_theta") or 10_000.0
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    return theta, {"rope_type": kind, **scaling} if kind != "default" or scaling else None


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise ConfigError(f"config.json: {key} is {found!r}, and must be a list of layers")
    return found


def _layers_of(config: Mapping[str, Any]) -> list[int]:
    """The layers whose input is taken. SGLang looks into ``eagle_config`` and takes the output, vLLM first
    at the top and takes the input."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(
            "config.json: use_aux_hidden_state is false; heads without these states are not supported"
        )
    if nested.get("norm_before_fc"):
        raise ConfigError("config.json: norm_before_fc is set; heads with a norm before fc are not supported")
    inputs, outputs = _ids(config, _LAYER_IDS), [i + 1 for i in _ids(nested, _LAYER_IDS)]
    if inputs and outputs and inputs != outputs:
        raise ConfigError(
            f"config.json: {_LAYER_IDS} is {inputs}, and {nested[_LAYER_IDS]} in eagle_config, which counts "
            "one less; these are not the same layers, leave out the wrong one"
        )
    return inputs or outputs


def _default(config: EagleConfig, wanted: Wanted) -> bool:
    if wanted.target is None:
        return False
    without = config.model_copy(update={"aux_layers": ()})
    return config.aux_layers == without.layers_taken(wanted.target.num_layers)


# ------------------------------------------------------------------------------------------------ tensors


def _canonical(name: str) -> str:
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    # SGLang's name of the norm that later layers start with.
    if name.startswith("layers.") and not name.startswith("layers.0."):
        name = name.replace(".hidden_norm.", ".input_layernorm.")
    return name


def _vocabulary(tensors: dict[str, torch.Tensor], config: EagleConfig) -> dict[str, torch.Tensor]:
    """Without what follows from the rest: the mask ``t2d``, offsets of a whole vocabulary, rope's table."""
    kept = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    mask, offsets = kept.pop("t2d", None), kept.get("d2t")
    whole = config.draft_vocab_size == config.vocab_size
    if whole and offsets is not None and is_zero(offsets):
        del kept["d2t"]
    sound = whole or offsets is None or offsets.is_floating_point() or offsets.ndim != 1
    if mask is not None and not sound:
        assert offsets is not None
        # Offsets that are wrong by themselves are told of later.
        if _ascends(offsets, config.vocab_size) and not _mask(offsets, config.vocab_size).equal(mask.bool()):
            raise ConfigError("t2d and d2t do not say the same tokens; the files are broken")
    return kept


def _ascends(offsets: torch.Tensor, size: int) -> bool:
    import torch

    ids = offsets.long() + torch.arange(len(offsets))
    inside = len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < size
    return inside and bool((ids.diff() > 0).all())


def _mask(offsets: torch.Tensor, size: int) -> torch.Tensor:
    """Which of the target's tokens the head drafts, ``[vocab_size]`` bool."""
    import torch

    mask = torch.zeros(size, dtype=torch.bool)
    mask[offsets.long() + torch.arange(len(offsets))] = True
    return mask


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and ours.to(theirs.dtype).equal(theirs)
