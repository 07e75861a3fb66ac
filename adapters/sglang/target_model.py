"""What a proposer is told of a target model that runs in SGLang."""

from __future__ import annotations

from typing import Any

from spec_plugins.config import Config
from spec_plugins.proposer import Need, Proposer, Target

__all__ = ["describe"]


def describe(
    model_runner: Any,
    config: Config,
    proposer: Proposer,
    *,
    max_num_seqs: int,
    provides: frozenset[Need],
    alone: bool,
) -> Target:
    """
    Args:
        model_runner: the target's ``ModelRunner``, with its model loaded.
        config: the project's.
        proposer: what will draft.
        max_num_seqs: the most requests in one batch.
        provides: what is given whatever the model: trees, hidden states, verification with probabilities.
        alone: whether this rank holds all of the model's weights.
    """
    about, model = model_runner.model_config, model_runner.model
    vocab_size = int(about.vocab_size)
    embeddings = _matrix(getattr(getattr(model, "model", None), "embed_tokens", None), vocab_size, alone)
    lm_head = _matrix(getattr(model, "lm_head", None), vocab_size, alone)
    provides |= {Need.SAMPLING, Need.PREDICTIONS}
    provides |= {Need.EMBEDDINGS} if embeddings is not None else set()
    provides |= {Need.LM_HEAD} if lm_head is not None else set()
    eos = about.hf_eos_token_id
    return Target(
        vocab_size=vocab_size,
        max_model_len=int(about.context_len),
        max_num_seqs=max_num_seqs,
        provides=provides,
        num_speculative_tokens=config.num_speculative_tokens,
        max_draft_nodes=config.draft_nodes(proposer),
        model=about.model_path,
        device=str(model_runner.device),
        dtype=str(about.dtype).removeprefix("torch."),
        hidden_size=int(about.hidden_size),
        num_layers=int(about.num_hidden_layers),
        eos_token_ids=tuple(sorted(int(e) for e in eos)) if eos else (),
        embeddings=None if embeddings is None else lambda: embeddings,
        lm_head=None if lm_head is None else lambda: lm_head,
    )


def _matrix(layer: Any, vocab_size: int, alone: bool) -> Any:
    """A layer's weights without SGLang's padding; ``None`` where they are not whole, or packed away."""
    weight = getattr(layer, "weight", None)
    if not alone or weight is None or weight.ndim != 2 or weight.shape[0] < vocab_size:
        return None
    return weight[:vocab_size]
