"""Verifying where SGLang's own verification would not give the target's distribution, or not accept enough.

SGLang commits the argmax on a CPU whatever the temperature, and its tree sampler knows no min-p and no custom
logit processors. Here SGLang's own sampler samples the target's token at every node, as if each were the end
of a request of its own; a draft token is accepted where it equals the one sampled at its parent. What is
committed is then just what the target sampled: the distribution is the target's, and with per-request seeds
the text is the very one that SGLang gives without speculation.

Where drafts carry probabilities, the project's own rejection sampling takes them, over what SGLang's sampler
would draw from. Requests with and without, and greedy ones, may stand side by side.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

from spec_plugins.adapters.sglang.hooks import FILTER
from spec_plugins.hooks import fits
from spec_plugins.proposer import Drafts
from spec_plugins.verification import verify_sampled

__all__ = ["exact_sample", "sampled_wrongly", "takes_probabilities", "weighs"]

_Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_BY_ROW = (
    "temperatures",
    "top_ps",
    "top_ks",
    "min_ps",
    "sampling_seed",
    "acc_additive_penalties",
    "acc_scaling_penalties",
    "logit_bias",
)
"""Fields of SGLang's ``SamplingBatchInfo`` with a row a request that its sampler reads."""


def sampled_wrongly(info: Any, device: str) -> bool:
    """Whether ``eagle_sample`` would not do as SGLang does without speculation.

    Args:
        info: a ``SamplingBatchInfo``.
        device: the target's.
    """
    if info.has_custom_logit_processor:
        return True
    if info.is_all_greedy:
        return False
    own = device.startswith("cuda") and not torch.version.hip
    return not own or info.need_min_p_sampling or info.sampling_seed is not None


def weighs() -> bool:
    """Whether this SGLang can say what its sampler draws from, so that draft probabilities can be used.
    Compiles what verifying with them runs."""
    if get_exec().kernel.sampling_backend not in ("pytorch", "flashinfer") or not fits(FILTER):
        return False
    one = np.ones(1, np.int32)
    certain = torch.ones(1, 2, 1)
    verify_sampled(certain, Drafts(one[:, None] - 1, one, None, [certain[0, :1]]), [None])
    return True


def takes_probabilities(info: Any, drafts: Drafts) -> bool:
    """Whether a step is to be verified with draft probabilities. With seeds it is not: the text then is the
    one without speculation, and to leave them out is exact as well.

    Args:
        info: a ``SamplingBatchInfo``.
        drafts: those of the step.
    """
    return drafts.probs is not None and not info.is_all_greedy and info.sampling_seed is None


def exact_sample(
    sampler: Any,
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any,
    drafts: Drafts | None = None,
) -> _Outcome:
    """Does what ``eagle_sample`` does, exactly.

    Args:
        sampler: the target's, an ``sglang.srt.layers.sampler.Sampler``.
        verify_input: an ``NgramVerifyInput``.
        batch: the ``ScheduleBatch``.
        logits_output: ``next_token_logits`` is ``[n * width, vocab]``; biases and masks are added in place.
        grammar_mask: of structured output, or ``None``.
        drafts: those of the step, to verify with their probabilities, on the device of the logits. Waits for
            the device as :func:`~spec_plugins.verification.verify_sampled` says. ``None``: as certain ones.

    Returns:
        Predictions ``[n * width]``, accepted tokens with the bonus ``[n]``, and their slots
        ``[n, width]``, -1 where unused: all int32.
    """
    info, logits = batch.sampling_info, logits_output.next_token_logits
    width = verify_input.draft_token_num
    rows: dict[str, Any] = {
        name: value.repeat_interleave(width, dim=0)
        for name in _BY_ROW
        if (value := getattr(info, name, None)) is not None
    }
    nodes = dataclasses.replace(
        info, **rows, grammar_mask=grammar_mask, penalizer_orchestrator=None, has_custom_logit_processor=False
    )
    nodes.apply_logits_bias(logits)
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, width)
    if drafts is not None:
        return _by_rejection(sampler, nodes, logits, verify_input.positions, drafts, width)
    # The sampler turns logits into probabilities in place; log probabilities are taken from them later.
    found = sampler(
        SimpleNamespace(next_token_logits=logits.clone()), nodes, False, [], [], verify_input.positions
    )
    return _by_agreement(found, verify_input, len(batch.seq_lens))


def _by_agreement(sampled: torch.Tensor, verify_input: Any, n: int) -> _Outcome:
    """Follow the tokens that were sampled, ``[n * width]``."""
    width = verify_input.draft_token_num
    slots: dict[str, Any] = {"dtype": torch.int32, "device": sampled.device}
    predicted, index, accepted = verify_tree_greedy_func(
        predicts=torch.zeros(n * width, **slots),
        accept_index=torch.full((n, verify_input.max_tree_depth), -1, **slots),
        accept_token_num=torch.empty(n, **slots),
        candidates=verify_input.draft_token.reshape(n, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=sampled.to(torch.int64).reshape(n, width),
        topk=verify_input.tree_topk,
    )
    group = get_parallel().tp_group
    if group.world_size > 1:  # ranks draw for themselves
        for tensor in (predicted, accepted, index):
            group.broadcast(tensor, src=0)
    return predicted, accepted + 1, index


def _by_rejection(
    sampler: Any, nodes: Any, logits: torch.Tensor, positions: torch.Tensor, drafts: Drafts, width: int
) -> _Outcome:
    """Verify with draft probabilities, on the one rank that there is."""
    n = len(drafts)
    probs = _drawn_from(sampler, nodes, logits, positions)
    verdict = verify_sampled(probs.reshape(n, width, -1), drafts, [None] * n)
    slots = np.full((n, width), -1, np.int32)
    slots[:, 0] = 0
    slots[:, 1 : verdict.tokens.shape[1]] = np.where(verdict.path < 0, -1, verdict.path + 1)
    reached = slots >= 0
    index = np.where(reached, slots + width * np.arange(n, dtype=np.int32)[:, None], -1)
    predicted = np.zeros(n * width, np.int32)
    predicted[index[reached]] = verdict.tokens[reached[:, : verdict.tokens.shape[1]]]
    return (
        torch.from_numpy(predicted).to(logits.device),
        torch.from_numpy(verdict.accepted + 1).to(logits.device),
        torch.from_numpy(index).to(logits.device),
    )


def _drawn_from(sampler: Any, nodes: Any, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[rows, vocab]`` float32: the distributions that SGLang's sampler would draw from."""
    probs = torch.softmax(logits.float() / nodes.temperatures, -1)
    if nodes.need_top_k_sampling or nodes.need_top_p_sampling or nodes.need_min_p_sampling:
        every = torch.arange(len(probs), device=probs.device)
        asked = dataclasses.replace(nodes, sampling_mask_batch_indices=every)
        _, kept = sampler._sample_from_probs(probs, asked, positions, False)
        weights = kept.weights
        if kept.token_ids is not None:  # ranked
            weights = torch.zeros_like(weights).scatter_(1, kept.token_ids.long(), weights)
        probs = weights / weights.sum(-1, keepdim=True)
    return probs
