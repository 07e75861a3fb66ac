"""Graphs of proposers as ONNX, and engines of TensorRT for RTX built from them. This is not TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_plugins.heads.eagle import EagleHead
from spec_plugins.heads.medusa import MedusaHeads

__all__ = ["EagleFeatures", "EagleStep", "MedusaGraph", "build", "export"]

Sizes = Mapping[str, tuple[int, int, int]]
"""Least, usual and largest size of each dynamic side, by name."""


class MedusaGraph(nn.Module):
    """All heads at once: states ``[batch, hidden]`` to logits ``[batch, heads, vocab]``."""

    sides = ({0: "batch"},)
    inputs, outputs = ("states",), ("logits",)

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.heads.logits(self.heads(states, self.heads.config.num_heads), None)


class EagleFeatures(nn.Module):
    """What the target shows, ``[batch, n, layers * hidden]``, to the features that the first step takes."""

    sides = ({0: "batch", 1: "n"},)
    inputs, outputs = ("states",), ("features",)

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.features(states)


class EagleStep(nn.Module):
    """One pass of a head over ``n`` new positions, with a cache that is handed in and out.

    Inputs: ids ``[batch, n]`` of the tokens after each position; features ``[batch, n, hidden]``; positions
    ``[batch, n]``; keys and values ``[layers, batch, kv_heads, past, head_dim]``. Outputs: the next features,
    logits ``[batch, n, draft_vocab]``, and the cache with the new positions.
    """

    sides = (
        {0: "batch", 1: "n"}, {0: "batch", 1: "n"}, {0: "batch", 1: "n"}, {1: "batch", 3: "past"},
        {1: "batch", 3: "past"},
    )  # fmt: skip
    inputs = ("ids", "features", "positions", "keys", "values")
    outputs = ("next_features", "logits", "next_keys", "next_values")

    def __init__(self, head: EagleHead, embeddings: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embeddings", embeddings)
        self.register_buffer("lm_head", lm_head)

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        attends = [_Cached(keys[i], values[i]) for i in range(len(self.head.layers))]
        embeds = nn.functional.embedding(ids, self.embeddings)
        following, heard = self.head(embeds, features, positions, attends)
        new_keys = torch.stack([attend.keys for attend in attends])
        new_values = torch.stack([attend.values for attend in attends])
        return following, heard @ self.lm_head.mT, new_keys, new_values


class _Cached:
    """Attention of one layer over what came before and, causally, over the new positions."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past, n = self.keys.shape[2], q.shape[2]
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (self.keys, self.values))
        ahead = torch.arange(past + n)[None, :] > past + torch.arange(n)[:, None]
        scores = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(ahead, float("-inf"))
        return scores.softmax(-1) @ values


def export(graph: Any, example: Sequence[torch.Tensor], file: Path) -> Path:
    """Write a graph, whose named sides are dynamic, as ONNX."""
    names = {name for sides in graph.sides for name in sides.values()}
    dims = {name: torch.export.Dim(name, min=1, max=4096) for name in sorted(names)}
    torch.onnx.export(
        graph,
        tuple(example),
        str(file),
        dynamo=True,
        external_data=False,
        verbose=False,
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        dynamic_shapes=tuple({i: dims[name] for i, name in sides.items()} for sides in graph.sides),
    )
    return file


def build(file: Path, graph: Any, example: Sequence[torch.Tensor], sizes: Sizes) -> bytes:
    """An engine of TensorRT for RTX from ONNX, for these ranges of the dynamic sides; needs no GPU.

    Raises:
        ValueError: TensorRT cannot read or build it.
    """
    import tensorrt_rtx as trt

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network()
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    if not parser.parse(file.read_bytes()):
        raise ValueError("; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for name, tensor, sides in zip(graph.inputs, example, graph.sides, strict=True):
        ranges = [
            [sizes[sides[i]][k] if i in sides else side for i, side in enumerate(tensor.shape)]
            for k in range(3)
        ]
        profile.set_shape(name, *ranges)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ValueError("TensorRT built nothing of it")
    return bytes(engine)
