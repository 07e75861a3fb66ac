"""Medusa's heads and EAGLE's step as ONNX, run by onnxruntime, and built by TensorRT for RTX without a GPU.

TensorRT builds of the graphs of proposers: not TensorRT-LLM, and not run on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make environment-tensorrt-rtx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: make environment-tensorrt-rtx")
pytest.importorskip("onnxscript", reason="needs onnxscript: make environment-tensorrt-rtx")

from graphs import EagleFeatures, EagleStep, MedusaGraph, build, export  # noqa: E402

from spec_plugins.checkpoints import EagleConfig, MedusaConfig  # noqa: E402
from spec_plugins.heads.eagle import EagleHead  # noqa: E402
from spec_plugins.heads.medusa import MedusaHeads  # noqa: E402

MEDUSA = MedusaConfig(
    hidden_size=32, vocab_size=128, draft_vocab_size=128, num_heads=3, num_layers=2, lm_head="own"
)
EAGLE = EagleConfig(
    method="eagle", hidden_size=32, target_hidden_size=32, vocab_size=128, draft_vocab_size=128,
    intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, fc_bias=True,
)  # fmt: skip
CONFIGS = {
    "eagle": EAGLE,
    "eagle3": EAGLE.model_copy(update={"method": "eagle3", "draft_vocab_size": 40}),
}
SIZES = {"batch": (1, 4, 16), "n": (1, 1, 8), "past": (1, 64, 512)}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def made(module: Any, config: Any) -> Any:
    """A random head in float32."""
    torch.manual_seed(0)
    return module(config).eval().requires_grad_(False)


def run(file: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
    return [torch.from_numpy(x) for x in found]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@dataclasses.dataclass
class Exported:
    """A graph, its file, and inputs for it."""

    graph: Any
    file: Path
    example: tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Graphs by name, each exported once, which takes seconds."""
    folder = tmp_path_factory.mktemp("graphs")

    @functools.cache
    def once(name: str) -> Exported:
        graph, example = graph_of(name)
        return Exported(graph, export(graph, example, folder / f"{name}.onnx"), example)

    return once


def graph_of(name: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    if name == "medusa":
        return MedusaGraph(made(MedusaHeads, MEDUSA)), (random(3, 32),)
    if name == "features":
        return EagleFeatures(made(EagleHead, CONFIGS["eagle3"])), (random(3, 2, 96),)
    config = CONFIGS[name]
    head = made(EagleHead, config)
    lm_head = head.lm_head.weight if config.method == "eagle3" else random(128, 32) * 0.2
    cache = random(config.num_layers, 3, config.num_key_value_heads, 7, config.head_dim)
    positions = torch.arange(7, 9).expand(3, 2).contiguous()
    example = torch.randint(128, (3, 2)), random(3, 2, 32), positions, cache, cache + 1
    return EagleStep(head, random(128, 32), lm_head), example


@pytest.mark.parametrize("batch", [1, 5])
def test_medusas_numbers_are_torchs(exported: Callable[[str], Exported], batch: int) -> None:
    found = exported("medusa")
    states = random(batch, 32)
    [logits] = run(found.file, states)
    torch.testing.assert_close(logits, found.graph(states), **TOLERANCE)
    # The control: other heads.
    other = copy.deepcopy(found.graph)
    other.heads.blocks[1].layers[0].weight.mul_(1.1)
    assert not torch.allclose(logits, other(states), **TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_eagles_steps_are_what_the_head_says_of_the_whole(
    exported: Callable[[str], Exported], name: str
) -> None:
    """One position after the other from the cache, against one causal pass over all."""
    found, config = exported(name), CONFIGS[name]
    graph, head, n = found.graph, found.graph.head, 9
    ids = torch.randint(128, (2, n), generator=torch.Generator().manual_seed(3))
    embeds = torch.nn.functional.embedding(ids, graph.embeddings)
    states = random(2, n, 96 if config.method == "eagle3" else 32)
    [heard] = head.unroll(embeds, states, 1)
    whole = heard @ graph.lm_head.mT
    features = head.features(states)
    if config.method == "eagle3":
        [taken] = run(exported("features").file, states)
        torch.testing.assert_close(taken, features, **TOLERANCE)
    # What came before, by torch: an empty cache is no side that a graph can have.
    empty = random(config.num_layers, 2, config.num_key_value_heads, 0, config.head_dim)
    _, _, keys, values = graph(ids[:, 1:4], features[:, :3], torch.arange(3).expand(2, 3), empty, empty)
    for at in range(3, n - 1):
        positions = torch.full((2, 1), at)
        inputs = ids[:, at + 1 : at + 2], features[:, at : at + 1], positions, keys, values
        _, logits, keys, values = run(found.file, *inputs)
        torch.testing.assert_close(logits[:, 0], whole[:, at], **TOLERANCE)
        # The control: as if the position were another.
        assert not torch.allclose(logits[:, 0], whole[:, at - 1], **TOLERANCE)


@pytest.mark.parametrize("name", ["medusa", "features", *CONFIGS])
def test_tensorrt_for_rtx_builds_it(exported: Callable[[str], Exported], name: str) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu12: make environment-tensorrt-rtx")
    found = exported(name)
    weights = sum(p.numel() for p in found.graph.parameters()) if name != "features" else 96 * 32
    assert len(build(found.file, found.graph, found.example, SIZES)) > 4 * weights


def test_what_tensorrt_cannot_read_is_an_error(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu12: make environment-tensorrt-rtx")
    found = exported("medusa")
    spoilt = tmp_path / "spoilt.onnx"
    spoilt.write_bytes(found.file.read_bytes().replace(b"Sigmoid", b"Sigmoyd"))
    with pytest.raises(ValueError, match="Plugin not found"):
        build(spoilt, found.graph, found.example, SIZES)
