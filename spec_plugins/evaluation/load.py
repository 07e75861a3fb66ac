"""Load on a served engine, by the engine's own benchmark client, and what its users saw of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spec_plugins.config import Config
from spec_plugins.errors import SpecPluginsError, UnavailableError, UnsupportedError
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.support import ENGINES

__all__ = ["Load", "LoadRunner", "Request", "Served", "load_runner", "read", "run_client"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks."""

    prompt: str
    """As the model takes it, its chat template applied."""
    response: str
    """What was answered before; for clients that take a response's length from its text."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and how they come."""

    requests: Sequence[Request]
    concurrency: int | None = None
    """A closed loop: so many users, each of whom asks anew once answered. ``None``: an open loop."""
    rate: float | None = None
    """Requests a second of an open loop, answered or not."""
    burstiness: float = 1.0
    """Of an open loop: 1 is a Poisson process, less comes in bursts (the shape of gamma-distributed gaps)."""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What the client measured, by request in the order in which they were sent; seconds."""

    seconds: float
    """From the first request to the last answer."""
    first_token: Floats
    """Time to first token."""
    decoding: Floats
    """From the first token to the last."""
    tokens: npt.NDArray[np.int64]
    """Of each answer; 0 for a request that failed."""
    texts: Sequence[str]
    failures: Sequence[str]
    """What went wrong, where something did."""

    @property
    def whole(self) -> Floats:
        """From being sent to the last token."""
        return self.first_token + self.decoding

    @property
    def decoded(self) -> npt.NDArray[np.int64]:
        """Tokens after the first."""
        return np.maximum(self.tokens - 1, 0)

    @property
    def per_token(self) -> Floats:
        """Time per output token, of each request with more than one."""
        more = self.decoded > 0
        found: Floats = self.decoding[more] / self.decoded[more]
        return found

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return float(self.tokens.sum() / self.seconds)


class LoadRunner(Protocol):
    """The module ``load_runner`` of an adapter."""

    CLIENT: str
    """What it is called."""

    def server(
        self, model: str, config: Config | None, dtype: str, arguments: Sequence[str], /
    ) -> ServerProcess:
        """The engine's server, not started.

        Args:
            config: ``None``: without speculation, and without this project.
            arguments: the user's own, for the engine.
        """

    def run(self, server: ServerProcess, model: str, load: Load, /) -> Served:
        """Put load on a server that is up.

        Raises:
            UnavailableError: the client lacks a package.
            SpecPluginsError: it fails; with the end of what it says.
        """


def load_runner(engine: str) -> LoadRunner:
    """The adapter's.

    Raises:
        UnsupportedError: this version has none for that engine.
    """
    about = ENGINES[engine]
    try:
        module: Any = importlib.import_module(f"spec_plugins.adapters.{about.package}.load_runner")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("spec_plugins."):
            raise
        raise UnsupportedError(f"{about.title} has no server to put load on in this version") from error
    found: LoadRunner = module
    return found


def run_client(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    command: Sequence[str],
    out: str,
    install: str,
    variables: Mapping[str, str],
) -> Served:
    """Run a client on a file of requests, and read what it wrote.

    Args:
        name: for messages.
        lines: of the JSONL file, whose path takes the place of ``{requests}`` in ``command``.
        command: the client; ``{folder}`` in it is where it may write.
        out: the file there that it writes, JSON or one line of JSONL.
        install: what to say where it lacks a package.
        variables: of its environment, beside this process's.

    Raises:
        UnavailableError, SpecPluginsError: see :meth:`LoadRunner.run`.
    """
    with tempfile.TemporaryDirectory(prefix="spec-plugins-load-") as folder:
        requests = Path(folder) / "requests.jsonl"
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        words = [w.replace("{requests}", str(requests)).replace("{folder}", folder) for w in command]
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False, env={**os.environ, **variables},
        )  # fmt: skip
        said = "\n".join(ended.stdout.splitlines()[-15:])
        if "ModuleNotFoundError" in said or "ImportError" in said:
            raise UnavailableError(f"{name} lacks a package: {install}. It said:\n{said}")
        if ended.returncode:
            raise SpecPluginsError(f"{name} ended with {ended.returncode}:\n{said}")
        try:
            text = (Path(folder) / out).read_text(encoding="utf-8")
            return read(json.loads(text.splitlines()[-1] if out.endswith(".jsonl") else text))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecPluginsError(
                f"{name} wrote nothing that this version can read ({error!r}):\n{said}"
            ) from error


def read(found: Mapping[str, Any]) -> Served:
    """From the fields that vLLM's and SGLang's clients share; raises :class:`KeyError`."""
    tokens, errors = found["output_lens"], found["errors"]
    first, gaps, texts = found["ttfts"], found["itls"], found["generated_texts"]
    good = np.array([not error for error in errors], bool)
    return Served(
        float(found["duration"]),
        np.array(first, np.float64),
        np.array([float(np.sum(g)) for g in gaps], np.float64),
        np.where(good, np.array(tokens, np.int64), 0),
        texts,
        [str(error) for error in errors if error],
    )
