"""Where the adapter meets SGLang: the entry point of its plug-ins, called in each of its processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from spec_plugins.adapters.sglang.hooks import META_INFO, REQUIRED
from spec_plugins.adapters.sglang.names import ALGORITHM, algorithm_name
from spec_plugins.hooks import check, wrap
from spec_plugins.registry import registry

__all__ = ["DRAFT_TOKENS", "register"]

logger = logging.getLogger("spec_plugins")

DRAFT_TOKENS = "spec_plugins_draft_tokens"
"""In a request's ``meta_info``: for each output token how many draft tokens were verified in the step that
began with it; 0 for tokens that were drafted, and for the first."""


def register() -> None:
    """The entry point in ``sglang.srt.plugins``. Never raises; any number of times."""
    try:
        _register()
    except Exception:
        logger.exception("the SGLang plug-in could not register; SGLang starts without it")


def _register() -> None:
    from sglang.srt.speculative.spec_registry import get_spec

    from spec_plugins.adapters.sglang.algorithm import add

    refusal = _unfit()
    names: dict[str, list[str | None]] = {ALGORITHM: [None]}
    for proposer in sorted(registry().proposers):
        names.setdefault(algorithm_name(proposer), []).append(proposer)
    for name, proposers in names.items():
        if get_spec(name) is None:
            clash = "" if len(proposers) == 1 else _clash(name, proposers)
            add(name, proposers[0], refusal or clash)
    if not refusal and not wrap(META_INFO, _true_counts):
        logger.warning("a request's meta_info counts draft tokens by the widest draft alone")


def _unfit() -> str:
    """Why this SGLang cannot run proposers; empty where it can."""
    wrong = [found for found in map(check, REQUIRED) if found.status != "ok"]
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"this SGLang is not as the adapter expects: {first.hook.path}: {first.detail} (seen in "
        f"{first.hook.versions}); `spec-plugins doctor` shows all. Without --speculative-algorithm, or with "
        "one of SGLang's own, it runs"
    )


def _clash(name: str, proposers: list[str | None]) -> str:
    both = " and ".join(repr(p) for p in proposers)
    return f"{name} could be {both}; use SPEC, and name the proposer in the configuration"


def _true_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang counts every step as if the draft had been as wide as can be."""

    def _calculate_spec_decoding_metrics(
        self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(self, meta_info, recv_obj, i, *args, **kwargs)
        drafted = meta_info.get(DRAFT_TOKENS)
        if drafted is not None and "spec_num_proposed_drafts" in meta_info:
            proposed = sum(d for d in drafted if d)
            meta_info["spec_num_proposed_drafts"] = proposed
            meta_info["spec_accept_rate"] = (
                meta_info["spec_num_correct_drafts"] / proposed if proposed else 0.0
            )
        return made

    return _calculate_spec_decoding_metrics
