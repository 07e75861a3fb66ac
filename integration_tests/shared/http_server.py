"""An engine's HTTP server on a loopback port, and what is asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_plugins.evaluation.server_process import START_SECONDS, ServerProcess

__all__ = ["START_SECONDS", "Served", "answering", "eventually", "launch"]


class Served(ServerProcess):
    """A server that tests ask."""

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


def launch(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Served:
    """Start a server, without waiting for it.

    Args:
        log: gets all that it prints.
        variables: of its environment, beside this process's.
    """
    server = Served("the server", command, variables, log=log)
    server.start()
    return server


@contextmanager
def answering(server: Served) -> Iterator[Served]:
    """Wait until a server answers; at the end its group is killed, whatever happened."""
    try:
        server.wait()
        yield server
    finally:
        server.end(patience=0.5)


def eventually(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What ``found`` returns once it is true, or its last word."""
    deadline = time.monotonic() + seconds
    while not (last := found()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return last
