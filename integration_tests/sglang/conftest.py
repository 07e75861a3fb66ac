"""The real SGLang on the CPU, with a tiny random model.

An engine's scheduler is a process of its own, so a test sees what the engine returns and prints.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
from offline import MakeEngine, engine
from plugged_in import plug_in
from tiny_model import prompts_of_tiny_model, save_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs SGLang: make environment-sglang"))


@pytest.fixture(scope="session", autouse=True)
def _toys(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines' processes know the proposers of :mod:`toys`."""
    plug_in(tmp_path_factory.mktemp("toys"), Path(__file__).with_name("toys.py"))


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
    """``with make_engine(**arguments_of_sglang) as engine``: an ``sglang.Engine``, in float32."""
    return functools.partial(engine, tiny_model)
