"""An engine's HTTP server on a loopback port, as a group of processes, and what is asked of it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
"""How long a server may take to answer: some 40 on an idle machine."""


@dataclass
class Served:
    """A server; its processes are one group."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str, seconds: float = 30.0) -> tuple[int, str]:
        """Status and text of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def client(self) -> Any:
        """An ``openai.OpenAI`` that tries everything once."""
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=300)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All of /metrics by name and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float | None:
        """A metric, summed over all labels but those given; ``None`` where it is not shown."""
        found = [v for (n, given), v in self.metrics().items() if n == name and labels.items() <= given]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by one of its labels, summed over the others."""
        found: dict[str, float] = {}
        for (n, given), value in self.metrics().items():
            if n == name:
                key = dict(given)[label]
                found[key] = found.get(key, 0.0) + value
        return found

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End the whole group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def launch(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Served:
    """Start a server on a free port, without waiting for it.

    Args:
        command: without the host and the port, which are added.
        log: gets all that it prints; it runs in the log's folder.
        env: its whole environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=log.parent,
            start_new_session=True, env=env,
        )  # fmt: skip
    return Served(process, port, log)


@contextmanager
def answering(server: Served) -> Iterator[Served]:
    """Wait until a server answers; at the end its group is killed, whatever happened."""
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(server):
            ended = server.process.poll()
            assert ended is None, f"the server ended with {ended}; {server.log}:\n{server.tail()}"
            assert time.monotonic() < deadline, f"the server does not answer; {server.log}:\n{server.tail()}"
            time.sleep(0.5)
        yield server
    finally:
        server.kill()


def _answers(server: Served) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.get("/health", 10.0)[0] == 200
    return False


def eventually(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What ``found`` returns once it is true, or its last word."""
    deadline = time.monotonic() + seconds
    while not (last := found()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return last
