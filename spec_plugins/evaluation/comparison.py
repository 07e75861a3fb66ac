"""Runs the same prompts with several configurations in turn and compares what came of it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_plugins.adapters.transformers import Engine, SamplingParams
from spec_plugins.config import Config
from spec_plugins.evaluation.prompts import TaggedPrompt

__all__ = ["BASELINE", "Measured", "compare", "machine"]

BASELINE = "none"


@dataclass
class Measured:
    """One configuration's figures over the prompts that were run."""

    name: str
    config: Config | None
    tags: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """By prompt, prefill included."""
    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    """Whether the output equals the baseline's, token for token."""
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, tag: str | None) -> list[int]:
        """Places of the prompts with a tag; of all for ``None``."""
        return [i for i, t in enumerate(self.tags) if tag in (None, t)]

    def summary(self, baseline: Measured, tag: str | None = None) -> dict[str, Any]:
        """Figures over the prompts with a tag, against the baseline on the same prompts."""
        rows = self.rows(tag)
        ratios = [baseline.seconds[i] / self.seconds[i] for i in rows]
        decoded = sum(self.tokens[i] - 1 for i in rows)  # the prefill gives each its first token
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        return {
            "prompts": len(rows),
            "tokens": sum(self.tokens[i] for i in rows),
            "tokens_per_forward": decoded / max(1, sum(self.forwards[i] for i in rows)),
            "tokens_per_second": sum(self.tokens[i] for i in rows) / sum(self.seconds[i] for i in rows),
            "speedup": sum(baseline.seconds[i] for i in rows) / sum(self.seconds[i] for i in rows),
            "speedup_quartiles": quarters,
            "identical": sum(self.identical[i] for i in rows),
        }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((x.partition(":")[2].strip() for x in file if x.startswith("model name")), model)
    except OSError:
        pass
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def compare(
    model: Any,
    tokenizer: Any,
    configs: Mapping[str, Config],
    prompts: Sequence[TaggedPrompt],
    *,
    max_new_tokens: int,
    seconds: float,
    progress: Callable[[float, int], None] = lambda fraction, prompts: None,
) -> dict[str, Measured]:
    """Run prompts one at a time, each with no speculation and with every configuration, until time is up.

    The order of the configurations rotates from prompt to prompt, so that a machine whose speed drifts
    favours none. At least one prompt is run.

    Args:
        configs: by a name for the table; the baseline is added.
        seconds: begin no further prompt when the next would likely end after this.
        progress: called with the share of the time that is used and the prompts done.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    results = {name: Measured(name, config) for name, config in {BASELINE: None, **configs}.items()}
    engines = {name: Engine(model, tokenizer, m.config, max_num_seqs=1) for name, m in results.items()}
    for engine in engines.values():
        engine.generate([list(prompts[0].messages)], SamplingParams(max_new_tokens=4))
    started = time.perf_counter()
    for done, prompt in enumerate(prompts):
        used = time.perf_counter() - started
        if done and used * (done + 1) / done > seconds:
            break
        progress(used / seconds, done)
        outputs = {}
        names = list(results)
        for name in names[done % len(names) :] + names[: done % len(names)]:
            engine, measured = engines[name], results[name]
            forwards, begun = engine.forwards, time.perf_counter()
            (answer,) = engine.generate([list(prompt.messages)], params)
            measured.seconds.append(time.perf_counter() - begun)
            measured.forwards.append(engine.forwards - forwards)
            measured.tokens.append(len(answer.token_ids))
            measured.tags.append(prompt.tag)
            outputs[name] = answer.token_ids
        for name, measured in results.items():
            measured.identical.append(outputs[name] == outputs[BASELINE])
    progress(1.0, len(results[BASELINE].seconds))
    for name, measured in results.items():
        driver = engines[name].driver
        measured.statistics = driver.statistics.snapshot() if driver is not None else {}
    return results
