"""What a proposer costs the engine: microseconds by request and step."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case, spread
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.proposer import IntArray, Need, Target
from spec_plugins.registry import registry

BATCH = 32
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "ngram most_frequent": {"prefer": "most_frequent"},
    "suffix": {},
    "suffix chain": {"tree": False},
    "lookahead": {},
}


def source_tokens(context: Context, wanted: int) -> IntArray:
    """Python's own library, tokenised by the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(context.model)
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += tokenizer(path.read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        if len(tokens) >= wanted:
            break
    return np.array(tokens, np.int32)


def rescan(tokens: IntArray, n: int, k: int) -> IntArray:
    """Prompt lookup as it is usually written: look through the whole context in every step."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    found = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
    return tokens[found[-1] + n :][:k] if len(found) else tokens[:0]


@case("proposal-cost")
def proposal_cost(context: Context) -> Result:
    """µs a request and step at a batch of 32, one new token a step, with the driver (median, quartiles)."""
    contexts = (1024, 8192, 32768)
    steps = 20 if context.quick else 200
    stream = source_tokens(context, 400_000)
    result = Result(
        [
            "proposer",
            *(f"{c // 1024}k tokens" for c in contexts),
            "of it, the proposer (32k)",
            "drafted (32k)",
        ]
    )
    ids = [f"request-{i}" for i in range(BATCH)]
    rows = np.arange(BATCH, dtype=np.int32)
    for name, options in PROPOSERS.items():
        cells = []
        for length in contexts:
            context.say(f"{name} at {length} tokens")
            token_ids = np.zeros((BATCH, length + steps + 1), np.int32)
            for i in range(BATCH):
                start = (i * 104_729) % (len(stream) - token_ids.shape[1])
                token_ids[i] = stream[start : start + token_ids.shape[1]]
            proposer = registry().create(name.split()[0], options)
            config = Config(num_speculative_tokens=8)
            target = Target(
                vocab_size=49_152, max_model_len=token_ids.shape[1], max_num_seqs=BATCH,
                num_speculative_tokens=8, max_draft_nodes=config.draft_nodes(proposer),
                provides=frozenset({Need.TREES}),
            )  # fmt: skip
            driver = Driver(proposer, target, config)
            own: list[float] = []
            inner = proposer.propose

            def timed(step: object, inner: object = inner, own: list[float] = own) -> object:
                started = time.perf_counter()
                answer = inner(step)  # type: ignore[operator]
                own.append(time.perf_counter() - started)
                return answer

            proposer.propose = timed  # type: ignore[method-assign, assignment]
            taken, drafted = [], 0
            # A proposer may spread the taking in of prompts over steps.
            for _ in range(BATCH * length // 8192 + 10):
                driver.propose(ids, token_ids, rows, np.full(BATCH, length, np.int32))
            own.clear()
            for step in range(1, steps):
                lengths = np.full(BATCH, length + step, np.int32)
                started = time.perf_counter()
                drafts = driver.propose(ids, token_ids, rows, lengths)
                driver.observe(ids, np.zeros(BATCH, np.int32))
                taken.append((time.perf_counter() - started) * 1e6 / BATCH)
                drafted += int(drafts.counts.sum())
            cells.append(spread(taken))
        inside = [s * 1e6 / BATCH for s in own]
        result.rows.append([name, *cells, spread(inside), f"{drafted / (steps - 1) / BATCH:.1f}"])
    cells = []
    for length in contexts:
        context.say(f"rescan at {length} tokens")
        taken = []
        for step in range(steps // 2):
            tokens = stream[step * 1000 : step * 1000 + length]
            started = time.perf_counter()
            rescan(tokens, 3, 8)
            taken.append((time.perf_counter() - started) * 1e6)
        cells.append(spread(taken))
    result.rows.append(["rescan (numpy, one n)", *cells, "", ""])
    result.notes.append(
        "Through the driver: budgets, checking, statistics and containment included. Text: the Python "
        "standard library, the model's tokenizer. Prompts are taken in before the clock starts."
    )
    return result
