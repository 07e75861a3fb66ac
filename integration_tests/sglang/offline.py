"""SGLang without a server."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from engine_settings import ENGINE, report_failed_process

__all__ = ["MakeEngine", "engine"]

_alive: list[str] = []

MakeEngine = Callable[..., AbstractContextManager[Any]]


@contextmanager
def engine(model: Path | str, /, **settings: Any) -> Iterator[Any]:
    """``with engine(model, **arguments_of_sglang) as it``: an ``sglang.Engine``, in float32."""
    import sglang
    import zmq

    chosen = {
        "model_path": str(model), "log_level": "warning", "custom_sigquit_handler": report_failed_process,
        **ENGINE, **settings,
    }  # fmt: skip
    if _alive:
        raise RuntimeError(
            f"SGLang is alive, with {_alive[0]}, and would lose its processes at this one's end"
        )
    _alive.append(str(settings))
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
        _alive.clear()
        # With messages left to processes that are gone, the collection of a context would wait for ever.
        for context in [found for found in gc.get_objects() if isinstance(found, zmq.Context)]:
            context.destroy(linger=0)
