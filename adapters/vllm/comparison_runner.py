"""Lets the evaluation run prompts in vLLM: one engine a configuration, each in processes of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_plugins.config import Config
from spec_plugins.launch import prepare

__all__ = ["VllmRunner", "runners"]

MAX_MODEL_LEN = 2048
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # What its processes say of themselves would hide the progress.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


class VllmRunner:
    """One configuration; see :class:`spec_plugins.evaluation.comparison.Runner`."""

    def __init__(self, model: Path, config: Config | None) -> None:
        from vllm import LLM

        self.config = config
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            enforce_eager=True,
            use_tqdm_on_load=False,
            seed=0,
            **(keywords(config) if config is not None else {}),
        )

    def generate(self, messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> tuple[list[int], int]:
        from vllm import SamplingParams

        before = self.statistics().get("verify_steps", 0)
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        (answer,) = self._llm.chat([dict(m) for m in messages], params, use_tqdm=False)
        tokens = list(answer.outputs[0].token_ids)
        after = self.statistics().get("verify_steps", len(tokens) - 1)
        return tokens, after - before

    def statistics(self) -> Mapping[str, Any]:
        if self.config is None:
            return {}
        found: list[Mapping[str, Any] | None] = self._llm.collective_rpc("spec_plugins_statistics")
        return next((figures for figures in found if figures is not None), {})

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()


def keywords(config: Config) -> dict[str, Any]:
    """A configuration as keyword arguments of ``vllm.LLM``."""
    import json

    flags = prepare("vllm", config).flags
    return {
        flag.removeprefix("--").replace("-", "_"): json.loads(value)
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }


@contextmanager
def runners(
    model: Path, configs: Mapping[str, Config | None], say: Callable[[str], None]
) -> Iterator[dict[str, VllmRunner]]:
    """A runner a configuration, in float32."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    made: dict[str, VllmRunner] = {}
    try:
        for name, config in configs.items():
            say(f"starting vLLM {len(made) + 1} of {len(configs)}: {name}")
            made[name] = VllmRunner(model, config)
        yield made
    finally:
        for runner in made.values():
            runner.close()
        made.clear()
        gc.collect()
