"""Nothing is compiled while an engine waits: all of it is when a driver is made."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from spec_plugins import Need, Packed, Target
from spec_plugins.driver import Driver
from spec_plugins.registry import registry

SPECS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {},
    "lookahead": {},
    "combine": {"proposers": ["suffix", "lookahead"], "mode": "merged"},
}


def compiled() -> dict[str, int]:
    """How many versions of each compiled function of this project there are."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("spec_plugins"):
            for attribute, value in vars(module).items():
                if isinstance(value, Dispatcher):
                    found[f"{name}:{attribute}"] = len(value.signatures)
    return found


@pytest.mark.parametrize("provides", [
    frozenset(c) for n in range(3) for c in itertools.combinations((Need.TREES, Need.PREDICTIONS), n)
])  # fmt: skip
@pytest.mark.parametrize("name", SPECS)
def test_a_step_compiles_nothing(name: str, provides: frozenset[Need]) -> None:
    driver = Driver(
        registry().create(name, SPECS[name]),
        Target(100, 512, 4, provides, num_speculative_tokens=6, max_draft_nodes=24),
    )
    before = compiled()
    assert before
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6, (4, 400)).astype(np.int32)
    ids = [f"r{i}" for i in range(4)]
    lengths = np.array([30, 1, 90, 7], np.int32)
    counts = np.zeros(4, np.int32)
    for _ in range(12):
        predictions = Packed(
            rng.integers(0, 6, int((counts + 1).sum())).astype(np.int32),
            np.concatenate([[0], np.cumsum(counts + 1)]).astype(np.int32),
        )
        drafts = driver.propose(
            ids, tokens, np.arange(4, dtype=np.int32), lengths,
            predictions=predictions if Need.PREDICTIONS in provides else None,
        )  # fmt: skip
        counts = drafts.counts.copy()
        driver.observe(ids, np.zeros(4, np.int32), np.full((4, 6), -1, np.int32))
        lengths = lengths + 1
    driver.propose([], tokens, lengths[:0], lengths[:0])
    assert compiled() == before
