"""Lets the evaluation put load on vLLM's server, by ``vllm bench serve``."""

from __future__ import annotations

import json

from spec_plugins.adapters.vllm.server import program, server
from spec_plugins.evaluation.load import Load, Served, run_client
from spec_plugins.evaluation.server_process import ServerProcess

__all__ = ["CLIENT", "run", "server"]

CLIENT = "vllm bench serve"
_INSTALL = "pip install 'vllm[bench]', or pandas alone"
_OUT = "result.json"


def run(running: ServerProcess, model: str, load: Load) -> Served:
    """See :meth:`spec_plugins.evaluation.load.LoadRunner.run`."""
    name = json.loads(running.get("/v1/models")[1])["data"][0]["id"]
    command = [
        program()[0], "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--base-url", f"http://127.0.0.1:{running.port}", "--model", name, "--tokenizer", model,
        "--dataset-name", "custom", "--dataset-path", "{requests}", "--custom-output-len", "-1",
        "--disable-shuffle", "--skip-chat-template", "--num-prompts", str(len(load.requests)),
        "--temperature", str(load.temperature), "--disable-tqdm", "--ready-check-timeout-sec", "0",
        "--save-result", "--save-detailed", "--result-dir", "{folder}", "--result-filename", _OUT,
    ]  # fmt: skip
    if load.concurrency is not None:
        command += ["--max-concurrency", str(load.concurrency)]
    if load.rate is not None:
        command += ["--request-rate", str(load.rate), "--burstiness", str(load.burstiness)]
    lines = [{"prompt": r.prompt, "output_tokens": r.max_tokens} for r in load.requests]
    return run_client(CLIENT, lines, command, _OUT, _INSTALL, running.variables)
