"""Lets the evaluation measure step times in SGLang's own server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spec_plugins.adapters.sglang.server import complete, server
from spec_plugins.config import Config
from spec_plugins.errors import UnsupportedError
from spec_plugins.evaluation.calibration import Answer

__all__ = ["serving"]

_GRAPHS_OFF = "--disable-cuda-graph"


@contextmanager
def serving(model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]) -> Iterator[Answer]:
    """SGLang's server; see :class:`spec_plugins.evaluation.calibration.Serving`.

    Raises:
        UnsupportedError: it would capture CUDA graphs, which verify the widest draft in every step.
    """
    import torch

    if torch.cuda.is_available() and _GRAPHS_OFF not in arguments:
        raise UnsupportedError(
            "SGLang's CUDA graphs verify the longest draft in every step, so that no draft length has a time "
            f"of its own; add {_GRAPHS_OFF}, as far as you serve without them"
        )
    with server(model, config, dtype, arguments) as running:

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            return [said for said, _ in complete(running, prompts, tokens, ignore_eos=True)]

        yield answer
