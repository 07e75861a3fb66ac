"""Runs the same prompts with several configurations in turn and compares what came of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spec_plugins.config import Config
from spec_plugins.errors import UnsupportedError
from spec_plugins.evaluation.prompts import TaggedPrompt
from spec_plugins.support import ENGINES

__all__ = ["BASELINE", "Measured", "Runner", "compare", "machine", "open_runners", "processor"]

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


def processor() -> str:
    """The name of this machine's."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((x.partition(":")[2].strip() for x in file if x.startswith("model name")), name)
    except OSError:
        return name


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **_version("vllm"),
        **_version("sglang"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(distribution: str) -> dict[str, str]:
    try:
        return {distribution: importlib.metadata.version(distribution)}
    except importlib.metadata.PackageNotFoundError:
        return {}


class Runner(Protocol):
    """Runs prompts, one at a time, in one engine with one configuration."""

    config: Config | None
    """``None``: without speculation."""

    def generate(self, messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> tuple[list[int], int]:
        """Greedy token ids, and how many target forwards decoded them (prefill not counted)."""

    def statistics(self) -> Mapping[str, Any]:
        """The driver's figures, see :meth:`Statistics.snapshot`; empty without speculation."""


def open_runners(
    engine: str, model: Path, configs: Mapping[str, Config], say: Callable[[str], None]
) -> AbstractContextManager[dict[str, Runner]]:
    """Runners of an engine, in float32: one without speculation and one a configuration.

    Args:
        engine: a key of :data:`spec_plugins.support.ENGINES`.
        say: told what takes so long.

    Raises:
        UnsupportedError: this version has none for that engine.
    """
    about = ENGINES[engine]
    try:
        module = importlib.import_module(f"spec_plugins.adapters.{about.package}.comparison_runner")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("spec_plugins."):
            raise
        raise UnsupportedError(f"nothing can be compared in {about.title} in this version") from error
    opened: AbstractContextManager[dict[str, Runner]] = module.runners(
        model, {BASELINE: None, **configs}, say
    )
    return opened


def compare(
    runners: Mapping[str, Runner],
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
        runners: by a name for the table, :data:`BASELINE` among them.
        seconds: begin no further prompt when the next would likely end after this.
        progress: called with the share of the time that is used and the prompts done.
    """
    results = {name: Measured(name, runner.config) for name, runner in runners.items()}
    for runner in runners.values():
        runner.generate(prompts[0].messages, 4)
    started = time.perf_counter()
    for done, prompt in enumerate(prompts):
        used = time.perf_counter() - started
        if done and used * (done + 1) / done > seconds:
            break
        progress(used / seconds, done)
        outputs = {}
        names = list(results)
        for name in names[done % len(names) :] + names[: done % len(names)]:
            measured, begun = results[name], time.perf_counter()
            outputs[name], forwards = runners[name].generate(prompt.messages, max_new_tokens)
            measured.seconds.append(time.perf_counter() - begun)
            measured.forwards.append(forwards)
            measured.tokens.append(len(outputs[name]))
            measured.tags.append(prompt.tag)
        for name, measured in results.items():
            measured.identical.append(outputs[name] == outputs[BASELINE])
    progress(1.0, len(results[BASELINE].seconds))
    for name, measured in results.items():
        measured.statistics = runners[name].statistics()
    return results
