"""SGLang's own server, as the evaluation starts and asks it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence

from spec_plugins.adapters.sglang.comparison_runner import CPU_FLAGS, CPU_VARIABLES
from spec_plugins.adapters.sglang.flags import command
from spec_plugins.config import Config
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.launch import prepare

__all__ = ["complete", "server"]


def server(model: str, config: Config | None, dtype: str, arguments: Sequence[str]) -> ServerProcess:
    """SGLang's, not started; see :meth:`spec_plugins.evaluation.load.LoadRunner.server`."""
    import torch

    words, variables = ["--dtype", dtype, "--log-level", "error", *arguments], {"PYTHONSAFEPATH": "1"}
    if not torch.cuda.is_available():
        words += CPU_FLAGS
        variables |= CPU_VARIABLES
    written = prepare("sglang", config) if config is not None else None
    line = command(model, written.flags if written else [], words)
    return ServerProcess("SGLang", line, variables | dict(written.environment if written else {}))


def complete(
    running: ServerProcess, prompts: Sequence[Sequence[int]], tokens: int, ignore_eos: bool
) -> list[tuple[list[int], str]]:
    """Answer prompts; see :meth:`spec_plugins.evaluation.answered.Server.complete`."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
    body = {"input_ids": [list(p) for p in prompts], "sampling_params": params}
    try:
        with running.post("/generate", body) as response:
            found = json.load(response)
    except (OSError, http.client.HTTPException) as error:
        raise running.failure(f"failed a request ({error})") from error
    return [(a["output_ids"], str((a["meta_info"]["finish_reason"] or {}).get("type"))) for a in found]
