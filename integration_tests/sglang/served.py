"""`python -m sglang.launch_server` on a free loopback port, for the time of a ``with``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_settings import ENGINE
from http_server import Served, answering, eventually, launch
from served_questions import MODEL

__all__ = ["Served", "eventually", "serve", "start"]


def start(model: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> Served:
    """Start a server with the settings that an engine in the test process has, without waiting for it."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--served-model-name", MODEL, "--enable-metrics"]
    for name, value in ENGINE.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return launch([*command, *flags], log, {"PYTHONSAFEPATH": "1", **(env or {})})


@contextmanager
def serve(model: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server that answers; at the end its group is killed, whatever happened."""
    with answering(start(model, *flags, log=log, env=env)) as server:
        yield server
