"""Target verification, of chains and trees of drafts, for SGLang's ``torch_native`` attention backend.

SGLang loads this as one of its own plug-ins: the ``*.dist-info`` folder beside this file declares it in the
entry-point group ``sglang.srt.plugins``, which each of SGLang's processes reads when it starts. So SGLang is
not changed, and who starts it has nothing to do. (``SGLANG_PLUGINS``, where set, must name it.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

AMX_VARIABLE = "SPEC_PLUGINS_PRETEND_AMX"
"""Set to 1, it has SGLang accept the ``intel_amx`` attention backend, which its draft models need: in
``torch_native`` there is none for drafting."""


def register() -> None:
    """SGLang calls this before it starts anything else."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        forward_extend,
        HookType.AROUND,
    )
    if os.environ.get(AMX_VARIABLE) == "1":
        from sglang.srt.runtime_context import override_platform

        override_platform(has_amx=True).install()


def forward_extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **others: Any,
) -> torch.Tensor:
    """``TorchNativeAttnBackend.forward_extend``, with verification: each draft token attends to the committed
    ones and to the draft tokens above it.

    Args:
        q: ``[requests * drafts, heads * size]``; a request's first row is its last committed token.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **others)
    from sgl_kernel.attention import extend_attention_cpu
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        raise NotImplementedError("target verification with a sliding window")
    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None and v is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    spec_info = forward_batch.spec_info
    # A tree of one branch is a chain, which needs no mask.
    tree_mask = None if spec_info.tree_topk == 1 else spec_info.custom_mask
    if tree_mask is not None and not tree_mask.numel():
        tree_mask = None
    n = spec_info.draft_token_num
    requests = len(forward_batch.seq_lens)
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = q.new_empty((len(q), layer.tp_q_head_num, layer.v_head_dim))
    extend_attention_cpu(
        q, k, v, out, pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id), 1.0, 1.0,
        backend.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens + n,
        torch.full((requests,), n), n * torch.arange(requests), n, layer.scaling, layer.logit_cap,
        False, 0, None, None, tree_mask,
    )  # fmt: skip
    return out.view(len(q), -1)
