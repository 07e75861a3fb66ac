"""Kernels that copy slot numbers and token ids about, and rows of the KV cache.

``req_to_token[req_pool_indices[i]]`` lists the slots of request ``i`` in the order of its tokens.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Enter new slots for the tokens ``start[i]`` to ``end[i]`` of each request; ``slots`` lists them all."""
    owners, tokens = _spans(start, end)
    rows = req_pool_indices.long()[owners]
    req_to_token[rows, tokens] = slots[: len(owners)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Read what ``assign_req_to_token_pool_cpu`` enters."""
    owners, tokens = _spans(start, end)
    rows = req_pool_indices.long()[owners]
    slots[: len(owners)] = req_to_token[rows, tokens].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots after each request's committed ones."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, slots, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """The last accepted token of each request, whose tokens begin ``stride`` apart."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens[: len(last)] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accepted: Tensor) -> None:
    """The slots of accepted tokens, close together; an index of -1 stands for none."""
    kept = accept_index[accept_index >= 0].long()
    accepted[: len(kept)] = out_cache_loc[kept].to(accepted.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy rows within each buffer. A row may be both target and source: all are read before one is written.

    Args:
        data_ptrs: the buffers' addresses.
        strides: the length of a buffer's rows, in bytes.
    """
    if not len(target):
        return
    into, out_of = target.numpy(), source.numpy()
    rows = 1 + int(max(into.max(), out_of.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * stride)).from_address(address))
        table = memory.reshape(rows, stride)
        table[into] = table[out_of]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> Tensor:
    """Move each request's token ids one to the left; its new one goes to the end, or to ``select_index``."""
    starts, lengths, new = extend_start_loc.tolist(), extend_seq_lens.tolist(), topk_index.flatten()
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            last = start + length - 1 if select_index is None else int(select_index[i])
            input_ids[last] = new[i]
    return input_ids


def _spans(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Of all positions from ``start[i]`` to ``end[i]``: the ``i`` and the position."""
    lengths = (end - start).long()
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    return owners, torch.arange(len(owners)) - before[owners] + start.long()[owners]
