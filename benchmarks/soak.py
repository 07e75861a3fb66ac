"""Mixed traffic for half an hour against an engine's server with a plug-in, and the same without."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.case import Context, Result, case
from benchmarks.server import Environment, Server, Speculated, environment
from benchmarks.sglang_server import STAND_INS, SglangServer, algorithm
from benchmarks.vllm_server import VllmServer, model_dtype, plug_in
from benchmarks.vllm_serving import CONTEXT, NONE, SUFFIX_K, cut, encoder
from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation.prompts import agent_replays, humaneval, interleaved, mtbench

__all__ = ["Slot", "growth", "lengths_differ"]

CONCURRENCY = 8
ADAPTER = "spec_plugins.adapters.{}"
CACHE_TOKENS = 10_000
"""suffix's cache of answers: so small that it is full within minutes, or memory and acceptance would grow."""
POOL_TOKENS = 6_000
"""SGLang's KV cache: so small that what the radix cache keeps is evicted all the time."""
SETTLED = 5
"""Slots after which memory is taken as settled, and how many are compared at either end."""


@dataclass(frozen=True)
class Slot:
    """What happened in one minute."""

    seconds: float
    resident: float
    """MiB, at its end."""
    speculated: Speculated
    outcomes: Counter[str]


@dataclass
class Traffic:
    """Requests of all kinds, the same sequence on every run."""

    prompts: Sequence[Sequence[int]]
    outcomes: Counter[str] = field(default_factory=Counter)
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = self._requests()

    def _requests(self) -> Iterator[tuple[dict[str, Any], int | None]]:
        """Bodies, and after how many pieces the client hangs up."""
        chance = random.Random(0)
        for prompt in itertools.cycle(self.prompts):
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.choice((16, 48, 96, 160))}
            # No seed: vLLM's CPU build can fail on a batch that mixes greedy requests with seeded ones.
            body |= {"temperature": chance.choice((0.0, 0.0, 0.7)), "top_p": 0.95}
            body |= {"stream": chance.random() < 0.5}
            yield body, chance.randint(1, 8) if body["stream"] and chance.random() < 0.3 else None

    def run(self, server: Server) -> None:
        """One client: the next request when the last is done, until stopped."""
        while not self.stopped.is_set():
            with self.lock:
                body, pieces = next(self.requests)
            try:
                outcome = self._send(server, body, pieces)
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome = "failed"
                self.errors.append(repr(error))
                self.stopped.wait(1.0)
            with self.lock:
                self.outcomes[outcome] += 1

    @staticmethod
    def _send(server: Server, body: dict[str, Any], pieces: int | None) -> str:
        with server.post("/v1/completions", {"model": "model", **body}) as response:
            if not body["stream"]:
                return "done" if json.loads(response.read())["choices"] else "failed"
            seen = 0
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return "done"
                if line.startswith(b"data: "):
                    if "choices" not in json.loads(line[6:]):
                        raise ValueError(line.decode(errors="replace")[:500])
                    seen += 1
                if seen == pieces:
                    return "aborted"  # leaving closes the connection
        raise ValueError("the stream ended before its end")


def growth(slots: Sequence[Slot], settled: int = SETTLED) -> float:
    """MiB more at the end than when settled."""
    return slots[-1].resident - slots[min(settled, len(slots)) - 1].resident


def lengths_differ(
    first: Sequence[Speculated], last: Sequence[Speculated], draws: int = 4000
) -> tuple[float, float, float]:
    """How much longer the last slots' acceptance length is than the first's, with a 95% bootstrap interval.

    Slots are drawn with replacement on either side.
    """
    chance = random.Random(0)

    first, last = ([slot for slot in slots if slot.drafts] for slots in (first, last))
    if not first or not last:
        return (float("nan"),) * 3

    def length(slots: Sequence[Speculated]) -> float:
        return sum(slots, Speculated()).acceptance_length

    drawn = sorted(
        length(chance.choices(last, k=len(last))) - length(chance.choices(first, k=len(first)))
        for _ in range(draws)
    )
    return length(last) - length(first), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]


def held(server: Server) -> list[str]:
    """The plug-in's gauges of held state, and the engine's own."""
    shown = []
    for key, value in server.metrics().items():
        name, _, labels = key.partition("{")
        figure = next((x for x in labels.rstrip("}").split(",") if x.startswith("figure=")), "")
        if name in ("spec_plugins:requests_held", "spec_plugins:state", server.cache_usage):
            shown.append(f"{name}{'{' + figure + '}' if figure else ''} {value:g}")
    return shown


