"""Verifying where SGLang's own verification would not give the target's distribution.

SGLang commits the argmax on a CPU whatever the temperature, and its tree sampler knows no min-p and no custom
logit processors. Here SGLang's own sampler samples the target's token at every node, as if each were the end
of a request of its own; a draft token is accepted where it equals the one sampled at its parent. What is
committed is then just what the target sampled: the distribution is the target's, and with per-request seeds
the text is the very one that SGLang gives without speculation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

__all__ = ["exact_sample", "sampled_wrongly"]

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


def exact_sample(
    sampler: Callable[..., torch.Tensor],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what ``eagle_sample`` does, exactly.

    Args:
        sampler: the target's, an ``sglang.srt.layers.sampler.Sampler``.
        verify_input: an ``NgramVerifyInput``.
        batch: the ``ScheduleBatch``.
        logits_output: ``next_token_logits`` is ``[n * width, vocab]``; biases and masks are added in place.
        grammar_mask: of structured output, or ``None``.

    Returns:
        Predictions ``[n * width]``, accepted tokens with the bonus ``[n]``, and their slots
        ``[n, width]``, -1 where unused: all int32.
    """
    info, logits = batch.sampling_info, logits_output.next_token_logits
    n, width = len(batch.seq_lens), verify_input.draft_token_num
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
    # The sampler turns logits into probabilities in place; log probabilities are taken from them later.
    found = sampler(
        SimpleNamespace(next_token_logits=logits.clone()), nodes, False, [], [], verify_input.positions
    )
    slots: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    predicted, index, accepted = verify_tree_greedy_func(
        predicts=torch.zeros(n * width, **slots),
        accept_index=torch.full((n, verify_input.max_tree_depth), -1, **slots),
        accept_token_num=torch.empty(n, **slots),
        candidates=verify_input.draft_token.reshape(n, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=found.to(torch.int64).reshape(n, width),
        topk=verify_input.tree_topk,
    )
    group = get_parallel().tp_group
    if group.world_size > 1:  # ranks draw for themselves
        for tensor in (predicted, accepted, index):
            group.broadcast(tensor, src=0)
    return predicted, accepted + 1, index
