"""A small model that drafts: of the target's vocabulary, begun from the target's embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spec_plugins.errors import ConfigError
from spec_plugins.training.batches import Batch
from spec_plugins.training.objectives import Objective, Score

__all__ = ["DraftObjective", "begin_draft", "begin_with_draft"]

NEGATIVES = 512
"""Tokens outside the draft vocabulary that a step of training takes in."""


def begin_draft(model: Any, draft_ids: torch.Tensor, hidden_size: int, num_layers: int) -> Any:
    """A Llama whose embeddings are the target's, in as many of their principal directions as it is wide.

    Args:
        model: the target, a Hugging Face causal language model.
        draft_ids: ``[draft_vocab]`` int64: the tokens whose directions matter.
        hidden_size: a multiple of 32.
        num_layers: of the draft.

    Raises:
        ConfigError: ``hidden_size`` is none.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if hidden_size % 32:
        raise ConfigError(f"hidden_size: {hidden_size} is no multiple of 32; make it one")
    about = model.config.get_text_config()
    embeddings = model.get_input_embeddings().weight.detach().float()
    heads = max(1, hidden_size // 64)
    config = LlamaConfig(
        vocab_size=len(embeddings),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size + hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=min(64, hidden_size),
        max_position_embeddings=about.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=about.bos_token_id,
        eos_token_id=about.eos_token_id,
        pad_token_id=about.pad_token_id,
    )
    draft = LlamaForCausalLM(config)
    _, _, directions = torch.linalg.svd(embeddings[draft_ids], full_matrices=False)
    reduced = embeddings @ directions[:hidden_size].T
    with torch.no_grad():
        draft.model.embed_tokens.weight[:, : reduced.shape[1]].copy_(0.05 * reduced / reduced.std())
    draft.generation_config = model.generation_config
    return draft


def begin_with_draft(folder: Path, vocab_size: int) -> Any:
    """A draft model that was trained before, in float32.

    Raises:
        ConfigError: it cannot be loaded, or its vocabulary is not of this size.
    """
    from transformers import AutoModelForCausalLM

    try:
        draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"begin_with: {str(folder)!r} cannot be loaded: {error}") from error
    if draft.config.vocab_size != vocab_size:
        raise ConfigError(
            f"begin_with: {str(folder)!r} has a vocabulary of {draft.config.vocab_size}, and the target's is "
            f"{vocab_size}; give a draft model of this target"
        )
    return draft


class DraftObjective(Objective):
    """A draft model that learns the target's distribution over the tokens that the target says most."""

    positions, ahead = 1, 1
    module: Any

    def __init__(self, module: Any, lm_head: torch.Tensor, draft_ids: torch.Tensor) -> None:
        super().__init__(lm_head, draft_ids, module.config.vocab_size, 1.0)
        self.module = module
        self._others = (self.to_draft < 0).nonzero()[:, 0]

    def heard(self, batch: Batch) -> list[torch.Tensor]:
        return [self.module.model(input_ids=batch.tokens, use_cache=False).last_hidden_state]

    def logits(self, heard: torch.Tensor, position: int) -> torch.Tensor:
        """Over the draft vocabulary, and behind it over a sample of all other tokens, which it must learn not
        to say."""
        weight, others = self.module.lm_head.weight, self._others
        if self.module.training and len(others):
            others = others[torch.randint(len(others), (NEGATIVES,), device=others.device)]
        return heard @ weight[torch.cat([self.draft_ids, others])].mT  # type: ignore[no-any-return]

    def save(self, folder: Path, score: Score, dtype: torch.dtype, layout: str | None) -> None:
        self.module.to(dtype).save_pretrained(folder)
