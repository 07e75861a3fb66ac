"""The real vLLM on the CPU, with a tiny random model.

Engines run inside the test process, so that a test can reach into one: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_model import prompts_of_tiny_model, save_tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# More threads do not make so small a model faster, and on a loaded machine they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MAX_MODEL_LEN = 256
MakeEngine = Callable[..., AbstractContextManager[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make environment-vllm"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids."""
    return prompts_of_tiny_model()


@pytest.fixture(scope="session")
def make_engine(tiny_model: Path) -> MakeEngine:
    """``with make_engine("suffix", **vllm_arguments) as llm``: an engine in this process, in float32."""
    return functools.partial(_engine, tiny_model)


@contextmanager
def _engine(model: Path, /, proposer: str | None = None, **settings: Any) -> Iterator[Any]:
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
