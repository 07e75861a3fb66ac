"""Targets' checkpoints as TensorRT-LLM's converter writes them, small and random, for tests of the builder.

Written from its source, 0.17 to 1.2; TensorRT-LLM itself made none of them.
"""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")
from safetensors.torch import load_file, save_file  # noqa: E402

HIDDEN, VOCAB, QUERIES, KEYS, INNER, LAYERS = 32, 128, 4, 2, 48, 2


def whole_target(vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """The tensors of a Llama before they are split, by TensorRT-LLM's names."""
    generator = torch.Generator().manual_seed(2)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {
        "transformer.vocab_embedding.weight": weights(vocab, HIDDEN),
        "transformer.ln_f.weight": weights(HIDDEN),
        "lm_head.weight": weights(vocab, HIDDEN),
    }
    for i in range(LAYERS):
        tensors[f"transformer.layers.{i}.input_layernorm.weight"] = weights(HIDDEN)
        tensors[f"transformer.layers.{i}.mlp.fc.weight"] = weights(INNER, HIDDEN)
    return tensors


def target_checkpoint(folder: Path, tp: int = 1, vocab: int = VOCAB, **changes: Any) -> Path:
    """Write one, split for ``tp`` ranks; ``changes`` are of ``config.json``, ``...`` leaves a key out."""
    config: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32",
        "num_hidden_layers": LAYERS, "num_attention_heads": QUERIES, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_key_value_heads": KEYS, "vocab_size": vocab,
        "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": 256, "hidden_act": "silu",
        "rotary_base": 500_000.0, "rotary_scaling": None, "norm_epsilon": 1e-5,
        "head_size": HIDDEN // QUERIES,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        "use_parallel_embedding": False, "embedding_sharding_dim": 0, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    for rank in range(tp):
        parts = {}
        for name, tensor in whole_target(vocab).items():
            if name == "lm_head.weight":
                parts[name] = rows_of(tensor, tp, rank)
            elif name == "transformer.vocab_embedding.weight" and config["use_parallel_embedding"]:
                columns = config["embedding_sharding_dim"] == 1
                parts[name] = tensor.chunk(tp, 1)[rank] if columns else rows_of(tensor, tp, rank)
            else:
                parts[name] = tensor.chunk(tp)[rank] if ".fc." in name else tensor
        save_file({k: t.contiguous().clone() for k, t in parts.items()}, folder / f"rank{rank}.safetensors")
    return folder


def rows_of(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's rows of the vocabulary, padded with zeros to the same number for each."""
    padding = ceil(len(tensor) / tp) * tp - len(tensor)
    return torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(tp)[rank]


def ranks_of(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What was written, rank by rank."""
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(len(list(folder.glob("rank*"))))]
