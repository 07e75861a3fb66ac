"""Lets the evaluation measure step times in vLLM's own server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spec_plugins.adapters.vllm.flags import command
from spec_plugins.config import Config
from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation.calibration import Answer
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.launch import prepare

__all__ = ["serving"]


@contextmanager
def serving(model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]) -> Iterator[Answer]:
    """``vllm serve``; see :class:`spec_plugins.evaluation.calibration.Serving`."""
    found = prepare("vllm", config)
    words = command(model, found.flags, ["--dtype", dtype, "--disable-uvicorn-access-log", *arguments])
    here = str(Path(sys.executable).parent)
    path = f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which(words[0], path=path)
    if program is None:
        raise UnavailableError(f"there is no program {words[0]!r} in {here} or on PATH; install vLLM there")
    variables = {"PATH": path, "VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1", **found.environment}
    with ServerProcess("vLLM", [program, *words[1:]], variables) as server:
        name = json.loads(server.get("/v1/models")[1])["data"][0]["id"]

        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            body = {
                "model": name, "prompt": [list(p) for p in prompts], "max_tokens": tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            try:
                with server.post("/v1/completions", body) as response:
                    choices = json.load(response)["choices"]
            except (OSError, http.client.HTTPException) as error:
                raise server.failure(f"failed a request ({error})") from error
            return [c["token_ids"] for c in sorted(choices, key=lambda c: int(c["index"]))]

        yield answer
