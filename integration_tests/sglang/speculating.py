"""Engines with the project's algorithms: how they are configured, and what they say of themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spec_plugins.adapters.sglang.names import CONFIG_VARIABLE

__all__ = ["configured", "figures_of"]

PATIENT = {"containment": {"time_allowance_ms": 60_000.0}}
"""Long, so that no loaded machine makes a good proposer late."""


@contextmanager
def configured(fields: Mapping[str, Any]) -> Iterator[str]:
    """Engines that are made meanwhile have this configuration; the algorithm to start them with."""
    kept = os.environ.get(CONFIG_VARIABLE)
    os.environ[CONFIG_VARIABLE] = json.dumps({**PATIENT, **fields})
    try:
        yield "SPEC"
    finally:
        if kept is None:
            del os.environ[CONFIG_VARIABLE]
        else:
            os.environ[CONFIG_VARIABLE] = kept


def figures_of(engine: Any) -> dict[str, Any]:
    """The driver's figures."""
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]["spec_plugins"]
    return found
