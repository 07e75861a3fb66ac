"""Checkpoints for TensorRT-LLM's engine builder: those of a target, with a head added to them.

``trtllm-build`` takes one folder that holds both: ``config.json``, and ``rank{r}.safetensors`` for each rank.
The target's is made by TensorRT-LLM's own ``convert_checkpoint.py``, which knows its architectures. Its
tensors are copied as bytes, and the head's are written beside them, split for as many ranks.

Names, keys and splits are those of TensorRT-LLM's source, 0.17 to 1.2 (``tensorrt_llm/models/medusa``,
``tensorrt_llm/models/eagle``). Imports no engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_plugins.adapters.tensorrt_llm.base import Base
from spec_plugins.adapters.tensorrt_llm.shards import rank_tensors
from spec_plugins.adapters.tensorrt_llm.trees import Choices, check_choices, depth_of, non_leaves_of
from spec_plugins.checkpoints import EagleConfig, Head, MedusaConfig, check_fits
from spec_plugins.checkpoints.files import check_free, new_folder, write_json
from spec_plugins.checkpoints.streaming import write_streamed
from spec_plugins.errors import ConfigError, UnsupportedError

__all__ = ["check_joined", "joined_config", "write_checkpoint"]

MOST_EAGLE_DRAFTS = 256
"""What its builder asserts for EAGLE."""
_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM")
_QWEN = ("QWenForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM")
_TARGETS: Mapping[str, tuple[str, ...]] = {"medusa": (*_LLAMA, *_QWEN), "eagle": _LLAMA}
"""The architectures that its classes with heads derive from."""


def check_joined(head: Head, base: Base, choices: Choices) -> None:
    """Check that TensorRT-LLM can run a head on this target with this tree.

    Raises:
        ConfigError: sizes that do not go together, with each other or with the number of ranks.
        UnsupportedError: what it has no place for.
    """
    method = head.config.method
    if method not in _TARGETS:
        raise UnsupportedError(
            f"TensorRT-LLM's engine builder has no {method}, only medusa and eagle. Nearest: its PyTorch "
            "backend, which loads the head in the layout eagle: `spec-plugins args tensorrt-llm`"
        )
    check_fits(head.config, base.target)
    named = base.config["architecture"]
    if named not in _TARGETS[method]:
        raise UnsupportedError(
            f"TensorRT-LLM's {method} is for targets of {', '.join(_TARGETS[method])}, and {base.folder} is "
            f"{named}"
        )
    quantized = base.config.get("quantization")
    quantized = quantized if isinstance(quantized, dict) else {}
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if quantized.get(key):
            raise UnsupportedError(
                f"{base.folder} is quantized ({key} {quantized[key]}), and this version adds heads to "
                "unquantized targets only; convert the target without, or use TensorRT-LLM's own converter"
            )
    _check_range(head, base)
    if isinstance(head.config, MedusaConfig):
        _check_medusa(head.config, base, choices)
    else:
        _check_eagle(head.config, base, choices)


def _check_medusa(config: MedusaConfig, base: Base, choices: Choices) -> None:
    if config.draft_vocab_size < config.vocab_size:
        raise UnsupportedError(
            f"TensorRT-LLM has no place for a reduced vocabulary ({config.draft_vocab_size} of "
            f"{config.vocab_size} tokens); train heads of the whole one"
        )
    if base.config.get("hidden_act") != "silu":
        raise UnsupportedError(
            "Medusa's blocks are silu, and TensorRT-LLM gives them the target's hidden_act, "
            f"{base.config.get('hidden_act')!r}"
        )
    _check_splits(base, hidden_size=config.hidden_size)
    check_choices(choices, config.vocab_size, gaps=True)
    if depth_of(choices) > config.num_heads:
        raise ConfigError(
            f"options.choices: {depth_of(choices)} tokens deep, and there are {config.num_heads} Medusa "
            "heads; leave the longer paths out"
        )


def _check_eagle(config: EagleConfig, base: Base, choices: Choices) -> None:
    if config.attention_bias:
        raise UnsupportedError("TensorRT-LLM's EAGLE has no place for the biases of the attention")
    # Its cache holds the target's layers and the head's in one tensor, and its rope is computed once.
    heads = base.config["num_attention_heads"]
    theirs = {
        "num_key_value_heads": base.config.get("num_key_value_heads") or heads,
        "head_dim": base.config.get("head_size") or base.target.hidden_size // heads,
        "rope_theta": base.config.get("rotary_base") or 10_000.0,
        "rope_scaling": _rope_kind(base.config.get("rotary_scaling")),
    }
    ours = {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_kind(config.rope_scaling),
    }
    for name, value in ours.items():
        if value != theirs[name]:
            raise UnsupportedError(
                f"{name} is {value!r} in the head and {theirs[name]!r} in the target, and TensorRT-LLM has "
                "one for both"
            )
    tp = base.tp_size
    if tp % config.num_key_value_heads:  # otherwise ranks share them
        _check_splits(base, num_key_value_heads=config.num_key_value_heads)
    _check_splits(
        base, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
    )  # fmt: skip
    check_choices(choices, config.vocab_size, gaps=False)
    if len(choices) > MOST_EAGLE_DRAFTS:
        raise ConfigError(
            f"options.choices: {len(choices)} draft tokens, and with EAGLE TensorRT-LLM takes "
            f"{MOST_EAGLE_DRAFTS} at most"
        )


def _check_splits(base: Base, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % base.tp_size:
            raise ConfigError(
                f"{name} {size} cannot be split over the {base.tp_size} ranks of {base.folder}; convert the "
                "target with a tp_size that divides it"
            )


def _check_range(head: Head, base: Base) -> None:
    """Float16 ends at 65504, and would make infinity of what is larger."""
    import torch

    largest = torch.finfo(base.dtype).max
    for name, tensor in head.tensors.items():
        narrower = tensor.is_floating_point() and torch.finfo(tensor.dtype).max > largest
        if narrower and float(torch.stack(torch.aminmax(tensor)).abs().max()) > largest:
            raise ConfigError(
                f"{name} holds weights beyond {base.config['dtype']}, the target's dtype; convert the target "
                "in another"
            )


def _rope_kind(scaling: Any) -> dict[str, Any] | None:
    """A scaling of rope with its kind under one name; ``None``: none."""
    if not scaling:
        return None
    found = dict(scaling) if isinstance(scaling, dict) else {"rope_type": scaling}
    kind = found.pop("rope_type", None) or found.pop("type", None)
    found.pop("type", None)
    return None if kind == "default" else {"rope_type": kind, **found}


# --------------------------------------------------------------------------------------------- config.json


def joined_config(head: Head, base: Base, choices: Choices) -> dict[str, Any]:
    """``config.json`` of the target with the head; the target's keys stay."""
    drafts = {"max_draft_len": len(choices)}
    config = head.config
    if isinstance(config, MedusaConfig):
        usual = "qwen2" if base.config["architecture"] in _QWEN else "llama"
        return {
            **base.config,
            "architecture": "MedusaForCausalLM",
            **drafts,
            "num_medusa_heads": config.num_heads,
            "num_medusa_layers": config.num_layers,
            # By this its class tells Qwen's layers from Llama's.
            "model_type": base.config.get("model_type") or base.config.get("qwen_type") or usual,
        }
    return {
        **base.config,
        "architecture": "EagleForCausalLM",
        **drafts,
        "num_eagle_layers": depth_of(choices),
        "max_non_leaves_per_layer": non_leaves_of(choices),
        "eagle_net_config": _net_config(config, base),
    }


