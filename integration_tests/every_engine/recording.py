"""A proposer that writes down what it is shown, and what several proposers draft from it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trained_drafts import HEADS

from spec_plugins import Draft, Need, Packed, Proposer, Step, Target, hookimpl
from spec_plugins.registry import registry

LOG = "SPEC_PLUGINS_RECORDING"
"""Environment variable: a file, of a JSON text a request and step."""
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {"tree": False, "cache_tokens": 0}),
    "suffix, cache": ("suffix", {"tree": False}),
    "suffix, cache, tree": ("suffix", {}),
    "lookahead": ("lookahead", {"window": 3, "ngram": 4}),
    "medusa": ("medusa", {"model": "medusa"}),
    "medusa, tree": ("medusa", {"model": "medusa", "tree": True}),
    "eagle": ("eagle", {"model": "eagle"}),
    "eagle3": ("eagle3", {"model": "eagle3"}),
    "eagle3, tree": ("eagle3", {"model": "eagle3", "topk": 2}),
    "draft_model": ("draft_model", {"model": "draft"}),
}
"""Who drafts, with which options; ``model`` is a folder in :data:`HEADS`."""
NEWEST = 4
"""Of how many positions hidden states are written down."""
VERIFIED = "ngram"
"""Whose drafts are handed out: they depend on the request alone, not on what ran before or beside it."""


@hookimpl
def spec_plugins_proposers() -> dict[str, str]:
    """The proposer below."""
    return {"recording": "recording:Recording"}


def listed(draft: Draft | None) -> list[list[int]] | None:
    """A draft as tokens and parents."""
    if draft is None:
        return None
    n = len(draft)
    parents = np.arange(-1, n - 1) if draft.parents is None else draft.parents
    return [np.asarray(draft.tokens).tolist(), np.asarray(parents).tolist()]


def newest(states: Packed[Any] | None, i: int) -> list[list[float]]:
    """Hidden states at the newest positions of a request."""
    assert states is not None
    rows: list[list[float]] = states[i][-NEWEST:].double().numpy().round(6).tolist()
    return rows


class Recording(Proposer):
    """Shows every step to all of :data:`PARTS`."""

    uses = frozenset({Need.TREES, Need.PREDICTIONS, Need.SAMPLING})
    needs = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES})
    bounded = True

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def load(self, target: Target) -> None:
        def placed(options: dict[str, Any]) -> dict[str, Any]:
            model = options.get("model")
            return options if model is None else {**options, "model": str(Path(os.environ[HEADS], model))}

        self.parts = {p: registry().create(name, placed(options)) for p, (name, options) in PARTS.items()}
        self.shown: dict[str, int] = {}
        for part in self.parts.values():
            part.load(target)

    def propose(self, step: Step) -> Sequence[Draft]:
        drafts = {name: list(part.propose(step)) for name, part in self.parts.items()}
        with Path(os.environ[LOG]).open("a", encoding="utf-8") as log:
            for i in range(len(step)):
                request = step.request_ids[i]
                assert step.aux_hidden_states is not None
                if step.fresh[i] == step.lengths[i]:
                    self.shown[request] = 0
                self.shown[request] += len(step.aux_hidden_states[i])
                verified = None if step.verified is None else step.verified[i]
                guessed = verified is not None and len(verified) > 0
                shown = {
                    "tokens": step.tokens(i).tolist(),
                    "fresh": int(step.fresh[i]),
                    "prompt": int(step.prompt_lengths[i]),
                    "room": [int(step.budgets[i]), int(step.depths[i])],
                    "temperature": None if step.sampling is None else float(step.sampling.temperature[i]),
                    "verified": listed(verified) if guessed else None,
                    "predictions": None
                    if step.predictions is None or not guessed
                    else step.predictions[i].tolist(),
                    "complete": bool(self.shown[request] == step.lengths[i] - 1),
                    "last layer": newest(step.hidden_states, i),
                    "layers": newest(step.aux_hidden_states, i),
                    "drafts": {name: listed(d[i]) for name, d in drafts.items()},
                }
                log.write(json.dumps(shown) + "\n")
        return drafts[VERIFIED]

    def finish(self, request_id: str) -> None:
        for part in self.parts.values():
            part.finish(request_id)
