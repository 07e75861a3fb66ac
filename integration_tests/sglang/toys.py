"""Proposers made to be watched, or to misbehave, inside SGLang; found by their entry point."""

from __future__ import annotations

import ast
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from toy_drafts import copies
from trained_drafts import METHODS, Trained

from spec_plugins import Draft, Need, Proposer, Step, Target, hookimpl

NAMES = {
    "toy-head": "toys:Head", "toy-likely": "toys:Likely", "toy-drawn": "toys:Drawn",
    "toy-mixed": "toys:Mixed",
    "toy-raises": "toy_drafts:Raises", "toy-garbage": "toy_drafts:Garbage", "toy-sleeps": "toy_drafts:Sleeps",
}  # fmt: skip
SEEN = "SPEC_PLUGINS_TOY_LOG"
"""Environment variable: a file for what a proposer saw, a JSON text a line."""
SGLANGS_VERIFICATION = "SPEC_PLUGINS_TOY_SGLANGS_VERIFICATION"
"""Environment variable: set where ``toy-likely`` is to be verified by SGLang's own means."""
LIKELY = "SPEC_PLUGINS_TOY_TOKENS"
"""Environment variable: what ``toy-likely`` drafts, a JSON list."""
AFTER = "SPEC_PLUGINS_TOY_DISTRIBUTIONS"
"""Environment variable: a file of what the target says after each token, ``[vocab, vocab]``: ``toy-drawn``
draws from mixtures of it."""
HANGS_AT = 127
"""The first token of a prompt at which ``toy-mixed`` never comes back."""


@hookimpl
def spec_plugins_proposers() -> dict[str, str]:
    """The proposers below."""
    return NAMES


class Head(Proposer):
    """Writes hidden states down, with what the target's own LM head makes of the last layer's, and drafts
    what it liked second; as a tree, whose first branch is wrong, or as a chain."""

    needs = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES, Need.LM_HEAD})
    uses = frozenset({Need.TREES})
    bounded = True

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (2, 0)

    def load(self, target: Target) -> None:
        assert target.lm_head is not None
        self.lm_head, self.provided = target.lm_head(), target.provides

    def propose(self, step: Step) -> list[Draft]:
        assert step.hidden_states is not None
        assert step.aux_hidden_states is not None
        drafts = []
        for i, request_id in enumerate(step.request_ids):
            scores = step.hidden_states[i] @ self.lm_head.T
            shown = {
                "request": request_id,
                "prompt": int(step.prompt_lengths[i]),
                "tokens": step.tokens(i).tolist(),
                "told": scores.argmax(-1).tolist(),
                "states": [step.hidden_states[i].tolist(), step.aux_hidden_states[i].tolist()],
            }
            with Path(os.environ[SEEN]).open("a") as log:
                log.write(json.dumps(shown) + "\n")
            room = int(min(step.budgets[i], step.depths[i]))
            second = scores[-1:].topk(2).indices[0, 1:].numpy() if len(scores) else step.tokens(i)[-1:]
            chain = np.resize(np.append(step.tokens(i)[-1:], second), room).astype(np.int32)
            if Need.TREES in self.provided and step.budgets[i] > room > 0 and step.lengths[i] % 2:
                parents = np.append([-1, -1], np.arange(1, room))
                drafts.append(Draft(np.append((chain[:1] + 1) % 128, chain), parents.astype(np.int32)))
            else:
                drafts.append(Draft(chain))
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


class Drawn(Likely):
    """After the first token draws its drafts, and says from what, in the way that the cache salt names:

    - ``same``: from the target's own distribution;
    - ``chain``: two tokens from others;
    - ``tree``: two from another without replacement, and one after the first of them;
    - ``liar``: two likely ones, though it says that all tokens were as likely;
    - one of :data:`trained_drafts.METHODS`: as that trained proposer does.

    Without a salt drafts as its parent.
    """

    needs = Trained.needs
    uses = frozenset({Need.TREES, Need.PROBABILITIES})

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return self.trained.aux_layers(num_layers)

    def __init__(self) -> None:
        self.trained = Trained()

    def load(self, target: Target) -> None:
        import torch

        super().load(target)
        self.trained.load(target)
        assert Need.PROBABILITIES in target.provides
        self.after = torch.from_numpy(np.load(os.environ[AFTER]))
        self.flat = torch.full_like(self.after[0], 1 / len(self.after))
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, step: Step) -> list[Draft]:
        drafts, trained = super().propose(step), self.trained.propose(step)
        assert step.tenants is not None
        for i, tenant in enumerate(step.tenants):
            if tenant:
                _, way = ast.literal_eval(tenant)  # the extra key, and the salt
                if way in METHODS:
                    drafts[i] = trained[i]
                elif step.lengths[i] == step.prompt_lengths[i] + 1 and step.budgets[i] > 0:
                    drafts[i] = self.drawn(way, int(step.tokens(i)[-1]))
                else:
                    drafts[i] = Draft(np.empty(0, np.int32))
        return drafts

    def finish(self, request_id: str) -> None:
        self.trained.finish(request_id)

    def mixed(self, last: int) -> Any:
        return (self.after[last] + self.flat) / 2

    def draw(self, q: Any) -> int:
        return int(q.multinomial(1, generator=self.generator))

    def drawn(self, way: str, last: int) -> Draft:
        import torch

        if way == "liar":
            x = self.draw(self.after[last] ** 3)
            chain = [x, self.draw(self.after[x] ** 3)]
            return Draft(np.array(chain, np.int32), None, torch.stack([self.flat, self.flat]))
        q = self.after[last] if way == "same" else self.mixed(last)
        x = self.draw(q)
        if way == "same":
            return Draft(np.array([x], np.int32), None, q[None])
        after = self.mixed(x)
        y = self.draw(after)
        if way == "chain":
            return Draft(np.array([x, y], np.int32), None, torch.stack([q, after]))
        left = q.clone()
        left[x] = 0
        left /= left.sum()
        tokens, parents = [x, self.draw(left), y], [-1, -1, 0]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), torch.stack([q, left, after]))


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
