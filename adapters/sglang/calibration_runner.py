"""Lets the evaluation measure step times in SGLang's own server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spec_plugins.adapters.sglang.comparison_runner import CPU_FLAGS, CPU_VARIABLES
from spec_plugins.adapters.sglang.flags import command
from spec_plugins.config import Config
from spec_plugins.errors import UnsupportedError
from spec_plugins.evaluation.calibration import Answer
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.launch import prepare

__all__ = ["serving"]

_GRAPHS_OFF = "--disable-cuda-graph"


@contextmanager
def serving(model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]) -> Iterator[Answer]:
    """SGLang's server; see :class:`spec_plugins.evaluation.calibration.Serving`.

    Raises:
        UnsupportedError: it would capture CUDA graphs, which verify the widest draft in every step.
    """
    import torch

    words, variables = ["--dtype", dtype, "--log-level", "error", *arguments], {"PYTHONSAFEPATH": "1"}
    if not torch.cuda.is_available():
        words += [*CPU_FLAGS]
        variables |= CPU_VARIABLES
    elif _GRAPHS_OFF not in arguments:
        raise UnsupportedError(
            "SGLang's CUDA graphs verify the longest draft in every step, so that no draft length has a time "
            f"of its own; add {_GRAPHS_OFF}, as far as you serve without them"
        )
    found = prepare("sglang", config)
    line = command(model, found.flags, words)
    with ServerProcess("SGLang", line, {**variables, **found.environment}) as server:

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            body = {"input_ids": [list(p) for p in prompts], "sampling_params": params}
            try:
                with server.post("/generate", body) as response:
                    found = json.load(response)
            except (OSError, http.client.HTTPException) as error:
                raise server.failure(f"failed a request ({error})") from error
            return [a["output_ids"] for a in found]

        yield answer
