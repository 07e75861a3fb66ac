"""A head of this project's and its target, exported by TensorRT Edge-LLM on a CPU. This is not TensorRT-LLM.

What Edge-LLM writes is checked as ONNX: sizes, weights, and numbers against torch. Its attention is an
operator of its own, which only its plug-in on a GPU computes; here :class:`AttentionPlugin` stands in for it,
and so nothing is said of that kernel. No engine is built of these graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="needs torch: make environment-tensorrt-rtx")
onnx = pytest.importorskip("onnx", reason="needs onnx: make environment-tensorrt-rtx")
edgellm = pytest.importorskip(
    "tensorrt_edgellm", reason="needs tensorrt-edgellm: make environment-tensorrt-rtx"
)

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.op_run import OpRun  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_heads import VOCAB, causal, eagle_head  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from spec_plugins.checkpoints import read_head, read_target  # noqa: E402
from spec_plugins.checkpoints.layout import Wanted  # noqa: E402
from spec_plugins.checkpoints.layouts import write_head  # noqa: E402
from spec_plugins.heads.eagle import EagleHead  # noqa: E402

LAYERS, HIDDEN, HEADS, SIZE, DRAFTS, TOKENS = 7, 64, 2, 32, 64, 11
SHOWN = (2, 3, 4)
"""What EAGLE-3 takes of so many layers: the third, the middle one, the last but two."""
HALF = {"rtol": 2e-2, "atol": 2e-2}
Array = npt.NDArray[Any]


class AttentionPlugin(OpRun):  # type: ignore[misc]
    """Causal attention over one sequence from its beginning, in place of Edge-LLM's operator."""

    op_domain = "trt_edgellm"

    def _run(
        self, qkv: Array, past: Array, lengths: Array, rope: Array, *rest: Array, **attributes: Any
    ) -> tuple[Array, Array]:
        q_heads, kv_heads, size = (attributes[n] for n in ("num_q_heads", "num_kv_heads", "head_size"))
        q, k, v = np.split(
            qkv.astype(np.float32).reshape(len(qkv), -1, size), [q_heads, q_heads + kv_heads], axis=1
        )
        cos, sin = np.split(rope[:, None], 2, axis=-1)
        q, k = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1) for a, b in map(_halves, (q, k)))
        k, v = (np.repeat(x, q_heads // kv_heads, axis=1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * attributes["attention_scale"]
        scores = np.where(np.tri(len(qkv), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).astype(qkv.dtype), past


def _halves(x: Array) -> list[Array]:
    return np.split(x, 2, axis=-1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` and ``draft`` as they were read, and in ``onnx`` as Edge-LLM wrote them."""
    folder = tmp_path_factory.mktemp("edgellm")
    save_tiny_model(folder / "base")  # for its tokenizer; EAGLE-3 wants more layers
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=1, head_dim=SIZE, max_position_embeddings=256,
        initializer_range=0.12, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    own = eagle_head(
        folder / "own", hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=SIZE,
        aux_layers=SHOWN, draft_vocab=DRAFTS,
    )  # fmt: skip
    write_head(read_head(own), folder / "draft", "eagle", Wanted(target=read_target(folder / "base")))
    base = edgellm.AutoModel.from_pretrained(
        str(folder / "base"), device="cpu", eagle_base=True, eagle_draft_dir=str(folder / "draft")
    )
    draft = edgellm.AutoModel.from_pretrained(str(folder / "draft"), device="cpu")
    for name, model in (("base", base), ("draft", draft)):
        edgellm.export_onnx(model, str(folder / "onnx" / name / "model.onnx"), model_dir=str(folder / name))
    return folder


def run(exported: Path, name: str, **states: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of a graph for one sequence: logits of all positions, hidden states."""
    file = exported / "onnx" / name / "model.onnx"
    graph = ReferenceEvaluator(str(file), new_ops=[AttentionPlugin])
    angles = np.arange(TOKENS)[:, None] * 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    ints, one = np.arange(TOKENS, dtype=np.int32), np.ones(1, np.int32)
    given: dict[str, Array] = {
        "rope_rotary_cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32),
        "positions": ints, "attention_position_ids": ints, "tree_parent_ids": ints - 1, "tree_depths": ints,
        "query_start_offsets": np.array([0, TOKENS], np.int32), "query_lengths": TOKENS * one,
        "attention_sequence_lengths": TOKENS * one, "valid_tree_counts": TOKENS * one,
        "past_lengths": 0 * one, "state_indices": 0 * one, "execution_phase_marker": one,
        "context_sequence_count_carrier": one, "kv_page_table": np.zeros((1, 2, 1), np.int32),
        "packed_attention_mask": np.zeros((TOKENS, 1), np.int32), "logits_indices": ints.astype(np.int64),
    }  # fmt: skip
    given |= {name: state.half().numpy() for name, state in states.items()}
    for cache in (n for n in graph.input_names if n.startswith("past_key_values_")):
        given[cache] = np.zeros((2, 1, 128, 1, SIZE), np.float16)
    assert set(given) == set(graph.input_names)
    return [torch.from_numpy(np.asarray(x)).float() for x in graph.run(["logits", "hidden_states"], given)]


@pytest.fixture(scope="module")
def target(exported: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(exported / "base", dtype=torch.float32)


@pytest.fixture(scope="module")
def head(exported: Path) -> EagleHead:
    found = read_head(exported / "draft")
    module = EagleHead(found.config)
    module.load_state_dict(dict(found.tensors))
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_base_shows_what_the_head_takes(exported: Path, target: Any, ids: torch.Tensor) -> None:
    told = json.loads((exported / "onnx/base/config.json").read_text())
    assert (told["spec_decode_type"], told["engine_role"]) == ("eagle3", "base")
    assert tuple(told["eagle_hidden_state_layers"]) == SHOWN
    torchs = target(ids[:, :-1], output_hidden_states=True)
    embeds = target.get_input_embeddings()(ids[0, :-1])
    logits, states = run(exported, "base", inputs_embeds=embeds)
    torch.testing.assert_close(logits, torchs.logits[0], **HALF)
    shown = torch.cat([torchs.hidden_states[i][0] for i in SHOWN], -1)
    torch.testing.assert_close(states, shown, **HALF)
    # The control: each layer's output in place of its input.
    later = torch.cat([torchs.hidden_states[i + 1][0] for i in SHOWN], -1)
    assert not torch.allclose(states, later, **HALF)


@torch.no_grad()
def test_the_drafts_numbers_are_the_heads(
    exported: Path, target: Any, head: EagleHead, ids: torch.Tensor
) -> None:
    told = json.loads((exported / "onnx/draft/config.json").read_text())
    assert (told["engine_role"], told["draft_vocab_size"]) == ("draft", DRAFTS)
    assert told["base_model_hidden_size"] == len(SHOWN) * HIDDEN
    assert head.d2t is not None
    [d2t] = load_file(exported / "onnx/draft/d2t.safetensors").values()
    assert d2t.tolist() == head.d2t.tolist()
    embeds = target.get_input_embeddings()(ids[0, 1:])
    states = torch.randn(TOKENS, len(SHOWN) * HIDDEN, generator=torch.Generator().manual_seed(2))
    logits, following = run(
        exported, "draft", inputs_embeds=embeds, hidden_states_input=states,
        hidden_states_from_draft=torch.zeros(TOKENS, HIDDEN),
    )  # fmt: skip
    features, heard = heard_of(head, embeds, head.features(states))
    torch.testing.assert_close(logits, head.lm_head(heard).log_softmax(-1), **HALF)
    torch.testing.assert_close(following, features, **HALF)
    # The next draft position takes the feature that the head itself put out.
    logits, _ = run(
        exported, "draft", inputs_embeds=embeds, hidden_states_input=torch.zeros_like(states),
        hidden_states_from_draft=features,
    )  # fmt: skip
    _, heard = heard_of(head, embeds, features)
    torch.testing.assert_close(logits, head.lm_head(heard).log_softmax(-1), **HALF)
    # The control: tokens one place off.
    _, heard = heard_of(head, target.get_input_embeddings()(ids[0, :-1]), features)
    assert not torch.allclose(logits, head.lm_head(heard).log_softmax(-1), **HALF)


def heard_of(
    head: EagleHead, embeds: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's own forward pass: the next features, and what its LM head hears."""
    positions = torch.arange(len(embeds))
    following, heard = head(embeds[None], features[None], positions, [causal] * len(head.layers))
    return following[0], heard[0]
