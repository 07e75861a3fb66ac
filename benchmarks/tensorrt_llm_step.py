"""What drafting costs a step of TensorRT-LLM's executor: measured with a stand-in of its requests."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case, spread
from benchmarks.proposal_cost import source_tokens
from spec_plugins.errors import UnavailableError
from spec_plugins.proposer import IntArray

REQUESTS, CONTEXT = 64, 8000
K = 4
STAND_IN = Path(__file__).parents[1] / "integration_tests/tensorrt_llm/executor_stand_in.py"


def stand_in() -> ModuleType:
    """The stand-in of the engine, which is beside its tests."""
    spec = importlib.util.spec_from_file_location("executor_stand_in", STAND_IN)
    if spec is None or spec.loader is None or not STAND_IN.is_file():
        raise UnavailableError(f"there is no {STAND_IN}: run this in the checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def replay(texts: Sequence[Sequence[int]], requests: Sequence[Any], drafter: Any, steps: int) -> list[float]:
    """Seconds of each ``prepare_draft_tokens``, while the requests go on as their texts do."""
    batch = SimpleNamespace(generation_requests=list(requests), context_requests=[])
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        drafter.prepare_draft_tokens(batch)
        seconds.append(time.perf_counter() - started)
        for request, text in zip(requests, texts, strict=True):
            have, accepted = len(request.tokens), 0
            for token in request.py_draft_tokens:
                if token != text[have + accepted]:
                    break
                accepted += 1
            request.tokens += text[have : have + accepted + 1]
            request.py_num_accepted_draft_tokens = accepted
    return seconds


class CopiesAll:
    """Takes every request's whole text in each step, and drafts nothing: what reading alone would cost."""

    def prepare_draft_tokens(self, batch: Any) -> None:
        for request in batch.generation_requests:
            np.array(request.get_tokens(0), np.int32)
            request.py_draft_tokens = []


def drafters(vocab_size: int) -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    from spec_plugins.adapters.tensorrt_llm import speculative_config

    def made(source: dict[str, Any]) -> Callable[[], Any]:
        config = {**source, "num_speculative_tokens": K}
        return lambda: speculative_config(config, "x", vocab_size=vocab_size, max_seq_len=32768).drafter

    return {
        "ngram": made({"proposer": "ngram"}),
        "suffix": made({"proposer": "suffix"}),
        "no drafts, all texts copied": CopiesAll,
    }


@case("tensorrt-llm-step")
def tensorrt_llm_step(context: Context) -> Result:
    """µs of prepare_draft_tokens at 64 requests of 8k tokens: a stand-in measurement, not TensorRT-LLM."""
    engine = stand_in()
    steps, repeats = (40, 1) if context.quick else (300, 5)
    longest = CONTEXT + (steps + 2) * (K + 1)
    context.say("tokenising")
    stream: IntArray = source_tokens(context, longest * REQUESTS)
    texts = np.resize(stream, (REQUESTS, longest)).tolist()
    result = Result(["drafter", "a step, µs", "slowest 1%, µs", "under 1 ms", "drafted a step", "accepted"])
    with engine.engine_stand_in():
        for name, make in drafters(int(stream.max()) + 1).items():
            seconds: list[float] = []
            medians, drafted, accepted = [], 0, 0
            for repeat in range(repeats):
                context.say(f"{name}: repeat {repeat + 1} of {repeats}")
                requests = [engine.RequestStandIn(i, t[:CONTEXT], 10**6) for i, t in enumerate(texts)]
                drafter = make()
                replay(texts, requests, drafter, 1)  # takes the prompts in
                gc.collect()
                measured = replay(texts, requests, drafter, steps)
                seconds += measured
                medians.append(1e6 * statistics.median(measured))
                worker = getattr(drafter, "worker", None)
                if worker is not None:
                    drafted += worker.state.driver.statistics.draft_tokens
                    accepted += worker.state.driver.statistics.accepted_tokens
            slow = 1e6 * statistics.quantiles(seconds, n=100)[-1]
            under = sum(s < 1e-3 for s in seconds) / len(seconds)
            result.rows.append([
                name, spread(medians, 0), f"{slow:.0f}", f"{under:.1%}",
                f"{drafted / (repeats * steps):.0f}", f"{accepted / drafted:.0%}" if drafted else "",
            ])  # fmt: skip
    result.notes.append(
        f"{REQUESTS} requests of {CONTEXT} tokens, {K} draft tokens at most, {repeats} x {steps} steps; "
        "medians of repeats, then median and quartiles. The text is the Python standard library and goes on "
        "as recorded. Measured is the adapter's own code with driver and proposer; requests are a stand-in "
        "in Python, whose get_token and get_tokens cost otherwise than the engine's bindings. The step that "
        "takes the prompts in is not counted. Nothing of this ran in TensorRT-LLM."
    )
    return result
