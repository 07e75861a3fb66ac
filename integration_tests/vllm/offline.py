"""vLLM inside the own process, and what is asked of it."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# More threads do not make so small a model faster, and on a loaded machine they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MAX_MODEL_LEN = 256
MakeEngine = Callable[..., AbstractContextManager[Any]]


@contextmanager
def engine(model: Path | str, /, proposer: str | None = None, **settings: Any) -> Iterator[Any]:
    """``with engine(model, "suffix", **arguments_of_vllm) as llm``, in float32.

    ``options`` and ``fields`` are the proposer's and the configuration's, ``k`` the length of a draft.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    # vLLM 0.32 fails to do this once more in a process in which numba was imported since.
    platform = type(current_platform)
    once: Any = platform.register_triton_kernel_overrides
    if not hasattr(once, "cache_clear"):
        platform.register_triton_kernel_overrides = staticmethod(functools.cache(once))
    options = settings.pop("options", None)
    # Long, so that no loaded machine makes a good proposer late.
    fields = {"containment": {"time_allowance_ms": 60_000.0}, **settings.pop("fields", {})}
    if options:
        fields = {**fields, "options": options}
    k = settings.pop("k", 6)
    if proposer is not None:
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": f"spec_plugins.adapters.vllm.{proposer}",
            "num_speculative_tokens": k,
        }
        settings["additional_config"] = {"spec_plugins": fields}
    chosen = {
        "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8, "seed": 0, "block_size": 32, "distributed_executor_backend": "uni",
        "disable_log_stats": False, **settings,
    }  # fmt: skip
    llm = None
    try:
        llm = LLM(**chosen)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def drafter_of(llm: Any) -> Any:
    """Our drafter, inside the engine; ``None`` without speculation."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return getattr(executor.driver_worker.worker.model_runner, "drafter", None)


def statistics_of(llm: Any) -> Any:
    """The driver's counters."""
    return drafter_of(llm).driver.statistics


def ask(llm: Any, prompts: Sequence[Sequence[int]], params: Any, **more: Any) -> list[Any]:
    """vLLM's answers to prompts of token ids; ``more`` goes into each prompt."""
    return list(
        llm.generate([{"prompt_token_ids": list(p), **more} for p in prompts], params, use_tqdm=False)
    )


def token_ids(answers: Sequence[Any]) -> list[list[int]]:
    """The tokens of every output."""
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


def greedy(
    llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 48, **settings: Any
) -> list[list[int]]:
    """Greedy token ids for prompts of token ids."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **settings})
    return token_ids(ask(llm, prompts, params))


@contextmanager
def our_warnings() -> Iterator[list[str]]:
    """Warnings of the project's logger, which vLLM's handlers would keep from pytest."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("spec_plugins")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
