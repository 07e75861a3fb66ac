"""The two attention operators that SGLang's ``intel_amx`` backend calls, and its draft metadata.

Caches are ``[slots, heads, size]``. ``req_to_token[req_pool_indices[i]]`` lists the slots of request ``i`` in
the order of its tokens, ``seq_lens[i]`` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None = None,
) -> None:
    """One token of each request, whose ``key`` and ``value`` go into the cache at ``loc`` where given."""
    _refuse(is_cross_attention, logit_cap, sinks, encoder_lens, k_scale, v_scale)
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - window) if window > 0 else 0
        slots = req_to_token[row, first:length].long()
        output[i : i + 1] = _attend(query[i : i + 1], k_cache[slots], v_cache[slots], None, scaling)


def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """The last ``extend_seq_lens[i]`` of a request's tokens, whose keys and values are in the cache already.

    Args:
        seq_lens: new tokens included.
        extend_start_loc: the row of ``query`` that holds the request's first new token.
        tree_mask: which of its new tokens a new token sees, of one request after the other, flat.
    """
    _refuse(is_cross_attention, logit_cap, sinks, encoder_lens, k_scale, v_scale)
    begin = 0
    rows, lengths = req_pool_indices.tolist(), seq_lens.tolist()
    for row, length, new, start in zip(
        rows, lengths, extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    ):
        keys, queries = torch.arange(length), torch.arange(length - new, length)[:, None]
        mask = keys <= queries if is_causal else torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - new :] = tree_mask[begin : begin + new * new].view(new, new)
            begin += new * new
        if window > 0:
            mask &= keys > queries - window
        slots = req_to_token[row, :length].long()
        output[start : start + new] = _attend(
            query[start : start + new], k_cache[slots], v_cache[slots], mask, scaling
        )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """The slots of each of a request's ``topk`` branches: the committed ones, then those of the branch.

    A request's draft slots stand after its committed ones, ``num_steps`` of a branch after the other.
    """
    slots = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0)
    begin = seq_lens.long().repeat_interleave(topk)[:, None]
    branch = torch.arange(topk).repeat(len(seq_lens))[:, None]
    step = torch.arange(num_steps)
    branches = torch.arange(len(slots))[:, None]
    slots[branches, begin + step] = slots[branches, begin + branch * num_steps + step]
    return slots


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of ``[tokens, heads, size]``; several heads of queries may share one of keys."""
    q, k, v = (each.to(query.dtype).transpose(0, 1)[None] for each in (query, keys, values))
    grouped = query.shape[1] != keys.shape[1]
    attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return attended[0].transpose(0, 1)


def _refuse(
    is_cross_attention: bool,
    logit_cap: float,
    sinks: Tensor | None,
    encoder_lens: Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    if is_cross_attention or logit_cap or sinks is not None or encoder_lens is not None:
        raise NotImplementedError("the stand-in has plain attention of a decoder only")
    if (k_scale, v_scale) != (1.0, 1.0):
        raise NotImplementedError("the stand-in has no scaled caches")
