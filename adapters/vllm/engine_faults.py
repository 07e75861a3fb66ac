"""Faults of vLLM itself where drafts are verified on the CPU, each found by a check and mended.

Both were seen in 0.32 and 0.33, concern every speculative method, and are in functions of the rejection
sampler's module, which are replaced there only where the check fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_plugins.adapters.vllm.hooks import EXPAND, TOP_K_TOP_P
from spec_plugins.hooks import Hook, check

__all__ = ["mend"]

logger = logging.getLogger("spec_plugins")


@dataclass(frozen=True, slots=True)
class _Fault:
    hook: Hook
    is_right: Callable[[Any], bool]
    mended: Callable[[Any], Any]
    """The function to put in the place of vLLM's, which it is given."""
    effect: str


def mend(device: str) -> list[str]:
    """Check how a vLLM on the CPU verifies drafts, and do right what it does wrong.

    Returns the names of what was replaced in this process. Never raises; what is not as the hook table says
    is left alone.
    """
    return [] if device != "cpu" else [name for fault in _FAULTS if (name := _mend(fault))]


def _mend(fault: _Fault) -> str:
    if check(fault.hook).status != "ok":
        return ""
    try:
        from vllm.v1.sample import rejection_sampler

        name = fault.hook.path.partition(":")[2]
        theirs = getattr(rejection_sampler, name)
        if fault.is_right(theirs):
            return ""
        setattr(rejection_sampler, name, fault.mended(theirs))
    except Exception:
        logger.exception("could not check how vLLM verifies drafts")
        return ""
    logger.warning("this vLLM %s on the CPU; %s is replaced in this process", fault.effect, name)
    return name


def _expands_right(expand: Any) -> bool:
    import torch

    settings, ends = torch.tensor([0.5, 0.0, 0.75]), torch.tensor([2, 2, 5], dtype=torch.int32)
    wanted = torch.tensor([0.5, 0.5, 0.75, 0.75, 0.75])
    if not torch.equal(expand(settings, ends, 5), wanted):
        return False
    counts = torch.tensor([3, 0], dtype=torch.int32)
    found = expand(counts, torch.tensor([1, 3], dtype=torch.int32), 3, replace_from=0, replace_to=1)
    return bool(torch.equal(found, torch.tensor([3, 1, 1], dtype=torch.int32)))


def _expanding(_: Any) -> Any:
    import torch

    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        """``[requests]`` to ``[tokens]``: each request's value for each of its draft tokens."""
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        spread = torch.repeat_interleave(x, counts, output_size=num_tokens)
        return spread.masked_fill(spread == replace_from, replace_to)

    return expand_batch_to_tokens


def _takes_no_rows(apply: Any) -> bool:
    import torch

    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return False
    return True


def _passing_no_rows(theirs: Any) -> Any:
    def apply_top_k_top_p(logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, but for no logits at all."""
        return theirs(logits, k, p, *args, **kwargs) if logits.shape[0] else logits

    return apply_top_k_top_p


_FAULTS = (
    # The settings go into a buffer that is thrown away, unless they are integers of 64 bits: temperatures
    # become whatever memory held, for greedy requests beside sampled ones too.
    _Fault(EXPAND, _expands_right, _expanding, "reads wrong sampling settings where it verifies drafts"),
    # A step with padding for drafts and no draft; the engine's process ends with it.
    _Fault(TOP_K_TOP_P, _takes_no_rows, _passing_no_rows, "fails over top_k in a step without drafts"),
)
