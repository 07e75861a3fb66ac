"""The real vLLM on the CPU, with a tiny random model.

Engines run inside the test process, so that a test can reach into one: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
from offline import MakeEngine, engine
from tiny_model import prompts_of_tiny_model, save_tiny_model


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
    return functools.partial(engine, tiny_model)
