"""`vllm serve` on a free loopback port, for the time of a ``with``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from http_server import START_SECONDS, Served, answering, eventually, launch
from served_questions import MODEL

from spec_plugins.evaluation.server_process import free_port

__all__ = ["MODEL", "START_SECONDS", "Served", "eventually", "plug_in", "serve", "start"]


def start(model: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> Served:
    """Start a server, without waiting for it."""
    here = Path(sys.executable).parent
    program = shutil.which("vllm", path=str(here))
    assert program, f"no vllm beside {sys.executable}"
    command = [
        program, "serve", str(model), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", "16", "--disable-uvicorn-access-log", *flags,
    ]  # fmt: skip
    return launch(command, log, {
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "VLLM_LOG_STATS_INTERVAL": "2", "VLLM_LOGGING_LEVEL": "INFO", "PYTHONSAFEPATH": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PORT": str(free_port()), **(env or {}),
    })  # fmt: skip


@contextmanager
def serve(model: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server that answers; at the end its group is killed, whatever happened."""
    with answering(start(model, *flags, log=log, env=env)) as server:
        yield server


def plug_in(proposer: str, *, k: int = 6, **fields: Any) -> list[str]:
    """The flags for one of this project's proposers."""
    spec = {
        "method": "custom_class", "model": f"spec_plugins.adapters.vllm.{proposer}",
        "num_speculative_tokens": k,
    }  # fmt: skip
    flags = ["--speculative-config", json.dumps(spec)]
    return flags + (["--additional-config", json.dumps({"spec_plugins": fields})] if fields else [])
