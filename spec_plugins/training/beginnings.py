"""Heads before training, begun from what the target already knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from spec_plugins.checkpoints.head import EagleConfig, MedusaConfig, usual_layers
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.heads.eagle import EagleHead
from spec_plugins.heads.loading import load_head
from spec_plugins.heads.medusa import MedusaHeads
from spec_plugins.proposer import Target
from spec_plugins.training.features import FeatureStore

__all__ = ["begin_eagle", "begin_medusa", "begin_with", "frequent", "said"]


def said(paths: list[Path], vocab_size: int) -> torch.Tensor:
    """How often the target says each token, ``[vocab]`` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for path in paths:
        shard = FeatureStore.read(path)
        counts += torch.bincount(shard.tokens[shard.answered].long(), minlength=vocab_size)
    return counts


def frequent(counts: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens with the highest counts, ascending, ``[count]`` int64."""
    # A stable order, so that the same data gives the same vocabulary on every machine.
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def begin_eagle(
    model: Any,
    draft_ids: torch.Tensor,
    method: Literal["eagle", "eagle3"],
    target: str | None,
    aux_layers: tuple[int, ...] = (),
) -> EagleHead:
    """A head of one layer, shaped and begun as the target's last layer, over the target's own features.

    Args:
        model: a Hugging Face causal language model with layers as Llama's.
        draft_ids: ``[draft_vocab]`` int64, ascending; for ``eagle`` all of the vocabulary.
        method: which kind.
        target: its name, for the head's files.
        aux_layers: see :class:`EagleConfig`.

    Raises:
        ConfigError: the model's layers are not as Llama's.
    """
    about = model.config.get_text_config()
    try:
        last, norm = model.model.layers[-1], model.model.norm.weight
        projections = {n: getattr(last.self_attn, f"{n}_proj").weight for n in "qkvo"}
        mlp, after = last.mlp.state_dict(), last.post_attention_layernorm.weight
        before = last.input_layernorm.weight
        biased = last.self_attn.q_proj.bias is not None
        head_dim = last.self_attn.head_dim
    except AttributeError as error:
        raise ConfigError(
            f"model: {type(model).__name__} has no layers as Llama's ({error}), which a head begins from; "
            "train Medusa heads, or use the speculators trainer"
        ) from None
    width, vocab = about.hidden_size, model.get_output_embeddings().weight.shape[0]
    rope = getattr(about, "rope_parameters", None) or {}
    config = EagleConfig(
        method=method,
        hidden_size=width,
        vocab_size=vocab,
        draft_vocab_size=len(draft_ids),
        target=target,
        target_hidden_size=width,
        intermediate_size=about.intermediate_size,
        num_attention_heads=about.num_attention_heads,
        num_key_value_heads=about.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=about.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or getattr(about, "rope_theta", None) or 10_000.0),
        max_position_embeddings=about.max_position_embeddings,
        attention_bias=biased,
        aux_layers=aux_layers if method == "eagle3" else (),
    )
    head = EagleHead(config)
    layer: Any = head.layers[0]
    with torch.no_grad():
        layer.mlp.load_state_dict(mlp)
        layer.post_attention_layernorm.weight.copy_(after)
        layer.self_attn.o_proj.weight.copy_(projections["o"])
        head.fc.weight.normal_(std=0.005)
        head.fc.weight[:, -width:] += torch.eye(width)  # the last of the features, or the feature
        for name in "qkv":
            weight = getattr(layer.self_attn, f"{name}_proj").weight
            if method == "eagle3":
                weight[:, :width].normal_(std=0.02)
            weight[:, -width:].copy_(projections[name])
        if method == "eagle3":
            layer.hidden_norm.weight.copy_(before)
            head.norm.weight.copy_(norm)
            head.lm_head.weight.copy_(model.get_output_embeddings().weight[draft_ids])
        if head.d2t is not None:
            head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    return head


def begin_medusa(model: Any, draft_ids: torch.Tensor, num_heads: int, target: str | None) -> MedusaHeads:
    """Heads of one block that begin as the identity, over rows of the target's LM head."""
    vocab, width = model.get_output_embeddings().weight.shape
    config = MedusaConfig(
        hidden_size=width,
        vocab_size=vocab,
        draft_vocab_size=len(draft_ids),
        target=target,
        num_heads=num_heads,
    )
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        if heads.token_map is not None:
            heads.token_map.copy_(draft_ids)
    return heads


def begin_with(
    folder: Path, method: Literal["medusa", "eagle", "eagle3"], model: Any, aux_layers: tuple[int, ...]
) -> tuple[MedusaHeads | EagleHead, torch.Tensor]:
    """A head that was trained before, in float32, and the tokens that it drafts, ``[draft_vocab]`` int64.

    Args:
        folder: of the head, in any layout.
        method: which kind it must be.
        model: the target, a Hugging Face causal language model.
        aux_layers: the layers that were captured, which an EAGLE-3 head must take.

    Raises:
        ConfigError: it cannot be used.
        UnsupportedError: it is of another method, of another target, of other layers, or has embeddings of
            its own.
    """
    about = model.config.get_text_config()
    target = Target(
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_model_len=about.max_position_embeddings,
        max_num_seqs=1,
        hidden_size=about.hidden_size,
        num_layers=about.num_hidden_layers,
    )
    try:
        kind: Any = MedusaHeads if method == "medusa" else EagleHead
        head: MedusaHeads | EagleHead = load_head(str(folder), kind, method, target, torch.float32)
    except UnsupportedError as error:
        raise UnsupportedError(f"begin_with: {str(error).removeprefix('options.model: ')}") from None
    if isinstance(head, EagleHead):
        taken = head.config.aux_layers or usual_layers(about.num_hidden_layers)
        if method == "eagle3" and taken != aux_layers:
            raise UnsupportedError(
                f"begin_with: {str(folder)!r} takes the target's layers {taken}, and {aux_layers} are "
                "captured; begin from the target instead"
            )
        if head.config.own_embeddings:
            raise UnsupportedError(
                f"begin_with: {str(folder)!r} has embeddings of its own, which are not trained; begin from "
                "the target instead"
            )
    drafted = head.target_ids(torch.arange(head.config.draft_vocab_size))
    return head.train().requires_grad_(True), drafted
