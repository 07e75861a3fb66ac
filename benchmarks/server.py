"""An engine's server, and a closed-loop client for it."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.case import CACHE
from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation.server_process import ServerProcess

__all__ = ["Answer", "Block", "Environment", "Server", "Speculated", "environment"]


@dataclass(frozen=True)
class Environment:
    """Where an engine is installed, and with what."""

    bin: Path
    about: dict[str, str]
    """Versions."""
    modules: frozenset[str]
    """Which of the modules asked for can be imported there."""


def environment(engine: str, *modules: str) -> Environment:
    """``$SPEC_PLUGINS_VLLM_BIN`` (for vllm), or the environment that `make environment-vllm` makes.

    Args:
        engine: what its distribution is called, in lower case.
        modules: which to look for.
    """
    variable = f"SPEC_PLUGINS_{engine.upper()}_BIN"
    named = os.environ.get(variable)
    folder = Path(named) if named else CACHE / "venvs" / engine / "bin"
    if not (folder / "python").exists():
        raise UnavailableError(
            f"{engine}: there is no {folder / 'python'}; `make environment-{engine}` makes the environment, "
            f"or {variable} names the bin folder of another"
        )
    code = (
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        "def found(name):\n"
        "    try: return u.find_spec(name) is not None\n"
        "    except ImportError: return False\n"
        "engine, *modules = sys.argv[1:]\n"
        "versions = {engine: m.version(engine), engine + '_torch': m.version('torch')}\n"
        "print(json.dumps([versions, [x for x in modules if found(x)]]))\n"
    )
    run = subprocess.run(
        [folder / "python", "-c", code, engine, *modules], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise UnavailableError(f"{engine}: {folder / 'python'} does not find it: {run.stderr.strip()[-500:]}")
    about, there = json.loads(run.stdout)
    return Environment(folder, about, frozenset(there))


@dataclass(frozen=True, slots=True)
class Speculated:
    """An engine's counters, or how much they rose."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    generated: float = 0.0
    by_position: tuple[float, ...] = ()
    """How many drafts were accepted up to and with each position."""
    propose_seconds: float = 0.0
    """In this project's proposer; 0 for an engine's own."""

    def __add__(self, other: Speculated) -> Speculated:
        return self._with(other, 1.0)

    def __sub__(self, other: Speculated) -> Speculated:
        return self._with(other, -1.0)

    def _with(self, other: Speculated, times: float) -> Speculated:
        pairs = itertools.zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return Speculated(
            self.drafts + times * other.drafts,
            self.draft_tokens + times * other.draft_tokens,
            self.accepted + times * other.accepted,
            self.generated + times * other.generated,
            tuple(mine + times * theirs for mine, theirs in pairs),
            self.propose_seconds + times * other.propose_seconds,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, over the steps that had a draft: vLLM's figure. NaN without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request got in a step, over all steps: each gives one beside those accepted."""
        steps = self.generated - self.accepted
        return self.generated / steps if steps > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    token_ids: list[int]
    text: str
    seconds: float


@dataclass(frozen=True)
class Block:
    """What came of several requests, sent in a closed loop."""

    answers: list[Answer]
    seconds: float
    speculated: Speculated

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole block, prefill included."""
        return sum(len(a.token_ids) for a in self.answers) / self.seconds


class Server(ServerProcess, ABC):
    """One engine's server of this project's model, named ``model``."""

    running: ClassVar[str]
    """The metric that says how many requests run."""
    cache_usage: ClassVar[str]
    """The metric that says how full the KV cache is."""

    def __init__(
        self,
        name: str,
        env: Environment,
        model: Path,
        settings: Sequence[str],
        extra: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        """
        Args:
            settings: the engine's flags beside those that each server gets.
            extra: environment variables beside those that each server gets.
            cores: the processors that it may use; all, where none are named.
        """
        command, variables = self.program(env, model, cores)
        path = f"{env.bin}{os.pathsep}{os.environ.get('PATH', '')}"
        super().__init__(
            name,
            [*command, "--served-model-name", "model", *settings],
            {**variables, "HF_HUB_OFFLINE": "1", "PATH": path, **(extra or {})},
            cores,
        )

    @staticmethod
    @abstractmethod
    def program(
        env: Environment, model: Path, cores: Sequence[int]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """What starts it, without its address and settings, and the environment variables that it needs."""

    def metrics(self) -> dict[str, float]:
        """Everything on /metrics, by its name with its labels."""
        values: dict[str, float] = {}
        for line in self.get("/metrics", seconds=120.0)[1].splitlines():  # a loaded server takes its time
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def total(self, name: str, metrics: dict[str, float] | None = None) -> float:
        """One metric, summed over its labels."""
        values = self.metrics() if metrics is None else metrics
        return sum(value for key, value in values.items() if key.partition("{")[0] == name)

    @staticmethod
    def by_position(name: str, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """One metric with a label ``position``, in their order."""
        found: dict[int, float] = defaultdict(float)
        for key, value in metrics.items():
            if key.partition("{")[0] == name and (position := re.search(r'position="(\d+)"', key)):
                found[int(position[1])] += value
        return tuple(found[i] for i in range(max(found, default=-1) + 1))

    @abstractmethod
    def speculated(self) -> Speculated:
        """The counters now."""

    def left_over(self) -> list[str]:
        """What it holds when nothing runs, in words, beside what its metrics tell."""
        return []

    @abstractmethod
    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """A greedy answer of just ``max_tokens`` tokens."""

    def block(self, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> Block:
        """Answer every prompt; when one is done, the next is sent."""

        def answer(prompt: Sequence[int]) -> Answer:
            return self.complete(prompt, max_tokens)

        before = self.speculated()
        with ThreadPoolExecutor(concurrency) as pool:
            started = time.perf_counter()
            try:
                answers = list(pool.map(answer, prompts))
            except (OSError, http.client.HTTPException) as error:
                raise self.failure(f"failed a request ({error})") from error
            seconds = time.perf_counter() - started
        after = self.settled(lambda now: now.generated - before.generated >= len(prompts) * max_tokens)
        return Block(answers, seconds, after - before)

    def settled(self, done: Callable[[Speculated], bool]) -> Speculated:
        """The counters once they hold what was answered: they may come a moment after the answer."""
        deadline = time.monotonic() + 2.0
        while not done(now := self.speculated()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return now
