"""Proposers that repeat the last tokens, and proposers that fail, for every engine's tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_plugins import Draft, Proposer, Step, Target

__all__ = ["Garbage", "Raises", "Sleeps", "copies"]


def copies(step: Step, i: int) -> Draft:
    """Guess that the last tokens come again."""
    room = int(min(step.budgets[i], step.depths[i]))
    return Draft(np.resize(step.tokens(i)[-4:], room).astype(np.int32))


class Raises(Proposer):
    """Fails at every call."""

    def propose(self, step: Step) -> list[Draft]:
        raise RuntimeError("as ever")


class Garbage(Proposer):
    """A new kind of nonsense at every call."""

    def load(self, target: Target) -> None:
        self.calls = 0

    def propose(self, step: Step) -> Sequence[Any]:
        self.calls += 1
        n = len(step)
        answers: list[Sequence[Any]] = [
            [Draft(np.array([-5, 128, 2**30], np.int32))] * n,
            [Draft(np.array([1], np.int32))] * (n + 1),
            [Draft(np.arange(5000, dtype=np.int32) % 128)] * n,
            "nothing of the kind",
            [None] * n,
            [Draft(np.array([1, 2], np.int32), np.array([1, 0], np.int32))] * n,
        ]
        return answers[self.calls % len(answers)]


class Sleeps(Proposer):
    """Takes five seconds."""

    def propose(self, step: Step) -> list[Draft]:
        time.sleep(5)
        return [copies(step, i) for i in range(len(step))]
