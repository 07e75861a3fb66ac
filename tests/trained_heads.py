"""Heads that are made up, for tests of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")
from safetensors.torch import load_file, save_file  # noqa: E402

from spec_plugins.checkpoints import (  # noqa: E402
    EagleConfig,
    Head,
    HeadConfig,
    MedusaConfig,
    TargetModel,
    Wanted,
    read_target,
    tensor_shapes,
)
from spec_plugins.checkpoints.checks import INDICES  # noqa: E402
from spec_plugins.checkpoints.layouts import LAYOUTS  # noqa: E402

MEDUSA = MedusaConfig(
    hidden_size=32, vocab_size=128, draft_vocab_size=128, num_heads=3, lm_head="own", target="acme/target",
    accuracies=((0.7, 0.1), (0.5, 0.125), (0.3, 0.1)),
)  # fmt: skip
EAGLE = EagleConfig(
    method="eagle", hidden_size=32, target_hidden_size=32, vocab_size=128, draft_vocab_size=128,
    intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=500_000.0,
    max_position_embeddings=256, target="acme/target",
)  # fmt: skip
EAGLE3 = EAGLE.model_copy(update={"method": "eagle3", "draft_vocab_size": 40})
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
REDUCED = {"draft_vocab_size": 40}
HEADS: dict[str, HeadConfig] = {
    "medusa": MEDUSA,
    "medusa, two layers, no biases": MEDUSA.model_copy(update={"num_layers": 2, "bias": False}),
    "medusa, no layers": MEDUSA.model_copy(update={"num_layers": 0, "bias": False, "accuracies": ()}),
    "medusa, shared": MEDUSA.model_copy(update={"lm_head": "shared"}),
    "medusa, shared and reduced": MEDUSA.model_copy(update={"lm_head": "shared", **REDUCED}),
    "medusa, own and reduced": MEDUSA.model_copy(update=REDUCED),
    "medusa, the target's": MEDUSA.model_copy(update={"lm_head": "target", "target": None}),
    "medusa, the target's and reduced": MEDUSA.model_copy(update={"lm_head": "target", **REDUCED}),
    "eagle": EAGLE,
    "eagle, bias": EAGLE.model_copy(update={"fc_bias": True, "target": None}),
    "eagle, two layers": EAGLE.model_copy(update={"num_layers": 2, "rope_scaling": LLAMA3_ROPE}),
    "eagle, own embeddings": EAGLE.model_copy(update={"own_embeddings": True, "attention_bias": True}),
    "eagle3": EAGLE3,
    "eagle3, whole vocabulary": EAGLE3.model_copy(
        update={"draft_vocab_size": 128, "rope_scaling": LLAMA3_ROPE}
    ),
    "eagle3, layers": EAGLE3.model_copy(update={"aux_layers": (0, 3, 5, 7), "head_dim": 16}),
    "eagle3, as speculators trains": EAGLE3.model_copy(
        update={"norm_before_residual": True, "norm_output": True, "aux_layers": (1, 2, 3), "num_layers": 2}
    ),
    "eagle3, norm_output": EAGLE3.model_copy(update={"norm_output": True, "num_layers": 2}),
    "eagle3, narrow": EAGLE3.model_copy(update={"target_hidden_size": 64, "own_embeddings": True}),
    "eagle3, biases": EAGLE3.model_copy(update={"attention_bias": True, "own_embeddings": True}),
}  # fmt: skip


def make(config: HeadConfig, dtype: torch.dtype = torch.bfloat16) -> Head:
    """A random head."""
    config = type(config).model_validate(config.model_dump())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in tensor_shapes(config).items()
        if name not in INDICES
    }
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    if "token_map" in tensor_shapes(config):
        tensors["token_map"] = ids
    if "d2t" in tensor_shapes(config):
        tensors["d2t"] = ids - torch.arange(len(ids))
    return Head(config, tensors)


def same(one: Head, other: Head) -> bool:
    """Bit for bit."""
    if one.config != other.config or one.tensors.keys() != other.tensors.keys():
        return False
    return all(
        t.dtype == other.tensors[n].dtype and t.equal(other.tensors[n]) for n, t in one.tensors.items()
    )


def losses(head: Head, wanted: Wanted = Wanted()) -> dict[str, list[str]]:  # noqa: B008
    """What each layout for such heads would lose."""
    return {
        layout.name: layout.lost(layout.complete(head, wanted), wanted)
        for layout in LAYOUTS
        if head.config.method in layout.methods
    }


def model_folder(folder: Path, tied: bool = False, layers: int = 12, **more: int) -> TargetModel:
    """A target model's files, as far as heads need them."""
    folder.mkdir()
    sizes = {"hidden_size": 32, "vocab_size": 128, "num_hidden_layers": layers, **more}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shape = (sizes["vocab_size"], sizes["hidden_size"])
    tensors = {"model.embed_tokens.weight": torch.randn(shape, generator=generator).bfloat16()}
    if not tied:
        tensors["lm_head.weight"] = torch.randn(shape, generator=generator).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return read_target(folder)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def store(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)
