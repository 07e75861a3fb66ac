"""Lets the evaluation put load on SGLang's server, by SGLang's own benchmark of serving."""

from __future__ import annotations

import importlib.util
import sys

from spec_plugins.adapters.sglang.server import server
from spec_plugins.evaluation.load import Load, Served, run_client
from spec_plugins.evaluation.server_process import ServerProcess

__all__ = ["CLIENT", "run", "server"]

CLIENT = "sglang.benchmark.serving"
_OLD_CLIENT = "sglang.bench_serving"
_INSTALL = "install what it names beside SGLang"
_OUT = "result.jsonl"


def run(running: ServerProcess, model: str, load: Load) -> Served:
    """See :meth:`spec_plugins.evaluation.load.LoadRunner.run`.

    Of a response's length this client has only its text: it asks for as many tokens as the recorded one has.
    """
    there = importlib.util.find_spec("sglang.benchmark") is not None
    command = [
        sys.executable, "-m", CLIENT if there else _OLD_CLIENT, "--backend", "sglang",
        "--base-url", f"http://127.0.0.1:{running.port}", "--model", model,
        "--dataset-name", "custom", "--dataset-path", "{requests}",
        "--num-prompts", str(len(load.requests)), "--temperature", str(load.temperature),
        "--disable-ignore-eos", "--disable-tqdm", "--warmup-requests", "0",
        "--output-details", "--output-file", f"{{folder}}/{_OUT}",
    ]  # fmt: skip
    if load.concurrency is not None:
        command += ["--max-concurrency", str(load.concurrency)]
    if load.rate is not None:
        command += ["--request-rate", str(load.rate)]
    lines = [{"conversations": [{"content": r.prompt}, {"content": r.response}]} for r in load.requests]
    return run_client(CLIENT, lines, command, _OUT, _INSTALL, running.variables)
