"""``vllm serve`` in processes of its own, and a closed-loop client for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import CACHE
from spec_plugins.errors import SpecPluginsError, UnavailableError

__all__ = ["Answer", "Block", "Environment", "Server", "Speculated", "environment", "model_dtype", "plug_in"]

START_SECONDS = 600.0
"""How long a server may take to answer; 30 is usual, and a busy machine has taken 200."""
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Environment:
    """Where vLLM is installed, and with what."""

    bin: Path
    about: dict[str, str]
    """Versions."""
    modules: frozenset[str]
    """Which of the modules asked for can be imported there."""


def environment(*modules: str) -> Environment:
    """vLLM's environment: ``$SPEC_PLUGINS_VLLM_BIN``, or the one that `make environment-vllm` makes."""
    named = os.environ.get("SPEC_PLUGINS_VLLM_BIN")
    folder = Path(named) if named else CACHE / "venvs" / "vllm" / "bin"
    if not (folder / "vllm").exists():
        raise UnavailableError(
            f"vllm: there is no {folder / 'vllm'}; `make environment-vllm` makes the environment, or "
            "SPEC_PLUGINS_VLLM_BIN names the bin folder of another"
        )
    code = (
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        "def found(name):\n"
        "    try: return u.find_spec(name) is not None\n"
        "    except ImportError: return False\n"
        "versions = {'vllm': m.version('vllm'), 'vllm_torch': m.version('torch')}\n"
        "print(json.dumps([versions, [x for x in sys.argv[1:] if found(x)]]))\n"
    )
    run = subprocess.run(
        [folder / "python", "-c", code, *modules], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise UnavailableError(f"vllm: {folder / 'python'} does not find it: {run.stderr.strip()[-500:]}")
    about, there = json.loads(run.stdout)
    return Environment(folder, about, frozenset(there))


def model_dtype() -> str:
    """``$SPEC_PLUGINS_VLLM_DTYPE``, or bfloat16 where the processor is at least as fast with it."""
    if named := os.environ.get("SPEC_PLUGINS_VLLM_DTYPE"):
        return named
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    return "bfloat16" if "avx512" in flags else "float32"


def plug_in(proposer: str, k: int, **options: Any) -> list[str]:
    """The flags of `vllm serve` for one of this project's proposers."""
    spec = {
        "method": "custom_class",
        "model": f"spec_plugins.adapters.vllm.{proposer}",
        "num_speculative_tokens": k,
    }
    flags = ["--speculative-config", json.dumps(spec)]
    if options:
        flags += ["--additional-config", json.dumps({"spec_plugins": {"options": options}})]
    return flags


@dataclass(frozen=True, slots=True)
class Speculated:
    """vLLM's own counters, or how much they rose."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    generated: float = 0.0

    def __add__(self, other: Speculated) -> Speculated:
        return Speculated(
            self.drafts + other.drafts, self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted, self.generated + other.generated,
        )  # fmt: skip

    def __sub__(self, other: Speculated) -> Speculated:
        return Speculated(
            self.drafts - other.drafts, self.draft_tokens - other.draft_tokens,
            self.accepted - other.accepted, self.generated - other.generated,
        )  # fmt: skip

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


_running: set[int] = set()


def _end_all(number: int, _frame: Any) -> None:
    for group in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    sys.exit(128 + number)


@dataclass
class Server:
    """`vllm serve` on a free loopback port, up from ``with`` to its end; its processes are one group.

    Args:
        settings: flags of `vllm serve` beside those that each server gets.
        extra: environment variables.
    """

    name: str
    env: Environment
    model: Path
    settings: Sequence[str]
    extra: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=Path)
    port: int = 0

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(self.env.bin / "vllm"), "serve", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model"]
        command += ["--disable-uvicorn-access-log", *self.settings]
        handle, path = tempfile.mkstemp(prefix=f"vllm-{self.name.replace(' ', '-')}-", suffix=".log")
        self.log = Path(path)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end_all)
        with os.fdopen(handle, "wb") as log:
            log.write((shlex.join(command) + "\n").encode())
            log.flush()
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **self.extra,
                    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                    "PATH": f"{self.env.bin}{os.pathsep}{os.environ.get('PATH', '')}",
                },
            )  # fmt: skip
        _running.add(self.process.pid)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def _wait(self) -> None:
        """Until the server answers."""
        assert self.process is not None
        started = time.monotonic()
        while time.monotonic() - started < START_SECONDS:
            if self.process.poll() is not None:
                raise self.failure(f"ended with {self.process.returncode} before it answered")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._get("/health", 5.0)[0] == 200:
                    return
            time.sleep(0.25)
        raise self.failure(f"has not answered for {START_SECONDS:.0f} s")

    def failure(self, what: str) -> SpecPluginsError:
        """An error with the end of the server's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return SpecPluginsError(
            "\n".join([f"vllm serve ({self.name}) {what}; {self.log} ends:", *lines[-30:]])
        )

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._stop()
        if kind is None:
            self.log.unlink(missing_ok=True)

    def _stop(self) -> None:
        """End the whole group, and wait for it."""
        if self.process is None:
            return
        group = self.process.pid
        for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
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
        assert self.process is not None
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

    def _get(self, path: str, seconds: float = 30.0) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Everything on /metrics, by its name with its labels."""
        values: dict[str, float] = {}
        for line in self._get("/metrics")[1].splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def total(self, name: str, metrics: dict[str, float] | None = None) -> float:
        """One metric, summed over its labels."""
        values = self.metrics() if metrics is None else metrics
        return sum(value for key, value in values.items() if key.partition("{")[0] == name)

    def speculated(self) -> Speculated:
        """vLLM's counters now."""
        seen = self.metrics()
        return Speculated(
            self.total("vllm:spec_decode_num_drafts_total", seen),
            self.total("vllm:spec_decode_num_draft_tokens_total", seen),
            self.total("vllm:spec_decode_num_accepted_tokens_total", seen),
            self.total("vllm:generation_tokens_total", seen),
        )

    @contextlib.contextmanager
    def post(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """A completion's response; leaving it unread closes the connection, which aborts the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps({"model": "model", **body}),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"{response.status}: {response.read().decode(errors='replace')[:500]}")
            yield response
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """A greedy answer of just ``max_tokens`` tokens."""
        body = {
            "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        started = time.perf_counter()
        with self.post(body) as response:
            choice = json.loads(response.read())["choices"][0]
        return Answer(choice["token_ids"], choice["text"], time.perf_counter() - started)

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
