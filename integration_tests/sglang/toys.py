"""Proposers made to be watched, or to misbehave, inside SGLang; found by their entry point."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from toy_drafts import copies

from spec_plugins import Draft, Need, Proposer, Step, Target, hookimpl

NAMES = {
    "toy-head": "toys:Head", "toy-likely": "toys:Likely", "toy-mixed": "toys:Mixed",
    "toy-raises": "toy_drafts:Raises", "toy-garbage": "toy_drafts:Garbage", "toy-sleeps": "toy_drafts:Sleeps",
}  # fmt: skip
SEEN = "SPEC_PLUGINS_TOY_LOG"
"""Environment variable: a file for what a proposer saw, a JSON text a line."""
SGLANGS_VERIFICATION = "SPEC_PLUGINS_TOY_SGLANGS_VERIFICATION"
"""Environment variable: set where ``toy-likely`` is to be verified by SGLang's own means."""
LIKELY = "SPEC_PLUGINS_TOY_TOKENS"
"""Environment variable: what ``toy-likely`` drafts, a JSON list."""
HANGS_AT = 127
"""The first token of a prompt at which ``toy-mixed`` never comes back."""


@hookimpl
def spec_plugins_proposers() -> dict[str, str]:
    """The proposers below."""
    return NAMES


class Head(Proposer):
    """Puts the target's own LM head on the hidden states, and drafts what it liked second."""

    needs = frozenset({Need.HIDDEN_STATES, Need.LM_HEAD})
    bounded = True

    def load(self, target: Target) -> None:
        assert target.lm_head is not None
        self.lm_head = target.lm_head()

    def propose(self, step: Step) -> list[Draft]:
        assert step.hidden_states is not None
        drafts = []
        for i, request_id in enumerate(step.request_ids):
            scores = step.hidden_states[i] @ self.lm_head.T
            shown = {
                "request": request_id,
                "prompt": int(step.prompt_lengths[i]),
                "tokens": step.tokens(i).tolist(),
                "told": scores.argmax(-1).tolist(),
            }
            with Path(os.environ[SEEN]).open("a") as log:
                log.write(json.dumps(shown) + "\n")
            room = int(min(step.budgets[i], step.depths[i]))
            second = scores[-1:].topk(2).indices[0, 1:].numpy() if len(scores) else step.tokens(i)[-1:]
            drafts.append(Draft(np.resize(np.append(step.tokens(i)[-1:], second), room).astype(np.int32)))
        return drafts


class Likely(Proposer):
    """Always the same tokens, as two chains of a tree."""

    uses = frozenset({Need.TREES})
    bounded = True

    def load(self, target: Target) -> None:
        self.tokens = json.loads(os.environ[LIKELY])
        if SGLANGS_VERIFICATION in os.environ:
            from spec_plugins.adapters.sglang import worker

            worker.sampled_wrongly = lambda *_: False

    def propose(self, step: Step) -> list[Draft]:
        first, second, other = self.tokens
        tree = Draft(np.array([first, second, other], np.int32), np.array([-1, 0, -1], np.int32))
        return [
            tree if min(step.budgets[i], step.depths[i]) >= 2 else copies(step, i) for i in range(len(step))
        ]


class Mixed(Proposer):
    """Raises, answers nonsense, sleeps and answers well, one after the other; fails at every finish."""

    def load(self, target: Target) -> None:
        self.calls = 0

    def propose(self, step: Step) -> Sequence[Any]:
        if any(step.tokens(i)[0] == HANGS_AT for i in range(len(step))):
            time.sleep(3600)
        self.calls += 1
        n = len(step)
        good = [copies(step, i) for i in range(n)]
        answers: list[Sequence[Any]] = [
            good,
            [Draft(np.full(3, 10**6, np.int32))] * n,
            [Draft(np.full(3, -7, np.int32))] * n,
            [Draft(np.ones(3, np.int32))] * (n + 1),
            [Draft(np.full(3, 1.5))] * n,
            [Draft(np.ones(400, np.int32))] * n,
        ]
        way = self.calls % (len(answers) + 2)
        if way == len(answers):
            raise RuntimeError("on purpose")
        if way > len(answers):
            time.sleep(0.8)
            return good
        return answers[way]

    def finish(self, request_id: str) -> None:
        raise KeyError(request_id)
