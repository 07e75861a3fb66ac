"""Trained proposers in one engine, each drafting for the requests whose cache salt names it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_plugins import Draft, Need, Proposer, Step, Target
from spec_plugins.registry import registry

__all__ = ["HEADS", "METHODS", "Trained", "save_heads"]

HEADS = "SPEC_PLUGINS_TEST_HEADS"
"""Environment variable: a folder with one of each method's name."""
METHODS = ("medusa", "eagle", "eagle3", "draft_model")


def save_heads(folder: Path, model: Path) -> Path:
    """Heads begun from a model, and a model near it: all are right now and then."""
    import torch
    from tiny_heads import begun_head
    from transformers import AutoModelForCausalLM

    for method in METHODS[:-1]:
        begun_head(folder / method, method, model)
    near, generator = AutoModelForCausalLM.from_pretrained(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in near.parameters():
            weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    near.save_pretrained(folder / METHODS[-1])
    return folder


class Trained(Proposer):
    """Draws chains, and says from what."""

    needs = frozenset({
        Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES, Need.LM_HEAD, Need.EMBEDDINGS, Need.SAMPLING,
        Need.PROBABILITIES,
    })  # fmt: skip

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def load(self, target: Target) -> None:
        self.parts = {m: registry().create(m, {"model": str(Path(os.environ[HEADS], m))}) for m in METHODS}
        for part in self.parts.values():
            part.load(target)

    def propose(self, step: Step) -> list[Draft]:
        assert step.tenants is not None
        # SGLang's holds the salt and more.
        own = [next((m for m in METHODS if f"'{m}'" in repr(t)), "") for t in step.tenants]
        chosen = [Draft(np.empty(0, np.int32))] * len(step)
        for method, part in self.parts.items():
            budgets = np.where([m == method for m in own], step.budgets, 0).astype(step.budgets.dtype)
            drafts: Sequence[Draft] = part.propose(dataclasses.replace(step, budgets=budgets))
            for i in np.flatnonzero(budgets):
                chosen[i] = drafts[i]
        assert all(d.probs is not None for d in chosen if len(d))
        return chosen

    def finish(self, request_id: str) -> None:
        for part in self.parts.values():
            part.finish(request_id)
