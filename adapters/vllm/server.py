"""vLLM's own server, as the evaluation starts and asks it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_plugins.adapters.vllm.flags import command
from spec_plugins.config import Config
from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.launch import prepare

__all__ = ["complete", "program", "server"]


def program() -> tuple[str, str]:
    """The path of ``vllm``, and the ``PATH`` that it was found on: this Python's folder goes first.

    Raises:
        UnavailableError: there is none.
    """
    here = str(Path(sys.executable).parent)
    path = f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("vllm", path=path)
    if found is None:
        raise UnavailableError(f"there is no program 'vllm' in {here} or on PATH; install vLLM there")
    return found, path


def server(model: str, config: Config | None, dtype: str, arguments: Sequence[str]) -> ServerProcess:
    """``vllm serve``, not started; see :meth:`spec_plugins.evaluation.load.LoadRunner.server`."""
    vllm, path = program()
    written = prepare("vllm", config) if config is not None else None
    words = command(
        model,
        written.flags if written else [],
        ["--dtype", dtype, "--disable-uvicorn-access-log", *arguments],
    )
    variables = {"PATH": path, "VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1"}
    return ServerProcess("vLLM", [vllm, *words[1:]], variables | dict(written.environment if written else {}))


def complete(
    running: ServerProcess, prompts: Sequence[Sequence[int]], tokens: int, ignore_eos: bool
) -> list[tuple[list[int], str]]:
    """Answer prompts; see :meth:`spec_plugins.evaluation.answered.Server.complete`."""
    name = json.loads(running.get("/v1/models")[1])["data"][0]["id"]
    body = {
        "model": name, "prompt": [list(p) for p in prompts], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": ignore_eos, "return_token_ids": True,
    }  # fmt: skip
    try:
        with running.post("/v1/completions", body) as response:
            choices = json.load(response)["choices"]
    except (OSError, http.client.HTTPException) as error:
        raise running.failure(f"failed a request ({error})") from error
    in_order = sorted(choices, key=lambda c: int(c["index"]))
    return [(c["token_ids"], str(c["finish_reason"])) for c in in_order]
