"""Lets the evaluation run prompts in SGLang: one server a configuration."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_plugins.config import Config
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.launch import Flags, prepare

__all__ = ["CPU_FLAGS", "CPU_VARIABLES", "SglangRunner", "runners"]

CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph")
CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What a server needs where there is no GPU, beside its flags."""

CONTEXT_LENGTH = 2048
_PLAIN = Flags("native", [])


class SglangRunner(ServerProcess):
    """One configuration; see :class:`spec_plugins.evaluation.comparison.Runner`."""

    def __init__(self, name: str, model: Path, tokenizer: Any, config: Config | None) -> None:
        """
        Args:
            tokenizer: the model's: prompts are sent as tokens.
        """
        import torch

        self.config, self._tokenizer = config, tokenizer
        chosen = _PLAIN if config is None else prepare("sglang", config)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--dtype", "float32", "--context-length", str(CONTEXT_LENGTH), "--log-level", "error"]
        command += ["--max-running-requests", "1", "--max-total-tokens", str(4 * CONTEXT_LENGTH)]
        # Or every server that waits for its turn would keep a processor busy.
        command += ["--sleep-on-idle"]
        # So that no configuration finds a prompt in its cache, nor one that comes after it.
        command += ["--disable-radix-cache", "--random-seed", "0", *chosen.flags]
        variables = {"PYTHONSAFEPATH": "1", **chosen.environment}
        if not torch.cuda.is_available():
            command += CPU_FLAGS
            variables |= CPU_VARIABLES
        super().__init__(name, command, variables)

    def generate(self, messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> tuple[list[int], int]:
        prompt = self._tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        params = {"temperature": 0, "max_new_tokens": max_new_tokens}
        with self.post("/generate", {"input_ids": list(prompt), "sampling_params": params}) as response:
            answer = json.load(response)
        tokens: list[int] = answer["output_ids"]
        return tokens, answer["meta_info"].get("spec_verify_ct") or len(tokens) - 1

    def statistics(self) -> Mapping[str, Any]:
        if self.config is None:
            return {}
        state = json.loads(self.get("/server_info")[1])["internal_states"][0]
        found: Mapping[str, Any] = state.get("spec_plugins", {})
        return found


@contextmanager
def runners(
    model: Path, configs: Mapping[str, Config | None], say: Callable[[str], None]
) -> Iterator[dict[str, SglangRunner]]:
    """A runner a configuration, in float32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with contextlib.ExitStack() as stack:
        made: dict[str, SglangRunner] = {}
        for name, config in configs.items():
            say(f"starting SGLang {len(made) + 1} of {len(configs)}: {name}")
            made[name] = stack.enter_context(SglangRunner(name, model, tokenizer, config))
        yield made