@dataclass
class Soaked:
    """One server, its traffic, and what was seen of both."""

    server: Server
    traffic: Traffic
    empty: float = 0.0
    """MiB resident before the first request."""
    idle: float = 0.0
    """MiB resident at rest, after the last."""
    slots: list[Slot] = field(default_factory=list)
    left: float = 0.0
    """Requests that run when none should."""
    kept: list[str] = field(default_factory=list)
    _at: float = 0.0
    _before: Speculated = field(default_factory=Speculated)
    _counted: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Before the first request."""
        self.empty, self._at, self._before = (
            self.server.resident(),
            time.monotonic(),
            self.server.speculated(),
        )

    def look(self) -> Slot:
        """What happened since the last look."""
        if not self.server.processes() or self.traffic.outcomes["failed"] > 20:
            raise self.server.failure(f"failed ({'; '.join(self.traffic.errors[:3])})")
        with self.traffic.lock:
            outcomes = self.traffic.outcomes.copy()
        now, clock = self.server.speculated(), time.monotonic()
        slot = Slot(clock - self._at, self.server.resident(), now - self._before, outcomes - self._counted)
        self.slots.append(slot)
        self._at, self._before, self._counted = clock, now, outcomes
        return slot

    def rest(self, expected: str = "") -> None:
        """Wait until nothing runs, and until ``expected`` is among what is held."""
        deadline = time.monotonic() + 30
        while self.server.total(self.server.running) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.left, self.kept = self.server.total(self.server.running), held(self.server)
        while expected and expected not in self.kept and time.monotonic() < deadline:
            time.sleep(0.5)  # what is held is told every ten seconds where nothing runs
            self.kept = held(self.server)
        self.idle = self.server.resident()
        self.kept += self.server.left_over()

    def memory(self, name: str) -> str:
        """A sentence on the memory."""
        return (
            f"{name}: RSS {self.empty:.0f} MiB before the first request, {self.idle:.0f} at rest at the end; "
            f"from row {min(SETTLED, len(self.slots))} to the last {growth(self.slots):+.0f} MiB, over "
            f"{sum((s.outcomes for s in self.slots[SETTLED:]), Counter()).total()} requests."
        )


@case("vllm-soak", needs="vllm")
def vllm_soak(context: Context) -> Result:
    """Half an hour of mixed traffic on `vllm serve` with `suffix`, and on one without: memory, acceptance."""
    env = environment("vllm", ADAPTER.format("vllm"))
    dtype = model_dtype()
    settings = ["--dtype", dtype, "--enforce-eager", "--max-model-len", str(CONTEXT)]
    settings += ["--max-num-seqs", str(CONCURRENCY)]
    suffix = plug_in("suffix", SUFFIX_K, cache_tokens=CACHE_TOKENS)
    return soak(context, VllmServer, env, dtype, settings, suffix, {})


@case("sglang-soak", needs="sglang")
def sglang_soak(context: Context) -> Result:
    """Half an hour of mixed traffic on SGLang with `suffix`, and without: memory, acceptance."""
    env = environment("sglang", ADAPTER.format("sglang"), STAND_INS)
    dtype = model_dtype()
    settings = [
        "--dtype",
        dtype,
        "--context-length",
        str(CONTEXT),
        "--max-running-requests",
        str(CONCURRENCY),
    ]
    settings += ["--max-total-tokens", str(POOL_TOKENS)]
    suffix, extra = algorithm("suffix", SUFFIX_K, cache_tokens=CACHE_TOKENS)
    return soak(context, SglangServer, env, dtype, settings, suffix, extra)


def soak(
    context: Context,
    kind: type[Server],
    env: Environment,
    dtype: str,
    settings: Sequence[str],
    suffix: Sequence[str],
    extra: Mapping[str, str],
) -> Result:
    """Both servers side by side.

    Args:
        settings: flags of both.
        suffix: flags of the one that speculates.
        extra: its environment variables.
    """
    if not any(module.startswith(ADAPTER.format("")) for module in env.modules):
        raise UnavailableError(f"{env.bin}: the project is not installed there; make the environment again")
    minutes = float(os.environ.get("SPEC_PLUGINS_SOAK_MINUTES", "2" if context.quick else "30"))
    slot_seconds = 10.0 if context.quick else 60.0
    context.say("preparing the prompts")
    encode = encoder(context.model)
    mixed = interleaved(agent_replays(context.data), humaneval(context.data), mtbench(context.data))
    limits = itertools.cycle((256, 1024, 512, 128))
    prompts = [cut(p.messages, encode, limit) for p, limit in zip(mixed, limits, strict=False)]
    variants = {NONE: ((), {}), "suffix": (suffix, extra)}
    cores = sorted(os.sched_getaffinity(0))
    both: dict[str, Soaked] = {}
    with contextlib.ExitStack() as stack:
        for i, (name, (flags, more)) in enumerate(variants.items()):
            context.say(f"starting the server, {name}")
            share = cores[i :: len(variants)] or cores  # or the servers' threads wait for each other
            server = stack.enter_context(
                kind(f"soak {name}", env, context.model, [*settings, *flags], more, share)
            )
            both[name] = Soaked(server, Traffic(prompts))
        pool = stack.enter_context(ThreadPoolExecutor(CONCURRENCY * len(both)))
        for soaked in both.values():
            soaked.begin()
        clients = [pool.submit(s.traffic.run, s.server) for s in both.values() for _ in range(CONCURRENCY)]
        try:
            started = time.monotonic()
            for i in range(1, max(1, round(minutes * 60 / slot_seconds)) + 1):
                time.sleep(max(0.0, started + i * slot_seconds - time.monotonic()))
                seen = {name: soaked.look() for name, soaked in both.items()}
                context.say(
                    f"{time.monotonic() - started:.0f} of {minutes * 60:.0f} s; "
                    + "; ".join(f"{name} {slot.resident:.0f} MiB" for name, slot in seen.items())
                    + f"; acceptance length {seen['suffix'].speculated.acceptance_length:.2f}"
                )
        finally:
            for soaked in both.values():
                soaked.traffic.stopped.set()
        for client in clients:
            client.result()
        context.say("coming to rest")
        both[NONE].rest()
        both["suffix"].rest("spec_plugins:requests_held 0")

    unit = f"{slot_seconds:.0f} s" if context.quick else "minute"
    result = Result(
        [unit, "RSS without, MiB", "RSS, MiB", "done", "aborted", "failed", "tokens/s", "acceptance length"],
        about={**env.about, "engine_dtype": dtype},
    )
    plain, ours = both[NONE], both["suffix"]
    for i, (without, slot) in enumerate(zip(plain.slots, ours.slots, strict=True), 1):
        counted = slot.speculated
        result.rows.append(
            [
                i,
                f"{without.resident:.0f}",
                f"{slot.resident:.0f}",
                *(slot.outcomes[outcome] for outcome in ("done", "aborted", "failed")),
                f"{counted.generated / slot.seconds:.0f}",
                f"{counted.acceptance_length:.2f}" if counted.drafts else "",
            ]
        )
    n = ours.traffic.outcomes
    result.notes += [
        f"{context.model.name}, {dtype}, suffix, K={SUFFIX_K}; {n.total()} requests over {len(prompts)} "
        f"prompts (agents, HumanEval, MT-bench) at concurrency {CONCURRENCY}: greedy and sampled, streamed "
        f"or not, {n['aborted']} aborted by hanging up, {n['failed']} failed. One without speculation beside "
        f"it got the same sequence, {plain.traffic.outcomes.total()} of it; each had half of the processors. "
        "RSS is the sum over a server's processes.",
        plain.memory("Without speculation"),
        ours.memory("suffix"),
    ]
    compared = min(SETTLED, (len(ours.slots) - 1) // 2)
    if compared:
        difference, low, high = lengths_differ(
            [slot.speculated for slot in ours.slots[1 : 1 + compared]],
            [slot.speculated for slot in ours.slots[-compared:]],
        )
        result.notes.append(
            f"Acceptance length, the last {compared} rows against rows 2 to {1 + compared}: "
            f"{difference:+.2f} (95% interval {low:+.2f} to {high:+.2f}, bootstrap over rows). Prompts come "
            f"again when all were sent; the cache of answers holds {CACHE_TOKENS:,} tokens."
        )
    result.notes.append(
        f"Held at rest, just after a request: {', '.join(ours.kept) or 'no gauge tells'}; "
        f"{ours.left:.0f} running."
    )
    for name, soaked in both.items():
        if soaked.traffic.errors:
            result.notes.append(f"The first failure, {name}: {soaked.traffic.errors[0]}")
    return result
