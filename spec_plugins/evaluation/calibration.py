"""Measures step times on the served engine: the plug-in drafts throw-away tokens at chosen sizes.

A *wave* is so many requests at once, all with a context of one length; steps in which all of them decode are
what counts. Nothing else runs in the engine, so that such a step holds no prefill. Waves of all batch sizes
and contexts take turns, in rounds, and draft lengths take turns within a wave.
"""

from __future__ import annotations

import importlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spec_plugins.config import Config, load_config
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.evaluation import calibration_cache
from spec_plugins.evaluation.step_times import Cell, StepTimes
from spec_plugins.support import ENGINES

__all__ = ["Answer", "Plan", "Progress", "Serving", "calibrate"]

ROUNDS = 4
MOST_ROUNDS = 3 * ROUNDS
"""A wave that has not its steps after so many is given up."""
DEFAULT_CONTEXTS = (128, 1024)

Answer = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Prompts of token ids, and how many tokens to answer each with: greedily, past any end, all at once."""

Progress = Callable[[float, float, str], None]
"""Takes the share that is done, about how many seconds are left (NaN: unknown), and what runs."""


class Serving(Protocol):
    """The module ``calibration_runner`` of an adapter."""

    def serving(
        self, model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str], /
    ) -> AbstractContextManager[Answer]:
        """An engine with this configuration, up for the time of a ``with``.

        Args:
            batch: how many requests it must be able to run at once.
            arguments: the user's own, for the engine.
        """


@dataclass(frozen=True)
class Plan:
    """What to measure, and on what."""

    model: str
    """Folder, or the name of one that was downloaded."""
    engine: str
    """A key of :data:`spec_plugins.support.ENGINES`."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    draft_tokens: tuple[int, ...] = (0, 1, 2, 4, 8)
    contexts: tuple[int, ...] = ()
    """Tokens a request; empty: 128 and 1,024, as far as the model takes them."""
    dtype: str = "auto"
    arguments: tuple[str, ...] = ()
    """For the engine."""
    steps: int = 40
    """Of each cell, at least."""

    def __post_init__(self) -> None:
        for name, values, least, most in (
            ("batch_sizes", self.batch_sizes, 1, 4096),
            ("draft_tokens", self.draft_tokens, 0, 256),
            ("contexts", self.contexts or (16,), 16, 1 << 20),
            ("steps", (self.steps,), 1, 10_000),
        ):
            bad = [str(v) for v in values if not least <= v <= most] or ["nothing"]
            if not values or bad != ["nothing"]:
                raise ConfigError(f"{name}: {bad[0]} cannot be used; give numbers from {least} to {most}")


@dataclass(frozen=True, slots=True)
class _Wave:
    batch: int
    context: int


def calibrate(
    plan: Plan,
    *,
    again: bool = False,
    cache: Path | None = None,
    progress: Progress = lambda done, left, words: None,
) -> StepTimes:
    """Measure what is not in the cache yet, and fit.

    What was measured is kept wave by wave, also where this is interrupted; the same call goes on from there.

    Args:
        again: measure anew.
        cache: folder; default :func:`spec_plugins.evaluation.calibration_cache.cache_folder`.
        progress: called before each wave.

    Raises:
        ConfigError: the model or the plan cannot be used.
        UnsupportedError: the engine cannot run so many requests at once, or is none that this can start.
        SpecPluginsError: it does not start, or fails a request; with the end of its log.
    """
    folder = calibration_cache.model_folder(plan.model)
    about = calibration_cache.model_config(folder)
    setting = calibration_cache.setting_of(plan.engine, folder, plan.dtype, plan.arguments)
    path = calibration_cache.file_of(setting, cache or calibration_cache.cache_folder())
    kept = None if again else calibration_cache.kept(path, setting)
    gathered = _Gathered(plan, _contexts(plan, about), kept.cells if kept else ())
    if gathered.due:
        with tempfile.TemporaryDirectory(prefix="spec-plugins-") as temporary:
            samples = Path(temporary) / "samples"
            config = load_config(
                {
                    "proposer": "calibration",
                    "route": "plugin",
                    "num_speculative_tokens": max(1, gathered.lengths[-1]),
                    "options": {"draft_tokens": gathered.lengths, "samples": str(samples)},
                    # Nothing may rest here, however slow the machine is.
                    "containment": {"time_allowance_ms": 60_000.0},
                }
            )
            progress(0.0, math.nan, f"starting {ENGINES[plan.engine].title}")
            most = max(wave.batch for wave in gathered.waves)
            serving = _adapter(plan.engine).serving
            with serving(str(folder), config, most, plan.dtype, plan.arguments) as answer:

                def keep() -> None:
                    calibration_cache.keep(path, StepTimes(setting=setting, cells=gathered.cells))

                _measure(
                    gathered, answer, _Prompts(int(about["vocab_size"])), _Reader(samples), keep, progress
                )
        progress(1.0, 0.0, "fitting")
    elif kept is not None and kept.fit is not None:
        return kept
    times = StepTimes.of(setting, gathered.cells)
    calibration_cache.keep(path, times)
    return times


