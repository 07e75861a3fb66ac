"""The training loop: shards in, a head out; may be interrupted and goes on where it stopped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_plugins.errors import ConfigError
from spec_plugins.training.batches import batches
from spec_plugins.training.features import FeatureStore
from spec_plugins.training.objectives import Objective, Score

__all__ = ["Progress", "Schedule", "split", "train"]

SECONDS_BETWEEN_SAVES = 60.0
VALIDATED = 0.05
"""The share of shards that is held out, at least one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How to train."""

    epochs: int = 4
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    batch_tokens: int = 2048
    patience: int = 2
    """Epochs without a better score on the held-out shards after which it ends."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands; told after every shard."""

    epoch: int
    """From 0."""
    shard: int
    shards: int
    trained: Score
    """Of this epoch so far."""
    validated: Score | None
    """Of the held-out shards, after the last whole epoch."""


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Shards to train on, and those held out, the last ones; raises :class:`ConfigError` for less than 2."""
    held_out = max(1, round(VALIDATED * len(paths)))
    if len(paths) < 2:
        raise ConfigError(
            f"features: {len(paths)} shard of conversations cannot be split into some to train on and some "
            "to score; give more data"
        )
    return list(paths[:-held_out]), list(paths[-held_out:])


def train(
    objective: Objective,
    paths: Sequence[Path],
    schedule: Schedule,
    state_file: Path,
    identity: Mapping[str, Any],
    report: Callable[[Progress], None] = lambda progress: None,
) -> Score:
    """Train until the held-out score no longer improves, or the epochs are over; the best weights stay.

    Args:
        objective: what to train; its module is changed in place.
        paths: the shards of a :class:`FeatureStore`.
        schedule: how.
        state_file: where the state is kept every so often, and found again.
        identity: what is trained, on what; a state of anything else is refused.
        report: told how it goes.

    Returns:
        The best epoch's score on the held-out shards.

    Raises:
        ConfigError: the state is of another schedule or head, or there are too few shards.
    """
    training, held_out = split(paths)
    device = next(objective.module.parameters()).device
    optimizer = torch.optim.AdamW(
        objective.module.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    what = {**identity, "schedule": asdict(schedule)}
    state = _resume(objective, optimizer, what, state_file)
    saved = time.monotonic()
    best = state.best
    while state.epoch < schedule.epochs and state.worse < schedule.patience:
        order = np.random.default_rng((schedule.seed, state.epoch)).permutation(len(training))
        objective.module.train()
        for at in range(state.shard, len(order)):
            mixed = np.random.default_rng((schedule.seed, state.epoch, at))
            for batch in batches(
                FeatureStore.read(training[order[at]]), schedule.batch_tokens, device, mixed
            ):
                # Each epoch covers the shards evenly, so progress is known without counting batches first.
                done = (state.epoch + at / len(order)) / schedule.epochs
                loss, score = objective(batch)
                if not loss.requires_grad:
                    continue
                for group in optimizer.param_groups:
                    group["lr"] = schedule.learning_rate * _rate(state.step, schedule.warmup_steps, done)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(objective.module.parameters(), 1.0)
                optimizer.step()
                state.step += 1
                state.trained.add(score)
            state.shard = at + 1
            if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                state.save(objective, optimizer, what, state_file)
                saved = time.monotonic()
            report(Progress(state.epoch, at + 1, len(order), state.trained, best))
        found = _validate(objective, held_out, schedule.batch_tokens, device)
        if best is None or found.acceptance_length > best.acceptance_length:
            best, state.worse = found, 0
            state.best, state.best_weights = found, _copy(objective)
        else:
            state.worse += 1
        state.epoch, state.shard = state.epoch + 1, 0
        state.trained = Score.zero(objective.positions, objective.ranks)
        state.save(objective, optimizer, what, state_file)
        report(Progress(state.epoch, 0, len(order), state.trained, found))
    assert state.best is not None
    assert state.best_weights is not None
    objective.module.load_state_dict(state.best_weights)
    return state.best


def _rate(step: int, warmup: int, done: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def _copy(objective: Objective) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in objective.module.state_dict().items()}


def _validate(objective: Objective, paths: Sequence[Path], batch_tokens: int, device: torch.device) -> Score:
    objective.module.eval()
    score = Score.zero(objective.positions, objective.ranks)
    with torch.no_grad():
        for path in paths:
            for batch in batches(FeatureStore.read(path), batch_tokens, device):
                score.add(objective(batch)[1])
    return score


@dataclass(slots=True)
class _State:
    """All that an interruption must not lose."""

    trained: Score
    epoch: int = 0
    shard: int = 0
    step: int = 0
    worse: int = 0
    best: Score | None = None
    best_weights: dict[str, torch.Tensor] | None = None

    def save(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        what: Mapping[str, Any],
        path: Path,
    ) -> None:
        unfinished = path.with_suffix(".part")
        torch.save(
            {
                "what": dict(what),
                "module": objective.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "counters": [self.epoch, self.shard, self.step, self.worse],
                "trained": asdict(self.trained),
                "best": None if self.best is None else asdict(self.best),
                "best_weights": self.best_weights,
            },
            unfinished,
        )
        os.replace(unfinished, path)


def _resume(
    objective: Objective, optimizer: torch.optim.Optimizer, what: Mapping[str, Any], path: Path
) -> _State:
    if not path.exists():
        return _State(Score.zero(objective.positions, objective.ranks))
    try:
        device = next(objective.module.parameters()).device
        kept: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
        changed = [name for name, value in what.items() if kept["what"].get(name) != value]
        if changed:
            raise ConfigError(
                f"{str(path)!r} is of a training with other {', '.join(changed)}; give the same, delete it, "
                "or give another --out"
            )
        objective.module.load_state_dict(kept["module"])
        optimizer.load_state_dict(kept["optimizer"])
        epoch, shard, step, worse = kept["counters"]
        best = None if kept["best"] is None else Score(**kept["best"])
        return _State(Score(**kept["trained"]), epoch, shard, step, worse, best, kept["best_weights"])
    except ConfigError:
        raise
    except Exception as error:  # whatever a broken file makes torch raise
        raise ConfigError(
            f"cannot go on from {str(path)!r}: {error}; delete it to begin anew, or give another --out"
        ) from error
