"""``python -m sglang.launch_server``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.server import Answer, Environment, Server, Speculated
from spec_plugins.adapters.sglang.comparison_runner import CPU_FLAGS, CPU_VARIABLES

__all__ = ["STAND_INS", "SglangServer", "algorithm"]

STAND_INS = "torchvision_operators"
"""A module of an environment for CPUs."""


def algorithm(
    proposer: str, depth: int, nodes: int | None = None, **options: Any
) -> tuple[list[str], dict[str, str]]:
    """The flags and the environment variables for one of this project's proposers.

    Args:
        nodes: draft tokens of a tree; ``depth`` where left out.
    """
    flags = ["--speculative-algorithm", f"SPEC_{proposer.upper()}", "--speculative-num-steps", str(depth)]
    flags += ["--speculative-num-draft-tokens", str((nodes or depth) + 1)]
    return flags, {"SPEC_PLUGINS_CONFIG": json.dumps({"options": options})} if options else {}


class SglangServer(Server):
    """``python -m sglang.launch_server``."""

    running: ClassVar[str] = "sglang:num_running_reqs"
    cache_usage: ClassVar[str] = "sglang:token_usage"

    @staticmethod
    def program(
        env: Environment, model: Path, cores: Sequence[int]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        command = [str(env.bin / "python"), "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--log-level", "warning", "--enable-metrics", "--sleep-on-idle"]
        # Or the checkout would be on its path, and its folders be taken for packages.
        variables = {"PYTHONSAFEPATH": "1"}
        if STAND_INS in env.modules:
            command += CPU_FLAGS
            variables |= CPU_VARIABLES
            variables["OMP_NUM_THREADS"] = str(len(cores) or 1)
        return command, variables

    def speculated(self) -> Speculated:
        """The project's counters, and SGLang's of what it generated."""
        seen = self.metrics()
        drafts = self.by_position("spec_plugins:drafted_at_position_total", seen)
        return Speculated(
            sum(drafts[:1]),
            self.total("spec_plugins:draft_tokens_total", seen),
            self.total("spec_plugins:accepted_tokens_total", seen),
            self.total("sglang:generation_tokens_total", seen),
            self.by_position("spec_plugins:accepted_at_position_total", seen),
            self.total("spec_plugins:propose_seconds_total", seen),
        )

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        return self.generate(prompt, max_tokens)[0]

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[Answer, dict[str, Any]]:
        """A greedy answer of just ``max_tokens`` tokens, and SGLang's ``meta_info`` of it."""
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        started = time.perf_counter()
        with self.post("/generate", {"input_ids": list(prompt), "sampling_params": params}) as response:
            found = json.loads(response.read())
        return Answer(found["output_ids"], found["text"], time.perf_counter() - started), found["meta_info"]

    def left_over(self) -> list[str]:
        """KV slots in use once the radix cache is flushed."""
        with self.post("/flush_cache", {}) as response:
            response.read()
        state = json.loads(self.get("/server_info")[1])["internal_states"][0]
        used = state.get("spec_plugins", {}).get("kv_tokens_used")
        return [] if used is None else [f"KV slots after a flush {used}"]
