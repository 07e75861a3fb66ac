"""Carries a worker's figures to the process that answers ``/metrics``.

vLLM has no channel for a plug-in's figures. The worker writes them, at most once a second, into a small
file that is named after the engine's instance; the stat logger reads it. Both run on one machine; where a
worker runs on another, its figures are missing, and nothing else is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing.util
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_plugins.driver import Driver

__all__ = ["SERVER", "SnapshotWriter", "find_snapshot", "folder", "read_snapshot"]

logger = logging.getLogger("spec_plugins")

SECONDS_BETWEEN = 1.0
SERVER = "SPEC_PLUGINS_SERVER"
"""Environment variable that every process of a server inherits, set by the first one's plug-in."""


def folder() -> Path:
    """Where snapshots lie: this user's, closed to others; ``SPEC_PLUGINS_RUN_DIR`` moves it.

    Raises:
        OSError: it cannot be made, or somebody else could put files there: anyone may have made it first in
            the temporary directory.
    """
    default = f"{tempfile.gettempdir()}/spec-plugins-{os.getuid()}"
    path = Path(os.environ.get("SPEC_PLUGINS_RUN_DIR") or default)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is a link; set SPEC_PLUGINS_RUN_DIR to a folder of your own")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set SPEC_PLUGINS_RUN_DIR to one of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others can write to {path}; `chmod go-w {path}`, or set SPEC_PLUGINS_RUN_DIR to another folder"
        )
    return path


def _name(instance_id: str, rank: int) -> str:
    return f"{os.environ.get(SERVER, '')}.{instance_id}.{rank}.json"


def find_snapshot(instance_id: str, rank: int) -> Path | None:
    """A worker's file, of this instance or, where each API process counts its own, of this server."""
    with contextlib.suppress(OSError):
        exact = folder() / _name(instance_id, rank)
        if exact.exists():
            return exact
        if os.environ.get(SERVER):
            # The newest, since a process may start engines one after another.
            return max(folder().glob(_name("*", rank)), key=lambda p: p.stat().st_mtime, default=None)
    return None


def read_snapshot(path: Path | None) -> dict[str, Any] | None:
    """The figures in a file; ``None`` where there are none. Never raises."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class SnapshotWriter:
    """Writes one worker's figures. Without a folder to write to it says so once, and does nothing."""

    def __init__(self, vllm_config: Any, proposer: str) -> None:
        self.proposer = proposer
        self._next = 0.0
        self._path: Path | None = None
        try:
            _sweep()
            self._path = folder() / _name(vllm_config.instance_id, rank_of(vllm_config))
        except OSError as error:
            _warn(str(error))
            return
        # Not weakref's, which a process forked by multiprocessing never runs at its end.
        multiprocessing.util.Finalize(self, self._path.unlink, kwargs={"missing_ok": True}, exitpriority=0)

    def write(self, driver: Driver, *, now: bool = False) -> None:
        """Write, unless that was less than a second ago."""
        time_now = time.monotonic()
        if self._path is None or (time_now < self._next and not now):
            return
        self._next = time_now + SECONDS_BETWEEN
        figures = {
            "pid": os.getpid(),
            "proposer": self.proposer,
            "requests_held": driver.requests_held,
            "state": driver.gauges(),
            **driver.statistics.snapshot(),
        }
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(figures), encoding="utf-8")
            fresh.replace(self._path)


@functools.cache
def _warn(why: str) -> None:
    """Once a process for each reason, though it may make many engines."""
    logger.warning("this project's metrics are off, all else works: %s", why)


def rank_of(vllm_config: Any) -> int:
    """The data-parallel rank, which is also the stat logger's engine index."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def _sweep() -> None:
    """Remove what processes left that were killed."""
    if not Path("/proc/self").exists():
        return
    for path in folder().iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if path.suffix == ".json":
                pid = int(json.loads(path.read_text(encoding="utf-8"))["pid"])
            else:
                pid = int(path.suffix[1:])
            if not Path(f"/proc/{pid}").exists():
                path.unlink()
