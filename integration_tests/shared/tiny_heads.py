"""Random heads for tiny models, and what they should draft, worked out from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spec_plugins.checkpoints.head import EagleConfig, Head, MedusaConfig
from spec_plugins.checkpoints.layouts import write_head
from spec_plugins.heads.eagle import EagleHead
from spec_plugins.heads.medusa import MedusaHeads
from spec_plugins.training.beginnings import begin_eagle, begin_medusa

__all__ = ["VOCAB", "begun_head", "causal", "eagle_head", "greedy_chain", "likeliest_paths", "medusa_heads"]

VOCAB, HIDDEN, AUX_LAYERS = 128, 32, (0, 1)


def _saved(module: Any, folder: Path) -> Path:
    write_head(Head(module.config, module.state_dict()), folder, "spec-plugins")
    return folder


def _tokens(count: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:count].sort().values


def eagle_head(folder: Path, method: str = "eagle3", draft_vocab: int = 64, **fields: Any) -> Path:
    """Write an EAGLE head with random weights."""
    torch.manual_seed(0)
    three = method == "eagle3"
    draft_vocab = draft_vocab if three else VOCAB
    width = fields.get("hidden_size", HIDDEN)
    given: dict[str, Any] = {
        "method": method, "hidden_size": width, "vocab_size": VOCAB, "draft_vocab_size": draft_vocab,
        "target_hidden_size": width, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "aux_layers": AUX_LAYERS if three else (), **fields,
    }  # fmt: skip
    head = EagleHead(EagleConfig(**given))
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if head.d2t is not None:
        head.d2t.copy_(_tokens(draft_vocab, head.config.vocab_size) - torch.arange(draft_vocab))
    return _saved(head, folder)


def medusa_heads(folder: Path, draft_vocab: int = 64, **fields: Any) -> Path:
    """Write Medusa heads with random weights."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": draft_vocab, "num_heads": 3, **fields
    }  # fmt: skip
    heads = MedusaHeads(MedusaConfig(**given))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if heads.token_map is not None:
        heads.token_map.copy_(_tokens(draft_vocab, heads.config.vocab_size))
    return _saved(heads, folder)


def begun_head(folder: Path, method: Any, model: Path, draft_vocab: int = 96) -> Path:
    """Write a head that was begun from a small target, and not trained: right now and then."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(VOCAB) if method == "eagle" else _tokens(draft_vocab)
    if method == "medusa":
        return _saved(begin_medusa(target, ids, 3, None), folder)
    return _saved(begin_eagle(target, ids, method, None, (1, 2)), folder)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What a head attends with where it sees a whole text at once."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _logits(
    model: Any, head: EagleHead, tokens: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """After all of ``tokens``, from scratch: the next feature, and logits over draft ids."""
    embeds = model.get_input_embeddings().weight[torch.tensor(tokens[1:])][None]
    positions = torch.arange(len(tokens) - 1)
    following, heard = head(embeds, features[None], positions, [causal] * len(head.layers))
    lm_head = head.lm_head if head.config.method == "eagle3" else model.lm_head
    return following[0, -1:], lm_head(heard[0, -1])


def _true_features(model: Any, head: EagleHead, tokens: list[int]) -> torch.Tensor:
    states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    three = head.config.method == "eagle3"
    shown = torch.cat([states[i][0] for i in AUX_LAYERS], -1) if three else states[-1][0]
    return head.features(shown)


@torch.no_grad()
def greedy_chain(model: Any, head: EagleHead, tokens: list[int], length: int) -> list[int]:
    """What a head drafts after ``tokens``."""
    features, drafted = _true_features(model, head, tokens), list[int]()
    for _ in range(length):
        following, logits = _logits(model, head, tokens + drafted, features)
        drafted.append(int(head.target_ids(logits.argmax())))
        features = torch.cat([features, following])
    return drafted


@torch.no_grad()
def likeliest_paths(
    model: Any, head: EagleHead, tokens: list[int], depth: int, topk: int, nodes: int
) -> set[tuple[int, ...]]:
    """The nodes of the dynamic tree after ``tokens``, each as the tokens on the way to it."""
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier = [(0.0, (), _true_features(model, head, tokens))]
    for _ in range(depth):
        grown = []
        for score, path, features in frontier:
            following, logits = _logits(model, head, [*tokens, *path], features)
            best = logits.log_softmax(-1).topk(topk)
            for value, index in zip(best.values.tolist(), best.indices, strict=True):
                longer = (*path, int(head.target_ids(index)))
                grown.append((score + value, longer, torch.cat([features, following])))
        found += [(score, path) for score, path, _ in grown]
        frontier = sorted(grown, key=lambda g: -g[0])[:topk]
    return {path for _, path in sorted(found, key=lambda f: -f[0])[:nodes]}
