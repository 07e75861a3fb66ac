"""Proposers made to be watched, or to misbehave, inside vLLM; registered by :func:`register`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from toy_drafts import Garbage, Raises, Sleeps, copies
from trained_drafts import Trained

from spec_plugins import Draft, Need, Proposer, Step, Target
from spec_plugins.registry import Registration, registry


@functools.cache
def register() -> None:
    """Make the proposers below known under their names, in this process."""
    for name, cls in {
        "toy-watcher": Watcher, "toy-sampled": Sampled, "toy-wrong-q": WrongQ, "toy-likely": Likely,
        "toy-raises": Raises, "toy-garbage": Garbage, "toy-sleeps": Sleeps,
        "toy-trained": Trained,
    }.items():  # fmt: skip
        registry().add(Registration(name, f"{cls.__module__}:{cls.__name__}", "tests"))


@dataclass
class Sight:
    """What was shown of one request in one step."""

    request_id: str
    tokens: list[int]
    hidden: Any
    aux: Any


class Watcher(Proposer):
    """Writes down the hidden states that it is shown."""

    needs = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES})
    uses = frozenset({Need.EMBEDDINGS, Need.LM_HEAD})
    bounded = True

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def load(self, target: Target) -> None:
        self.target = target
        self.sights: list[Sight] = []

    def propose(self, step: Step) -> list[Draft]:
        assert step.hidden_states is not None
        assert step.aux_hidden_states is not None
        for i, request_id in enumerate(step.request_ids):
            hidden, aux = step.hidden_states[i], step.aux_hidden_states[i]
            self.sights.append(Sight(request_id, step.tokens(i).tolist(), hidden.clone(), aux.clone()))
        return [copies(step, i) for i in range(len(step))]


class Sampled(Proposer):
    """Draws each token given the one before it, and says from what."""

    needs = frozenset({Need.PROBABILITIES})
    bounded = True
    honest: ClassVar[bool] = True

    def load(self, target: Target) -> None:
        import torch

        self.random = torch.Generator().manual_seed(3)
        self.table = (2 * torch.randn(target.vocab_size, target.vocab_size, generator=self.random)).softmax(1)

    def propose(self, step: Step) -> list[Draft]:
        import torch

        drafts = []
        for i in range(len(step)):
            last, tokens, rows = int(step.tokens(i)[-1]), [], []
            for _ in range(min(step.budgets[i], step.depths[i])):
                rows.append(self.table[last])
                last = int(torch.multinomial(rows[-1], 1, generator=self.random))
                tokens.append(last)
            if not tokens:
                drafts.append(Draft(np.empty(0, np.int32)))
                continue
            probs = torch.stack(rows)
            if not self.honest:
                probs = torch.full_like(probs, 1 / probs.shape[1])
            drafts.append(Draft(np.array(tokens, np.int32), probs=probs))
        return drafts


class WrongQ(Sampled):
    """Says that it draws evenly, which it does not."""

    honest = False


class Likely(Proposer):
    """Always the same tokens, with certainty; a test says which."""

    bounded = True
    tokens: ClassVar[Sequence[int]] = (1, 2)

    def propose(self, step: Step) -> list[Draft]:
        rooms = np.minimum(step.budgets, step.depths).tolist()
        return [Draft(np.array(self.tokens[:room], np.int32)) for room in rooms]
