"""The real SGLang on the CPU, with a tiny random model.

An engine's scheduler is a process of its own, so a test sees what the engine returns and prints.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import toys
from engine_settings import ENGINE, report_failed_process
from tiny_model import prompts_of_tiny_model, save_tiny_model

MakeEngine = Callable[..., AbstractContextManager[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs SGLang: make environment-sglang"))


@pytest.fixture(scope="session", autouse=True)
def _toys(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines' processes know the proposers of :mod:`toys`."""
    folder = tmp_path_factory.mktemp("toys")
    toys.install(folder)
    added = [str(folder), str(Path(__file__).parent)]
    sys.path += added
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])


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
    return functools.partial(_engine, tiny_model)


@contextmanager
def _engine(model: Path, /, **settings: Any) -> Iterator[Any]:
    import sglang
    import zmq

    chosen = {
        "model_path": str(model), "log_level": "warning", "custom_sigquit_handler": report_failed_process,
        **ENGINE, **settings,
    }  # fmt: skip
    engine = None
    try:
        engine = sglang.Engine(**chosen)
        yield engine
    finally:
        if engine is not None:
            engine.shutdown()
        else:
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=60)
        # With messages left to processes that are gone, the collection of a context would wait for ever.
        for context in [found for found in gc.get_objects() if isinstance(found, zmq.Context)]:
            context.destroy(linger=0)