def _net_config(config: EagleConfig, base: Base) -> dict[str, Any]:
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": base.config["dtype"],
        "logits_dtype": "float32",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rotary_base": base.config.get("rotary_base") or 10_000.0,
        "rotary_scaling": base.config.get("rotary_scaling"),
        "norm_epsilon": config.rms_norm_eps,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": base.tp_size, "tp_size": base.tp_size, "pp_size": 1},
        "use_parallel_embedding": base.config.get("use_parallel_embedding", False),
        "embedding_sharding_dim": base.config.get("embedding_sharding_dim", 0),
        "head_dim": config.head_dim,
        "head_size": config.head_dim,
    }


def write_checkpoint(
    head: Head,
    base: Base,
    folder: str | Path,
    choices: Choices,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write the target's checkpoint with a head in it, for ``trtllm-build``; it appears when it is whole.

    Costs the disk that both take, an EAGLE head once for each level of the tree, and the memory of one
    rank's part of one tensor of the head's. Weights of another dtype than the target's are converted to it.

    Args:
        head: as :func:`spec_plugins.checkpoints.read_head` has it, checked, and mapped from its files.
        base: the target's checkpoint, which is left as it is.
        folder: new or empty.
        choices: the tree that is drafted; its size is built in.
        on_tensor: told each tensor's name when its turn comes.

    Raises:
        ConfigError, UnsupportedError: as :func:`check_joined`; a broken file of the target's; a folder that
            is in use, or a disk that is too small. Nothing is written then.
    """
    check_free(folder)
    check_joined(head, base, choices)
    ranks = [rank_tensors(head, base, rank, choices) for rank in range(base.tp_size)]
    _check_disk(Path(folder), sum(t.nbytes for tensors in ranks for t in tensors.values()))
    with new_folder(folder) as temporary:
        write_json(temporary / "config.json", joined_config(head, base, choices))
        for rank, tensors in enumerate(ranks):

            def told(name: str, rank: int = rank) -> None:
                on_tensor(f"rank {rank + 1} of {base.tp_size}, {name}")

            write_streamed(temporary / f"rank{rank}.safetensors", tensors, told)


def _check_disk(folder: Path, needed: int) -> None:
    there = next(path for path in folder.absolute().parents if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"{folder}: {needed / 1e9:.1f} GB are to be written, and {free / 1e9:.1f} GB are free there; "
            "name another folder, or make room"
        )
