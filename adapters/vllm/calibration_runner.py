"""Lets the evaluation measure step times in vLLM's own server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spec_plugins.adapters.vllm.server import complete, server
from spec_plugins.config import Config
from spec_plugins.evaluation.calibration import Answer

__all__ = ["serving"]


@contextmanager
def serving(model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]) -> Iterator[Answer]:
    """``vllm serve``; see :class:`spec_plugins.evaluation.calibration.Serving`."""
    with server(model, config, dtype, arguments) as running:

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            return [said for said, _ in complete(running, prompts, tokens, ignore_eos=True)]

        yield answer
