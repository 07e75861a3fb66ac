"""An engine's HTTP server as a group of processes of its own."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spec_plugins.errors import SpecPluginsError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ServerProcess", "free_port"]

START_SECONDS = 600.0
"""How long a server may take to answer; 30 is usual, and a busy machine has taken 200."""
ANSWER_SECONDS = 600.0
STARTS = 3
"""How often a server is started whose ports were taken by others before it bound them."""
_PORTS = range(10_000, 22_000)
_running: set[int] = set()


class ServerProcess:
    """A server on a free loopback port, up from ``with`` to its end; its processes are one group.

    Where this process is told to end meanwhile (SIGTERM) and does nothing of its own then, they end with it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        cores: Sequence[int] = (),
        log: Path | None = None,
    ) -> None:
        """
        Args:
            name: for messages and the log's name.
            command: what starts it; ``--host`` and ``--port`` are added.
            variables: of its environment, beside this process's.
            cores: the processors that it may use; all, where none are named.
            log: gets all that it says; left out: a file that stays after an error only.
        """
        self.name, self.command, self.variables, self.cores = name, list(command), dict(variables), cores
        self._started: subprocess.Popen[bytes] | None = None
        self._keeps_log = log is not None
        self.log = log or Path()
        """All that it says."""
        self.port = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The first of the group, once it is started."""
        assert self._started is not None, "not started"
        return self._started

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            SpecPluginsError: it ended, or has not answered in ten minutes; with the end of its log.
        """
        self.start()
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def start(self) -> None:
        """Start it, without waiting. Whoever calls this has to see to its :meth:`end`."""
        self.port = free_port()
        command = [*self.command, "--host", "127.0.0.1", "--port", str(self.port)]
        if not self._keeps_log and self.log == Path():
            handle, path = tempfile.mkstemp(prefix=f"{self.name.replace(' ', '-')}-", suffix=".log")
            os.close(handle)
            self.log = Path(path)
        own = threading.current_thread() is threading.main_thread()
        if own and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end_all)
        with self.log.open("wb") as log, _on(self.cores):
            log.write((shlex.join(command) + "\n").encode())
            log.flush()
            self._started = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, **self.variables},
            )  # fmt: skip
        _running.add(self.process.pid)

    def wait(self) -> None:
        """Until it answers; starts it again where its port was taken meanwhile; raises as ``__enter__``."""
        started, starts = time.monotonic(), 1
        while time.monotonic() - started < START_SECONDS:
            if self.process.poll() is not None:
                if starts < STARTS and os.strerror(errno.EADDRINUSE) in self._said():
                    self.end()
                    self.start()
                    starts += 1
                    continue
                raise self.failure(f"ended with {self.process.returncode} before it answered")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health", 5.0)[0] == 200:
                    return
            time.sleep(0.25)
        raise self.failure(f"has not answered for {START_SECONDS:.0f} s")

    def failure(self, what: str) -> SpecPluginsError:
        """An error with the end of the server's log."""
        lines = self._said().splitlines()
        return SpecPluginsError(
            "\n".join([f"the server {self.name!r} {what}; {self.log} ends:", *lines[-30:]])
        )

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.end()
        if kind is None and not self._keeps_log:
            self.log.unlink(missing_ok=True)

    def end(self, patience: float = 10.0) -> None:
        """End the whole group, and wait for it.

        Args:
            patience: seconds until what does not end by itself is killed.
        """
        if self._started is None:
            return
        group = self.process.pid
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self.process.poll()
                if not self.processes():
                    break
                time.sleep(0.1)
            else:
                continue
            break
        self.process.wait(10.0)
        _running.discard(group)

    def _stats(self) -> Iterator[tuple[int, list[str]]]:
        """The fields of /proc/PID/stat after the name, of each process of the group."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    values = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                    if int(values[2]) == self.process.pid and values[0] != "Z":
                        yield int(entry.name), values

    def processes(self) -> list[int]:
        """The group's living processes."""
        return [pid for pid, _ in self._stats()]

    def resident(self) -> float:
        """MiB resident, summed over the group's processes."""
        return sum(int(values[21]) for _, values in self._stats()) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def processor_seconds(self) -> float:
        """Processor time of the group's living processes so far."""
        return sum(int(v[11]) + int(v[12]) for _, v in self._stats()) / os.sysconf("SC_CLK_TCK")

    def get(self, path: str, seconds: float = 30.0) -> tuple[int, str]:
        """Status and text of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    @contextlib.contextmanager
    def post(self, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """The response; leaving it unread closes the connection, which aborts the request.

        Raises:
            OSError: no connection, or a status that is not 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"{response.status}: {response.read().decode(errors='replace')[:500]}")
            yield response


def free_port() -> int:
    """A loopback port for a server that binds it later, perhaps a minute.

    Below those that the system hands out by itself, of which another process may be given one meanwhile, and
    below those that SGLang draws its own from.
    """
    for port in random.sample(_PORTS, 64):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _end_all(number: int, _frame: Any) -> None:
    for group in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    sys.exit(128 + number)


@contextlib.contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started meanwhile stay on these processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
