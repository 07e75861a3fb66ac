"""What a proposer is told of a target model that runs in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec_plugins.adapters.vllm.plugin import Installed
from spec_plugins.config import Config
from spec_plugins.proposer import Need, Proposer, Target

__all__ = ["describe"]


def describe(vllm_config: Any, config: Config, proposer: Proposer, model: Any, hooks: Installed) -> Target:
    """
    Args:
        vllm_config: a ``vllm.config.VllmConfig``.
        config: the project's.
        proposer: what will draft.
        model: the target, a module of vLLM's.
        hooks: which of the model runner's methods are wrapped.
    """
    model_config = vllm_config.model_config
    alone = vllm_config.parallel_config.tensor_parallel_size == 1
    vocab_size, hidden_size = int(model_config.get_vocab_size()), int(model_config.get_hidden_size())
    provides = set()
    if hooks.propose:
        provides |= {Need.SAMPLING, Need.HIDDEN_STATES}
        if alone:  # the ranks' rejection samplers must agree, and only one rank drafts
            provides.add(Need.PROBABILITIES)
        if hooks.aux_hidden_states and _shows_layers(model):
            provides.add(Need.AUX_HIDDEN_STATES)
    embeddings = lm_head = None
    if alone:
        embeddings = _whole(_embeddings(model), vocab_size)
        lm_head = _whole(_lm_head(model), vocab_size)
        provides |= {Need.EMBEDDINGS} if embeddings else set()
        provides |= {Need.LM_HEAD} if lm_head else set()
    eos = model_config.hf_text_config.eos_token_id
    return Target(
        vocab_size=vocab_size,
        max_model_len=int(model_config.max_model_len),
        max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
        provides=frozenset(provides),
        num_speculative_tokens=config.num_speculative_tokens,
        max_draft_nodes=config.draft_nodes(proposer),
        model=model_config.model,
        device=str(vllm_config.device_config.device),
        dtype=str(model_config.dtype).removeprefix("torch."),
        hidden_size=hidden_size,
        num_layers=int(model_config.hf_text_config.num_hidden_layers),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),),
        embeddings=embeddings,
        lm_head=lm_head,
    )


def _shows_layers(model: Any) -> bool:
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def _whole(matrix: Any, vocab_size: int) -> Callable[[], Any] | None:
    """Gives a matrix without vLLM's padding; ``None`` where it was packed away for a faster product."""
    if matrix is None or matrix.ndim != 2 or matrix.shape[0] < vocab_size:
        return None
    return lambda: matrix[:vocab_size]


def _embeddings(model: Any) -> Any:
    inner = getattr(model, "model", model)
    return getattr(getattr(inner, "embed_tokens", None), "weight", None)


def _lm_head(model: Any) -> Any:
    return getattr(getattr(model, "lm_head", None), "weight", None)
