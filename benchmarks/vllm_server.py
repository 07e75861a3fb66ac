"""``vllm serve``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.server import Answer, Environment, Server, Speculated

__all__ = ["VllmServer", "model_dtype", "plug_in"]


def model_dtype() -> str:
    """``$SPEC_PLUGINS_VLLM_DTYPE``, or bfloat16 where the processor is at least as fast with it."""
    if named := os.environ.get("SPEC_PLUGINS_VLLM_DTYPE"):
        return named
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    return "bfloat16" if "avx512" in flags else "float32"


def plug_in(proposer: str, k: int, **options: Any) -> list[str]:
    """The flags of `vllm serve` for one of this project's proposers."""
    spec = {
        "method": "custom_class",
        "model": f"spec_plugins.adapters.vllm.{proposer}",
        "num_speculative_tokens": k,
    }
    flags = ["--speculative-config", json.dumps(spec)]
    if options:
        flags += ["--additional-config", json.dumps({"spec_plugins": {"options": options}})]
    return flags


class VllmServer(Server):
    """``vllm serve``."""

    running: ClassVar[str] = "vllm:num_requests_running"
    cache_usage: ClassVar[str] = "vllm:kv_cache_usage_perc"

    @staticmethod
    def program(
        env: Environment, model: Path, cores: Sequence[int]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        variables = {"VLLM_CPU_KVCACHE_SPACE": space, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if cores:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        return [str(env.bin / "vllm"), "serve", str(model), "--disable-uvicorn-access-log"], variables

    def speculated(self) -> Speculated:
        """vLLM's counters now."""
        seen = self.metrics()
        return Speculated(
            self.total("vllm:spec_decode_num_drafts_total", seen),
            self.total("vllm:spec_decode_num_draft_tokens_total", seen),
            self.total("vllm:spec_decode_num_accepted_tokens_total", seen),
            self.total("vllm:generation_tokens_total", seen),
            self.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total", seen),
            self.total("spec_plugins:propose_seconds_total", seen),
        )

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """A greedy answer of just ``max_tokens`` tokens."""
        body = {
            "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        started = time.perf_counter()
        with self.post("/v1/completions", {"model": "model", **body}) as response:
            choice = json.loads(response.read())["choices"][0]
        return Answer(choice["token_ids"], choice["text"], time.perf_counter() - started)