def _measure(
    gathered: _Gathered,
    answer: Answer,
    prompts: _Prompts,
    reader: _Reader,
    keep: Callable[[], None],
    progress: Progress,
) -> None:
    """Run waves in turn until each has its steps."""
    lengths, waves = gathered.lengths, gathered.waves
    # Compiles, and has caches and memory made, before anything counts.
    first = _Wave(max(w.batch for w in waves), min(w.context for w in waves))
    answer(prompts.of(first, 4 * len(lengths)), 4 * len(lengths))
    reader.new()
    clock = _Clock()
    for number in range(MOST_ROUNDS):
        due = gathered.due
        for wave in due if number % 2 == 0 else due[::-1]:
            progress(*clock.state(gathered.rounds()), f"{wave.batch} requests of {wave.context} tokens")
            # One block more for the steps at either end, where requests do not all decode.
            blocks = 1 + min(gathered.per_round, gathered.missing(wave))
            tokens = blocks * len(lengths) + lengths[-1] + 2
            clock.begin()
            try:
                answer(prompts.of(wave, tokens), tokens)
            finally:
                noted = gathered.note(wave, reader.new())
                keep()
            if not noted:
                raise UnsupportedError(
                    f"{wave.batch} requests of {wave.context} tokens never ran at once in {gathered.title}: "
                    "ask for smaller batches, or give the engine more memory for its cache or a higher limit "
                    "of requests"
                )
            clock.end(wave)
        if not due:
            break


class _Gathered:
    """Cells as they fill, and what they lack."""

    def __init__(self, plan: Plan, contexts: Sequence[int], cells: Sequence[Cell]) -> None:
        self.lengths = sorted(set(plan.draft_tokens))
        self.waves = [_Wave(b, c) for c in contexts for b in sorted(set(plan.batch_sizes))]
        self.per_round = math.ceil(plan.steps / ROUNDS)
        self.title = ENGINES[plan.engine].title
        self._steps = plan.steps
        self._cells = {(c.batch, c.q, c.context): c for c in cells}

    @property
    def cells(self) -> list[Cell]:
        return list(self._cells.values())

    @property
    def due(self) -> list[_Wave]:
        """Waves that lack steps."""
        return [wave for wave in self.waves if self.missing(wave) > 0]

    def missing(self, wave: _Wave) -> int:
        """Steps that it lacks, of the draft length that has the fewest."""
        found = [self._cells.get((wave.batch, n + 1, wave.context)) for n in self.lengths]
        return self._steps - min(cell.steps if cell else 0 for cell in found)

    def rounds(self) -> dict[_Wave, int]:
        """How often each must run yet, at least."""
        return {wave: math.ceil(max(0, self.missing(wave)) / self.per_round) for wave in self.waves}

    def note(self, wave: _Wave, samples: Sequence[tuple[int, int, float, float]]) -> int:
        """Add a wave's steps to their cells; returns how many there were of its batch size."""
        noted = [s for s in samples if s[0] == wave.batch and s[1] in self.lengths]
        for batch, drafted, context, seconds in noted:
            cell = self._cells.setdefault(
                (batch, drafted + 1, wave.context),
                Cell(batch=batch, q=drafted + 1, context=wave.context, mean_context=context, seconds=[]),
            )
            cell.mean_context = (cell.mean_context * cell.steps + context) / (cell.steps + 1)
            cell.seconds.append(seconds)
        return len(noted)


def _adapter(engine: str) -> Serving:
    about = ENGINES[engine]
    try:
        module: Any = importlib.import_module(f"spec_plugins.adapters.{about.package}.calibration_runner")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("spec_plugins."):
            raise
        raise UnsupportedError(f"{about.title} cannot be calibrated in this version") from error
    found: Serving = module
    return found


def _contexts(plan: Plan, about: dict[str, Any]) -> list[int]:
    if plan.contexts:
        return sorted(set(plan.contexts))
    longest = int(about.get("max_position_embeddings") or DEFAULT_CONTEXTS[-1] * 2)
    return [c for c in DEFAULT_CONTEXTS if c <= longest // 2] or [max(16, longest // 4)]


class _Prompts:
    """Random prompts; no two share a beginning, which a cache could keep, and each comes in all rounds."""

    def __init__(self, vocab_size: int) -> None:
        # Special tokens stand at either end.
        self._low, self._high = vocab_size // 4, max(vocab_size // 4 + 1, 3 * vocab_size // 4)

    def of(self, wave: _Wave, tokens: int) -> list[list[int]]:
        """Of a length that makes the wave's context its mean over so many tokens of answer."""
        length = max(1, wave.context - tokens // 2)
        return [
            np.random.default_rng(i).integers(self._low, self._high, length).tolist()
            for i in range(wave.batch)
        ]


class _Reader:
    """Reads what the proposer wrote since."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[tuple[int, int, float, float]]:
        """Requests, draft tokens of each, mean context, seconds."""
        if not self._path.exists():  # interrupted before the engine was up
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        rows = (line.split(",") for line in whole.decode().splitlines())
        return [(int(b), int(n), float(c), float(s)) for b, n, c, s in rows]


class _Clock:
    """Guesses how long the rest takes."""

    def __init__(self) -> None:
        self._seconds: dict[_Wave, float] = {}
        self._spent = self._begun = self._done = 0.0

    def begin(self) -> None:
        self._begun = time.monotonic()

    def end(self, wave: _Wave) -> None:
        self._seconds[wave] = time.monotonic() - self._begun
        self._spent += self._seconds[wave]

    def state(self, rounds: Mapping[_Wave, int]) -> tuple[float, float]:
        """Share done, and seconds left, where each wave must run so often yet; NaN before the first."""
        if not self._seconds:
            return 0.0, math.nan
        # Of waves that were not run yet, as if time grew with the requests past some eight.
        pace = sum(self._seconds.values()) / sum(8 + w.batch for w in self._seconds)
        left = sum(n * self._seconds.get(w, pace * (8 + w.batch)) for w, n in rounds.items())
        self._done = max(self._done, self._spent / (self._spent + left))
        return self._done, left
