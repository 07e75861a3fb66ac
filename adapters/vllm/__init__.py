"""The vLLM adapter: proposers inside vLLM, by vLLM's own flags.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "spec_plugins.adapters.vllm.suffix", "num_speculative_tokens": 8}'

The last place of ``model`` is the name of any registered proposer; options go into
``--additional-config '{"spec_plugins": {"options": {...}}}'``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_plugins.adapters.vllm.drafter import Drafter


def __getattr__(name: str) -> type[Drafter]:
    """The class that vLLM's ``custom_class`` method makes for the proposer ``name``.

    Raises:
        UnknownProposerError: no proposer is registered under this name. Not an AttributeError, which
            vLLM would swallow, suggestion and all.
    """
    if name.startswith("_") or (Path(__file__).parent / f"{name}.py").exists():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spec_plugins.adapters.vllm.drafter import drafter_class

    return drafter_class(name)
