"""Medusa's own layout, and the one that vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_plugins.checkpoints.checks import target_ids
from spec_plugins.checkpoints.head import Head, HeadConfig, MedusaConfig
from spec_plugins.checkpoints.layout import TARGET_KEY, Layout, Wanted, is_zero, renamed
from spec_plugins.config import validated

if TYPE_CHECKING:
    import torch

    from spec_plugins.checkpoints.files import Stored

__all__ = ["MedusaLayout", "VllmMedusaLayout"]

_STORED = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_CANONICAL = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_SHARED = "medusa_shared_lm_head"
"""Ours: Medusa's own layout has an LM head for each head, this says that they are one."""
_NEEDS_TARGET = "the LM head, which is the target's own and has to be copied in: add --target MODEL_DIR"


class _Medusa(Layout):
    methods = ("medusa",)
    engines = ("vllm",)

    def complete(self, head: Head, wanted: Wanted) -> Head:
        config = head.config
        assert isinstance(config, MedusaConfig)
        if config.lm_head != "target" or wanted.target is None:
            return head
        copied = wanted.target.lm_head(target_ids(head))
        own = config.model_copy(update={"lm_head": "shared"})
        return replace(head, config=own, tensors={**head.tensors, "lm_head.weight": copied})


class MedusaLayout(_Medusa):
    """Medusa's own: ``{head}.{layer}.linear.weight``, and ``{head}.{layers}.weight`` for the LM head."""

    name = "medusa"
    weights = "medusa_lm_head.safetensors"

    def recognises(self, stored: Stored) -> bool:
        said = "medusa_num_heads" in stored.config or stored.weights.startswith("medusa_lm_head.")
        return said or any(_STORED.fullmatch(name) for name in stored.tensors)

    def read(self, stored: Stored) -> Head:
        parts = [match.groups() for match in map(_STORED.fullmatch, stored.tensors) if match]
        config = stored.config
        heads = config.get("medusa_num_heads", 1 + max((int(p[0]) for p in parts), default=0))
        layers = config.get("medusa_num_layers")
        if layers is None:
            layers = 1 + max((int(p[1]) for p in parts if p[2]), default=-1)
        tensors = renamed(stored, lambda name: _canonical(name, layers))
        biases = [name for name in tensors if name.endswith(".bias")]
        if biases and config.get("medusa_fc_bias") is False and all(is_zero(tensors[b]) for b in biases):
            tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
        lm_heads = [name for name in tensors if name.startswith("lm_heads.")]
        rows = next((_side(tensors[name], 0) for name in lm_heads), None)
        weights = [*lm_heads, *(name for name in tensors if name.startswith("blocks."))]
        width = next((_side(tensors[name], 1) for name in weights), None)
        kind = "own" if lm_heads else "target"
        if lm_heads and config.get(_SHARED) is True and _equal([tensors[name] for name in lm_heads]):
            kind = "shared"
            tensors["lm_head.weight"] = tensors[lm_heads[0]]
            tensors = {name: tensor for name, tensor in tensors.items() if name not in lm_heads}
        vocabulary = config.get("vocab_size", rows)
        fields = {
            "hidden_size": config.get("hidden_size", width),
            "vocab_size": vocabulary,
            "draft_vocab_size": vocabulary,
            "target": config.get(TARGET_KEY),
            "num_heads": heads,
            "num_layers": layers,
            "bias": any(name.endswith(".bias") for name in tensors),
            "lm_head": kind,
            "accuracies": config.get("accuracies"),
        }
        return Head(_validated(fields), tensors)

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        config = head.config
        assert isinstance(config, MedusaConfig)
        found = []
        if config.draft_vocab_size < config.vocab_size:
            found.append(f"the reduced vocabulary ({config.draft_vocab_size} of {config.vocab_size} tokens)")
        if config.lm_head == "target":
            found.append(_NEEDS_TARGET)
        return found

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = head.config
        assert isinstance(config, MedusaConfig)
        # What Medusa's own code does not read is for vLLM, which reads this layout too.
        return {
            **({TARGET_KEY: config.target} if config.target else {}),
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "medusa_fc_bias": config.bias,
            **({_SHARED: True} if config.lm_head == "shared" else {}),
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            **({"accuracies": config.accuracies} if config.accuracies else {}),
        }

    def tensors(self, head: Head) -> dict[str, torch.Tensor]:
        config = head.config
        assert isinstance(config, MedusaConfig)
        every = dict(head.tensors)
        shared = every.pop("lm_head.weight", None)
        if shared is not None:
            every |= {f"lm_heads.{i}.weight": shared for i in range(config.num_heads)}
        stored = {self.stored_name(name, config): tensor for name, tensor in every.items()}
        if not config.bias:  # Medusa's own code has them always
            for name in [n for n in stored if n.endswith(".linear.weight")]:
                weight = stored[name]
                stored[name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
        return stored

    def stored_name(self, name: str, config: HeadConfig) -> str:
        if block := _CANONICAL.fullmatch(name):
            return f"{block[1]}.{block[2]}.linear.{block[3]}"
        own = re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
        return f"{own[1]}.{config.num_layers}.weight" if own else name

    def obstacles(self, head: Head, config: Mapping[str, Any], engine: str, wanted: Wanted) -> list[str]:
        found = self.lost(head, wanted)
        if missing := [key for key in ("hidden_size", "vocab_size") if key not in config]:
            found.append(f"config.json does not say {' and '.join(missing)}")
        biases = [t for name, t in head.tensors.items() if name.endswith(".bias")]
        if config.get("medusa_fc_bias") is not True and not all(map(is_zero, biases)):
            found.append("config.json does not say medusa_fc_bias, so that the biases would be left out")
        return found


class VllmMedusaLayout(_Medusa):
    """vLLM's: canonical names, and a configuration of the type ``medusa``."""

    name = "vllm"

    def recognises(self, stored: Stored) -> bool:
        said = stored.config.get("model_type") == "medusa"
        numbered = any(_STORED.fullmatch(name) for name in stored.tensors)
        return not numbered and (said or any(name.startswith("blocks.") for name in stored.tensors))

    def read(self, stored: Stored) -> Head:
        config, tensors = stored.config, dict(stored.tensors)
        vocabulary = config.get("vocab_size")
        drafts = config.get("truncated_vocab_size") or vocabulary
        shared = config.get("original_lm_head") is True
        if shared and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
        ids = tensors.get("token_map") if isinstance(vocabulary, int) else None
        for name in [n for n in tensors if n.startswith("lm_head")]:
            # vLLM takes a whole LM head too, and chooses its rows.
            whole = drafts != vocabulary == _side(tensors[name], 0)
            if whole and ids is not None and _in_range(ids, vocabulary):
                tensors[name] = tensors[name][ids.long()]
        fields = {
            "hidden_size": config.get("hidden_size"),
            "vocab_size": vocabulary,
            "draft_vocab_size": drafts,
            "target": config.get(TARGET_KEY),
            "num_heads": config.get("num_heads"),
            "num_layers": config.get("num_hidden_layers", 1),
            "bias": bool(config.get("medusa_fc_bias", False)),
            "lm_head": "shared" if shared else "own",
            "accuracies": config.get("accuracies"),
        }
        return Head(_validated(fields), tensors)

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        config = head.config
        assert isinstance(config, MedusaConfig)
        found = []
        if config.draft_vocab_size < config.vocab_size:
            # Its check of what was loaded does not know token_map (seen in 0.32).
            found.append(
                f"the reduced vocabulary ({config.draft_vocab_size} of {config.vocab_size} tokens), for "
                "which vLLM has a place, but with which it does not start"
            )
        if config.lm_head == "target":
            found.append(_NEEDS_TARGET)
        return found

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        config = head.config
        assert isinstance(config, MedusaConfig)
        # vLLM takes any key with "num" and "heads" or "layers" in it for its own: there is one of each.
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **({TARGET_KEY: config.target} if config.target else {}),
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": config.bias,
            "original_lm_head": config.lm_head == "shared",
            **({"accuracies": config.accuracies} if config.accuracies else {}),
        }


def _validated(fields: Mapping[str, Any]) -> MedusaConfig:
    return validated(MedusaConfig, {k: v for k, v in fields.items() if v is not None}, "config.json")


def _canonical(name: str, layers: object) -> str:
    found = _STORED.fullmatch(name)
    if found is None:
        return name
    head, layer, linear, kind = found.groups()
    if linear:
        return f"blocks.{int(head)}.layers.{int(layer)}.{kind}"
    # What does not stand behind the last block is no LM head, and not known.
    return f"lm_heads.{int(head)}.{kind}" if int(layer) == layers else name


def _side(tensor: torch.Tensor, i: int) -> int | None:
    return tensor.shape[i] if tensor.ndim == 2 else None


def _equal(tensors: list[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(t.dtype == first.dtype and t.shape == first.shape and t.equal(first) for t in tensors[1:])


def _in_range(ids: torch.Tensor, size: Any) -> bool:
    return not ids.is_floating_point() and bool(((ids >= 0) & (ids < size)).all())
