"""How fast recorded responses are replayed, on one core."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case, spread
from benchmarks.proposal_cost import source_tokens
from spec_plugins.config import load_config
from spec_plugins.evaluation.recorded import Recorded, bring_together
from spec_plugins.evaluation.replay import replay
from spec_plugins.evaluation.replay_target import ReplayTarget
from spec_plugins.proposer import Need
from spec_plugins.traffic.conversations import Conversation

PROMPT, RESPONSE = 256, 256
CONCURRENCIES = (1, 8, 32, 128)
PROPOSERS: dict[str, tuple[dict[str, Any], frozenset[Need]]] = {
    "ngram": ({"proposer": "ngram"}, frozenset()),
    "suffix, chains": ({"proposer": "suffix"}, frozenset()),
    "suffix, chains, no cache": ({"proposer": "suffix", "options": {"cache_tokens": 0}}, frozenset()),
    "suffix, trees of 16": ({"proposer": "suffix", "max_draft_nodes": 16}, frozenset({Need.TREES})),
}


def texts(context: Context) -> Recorded:
    """Python's own library, in prompts and responses."""
    stream = source_tokens(context, 40_000 if context.quick else 800_000)
    size = PROMPT + RESPONSE
    answered = np.arange(size) >= PROMPT
    pieces = stream[: len(stream) // size * size].reshape(-1, size)
    return bring_together([Conversation(piece, answered) for piece in pieces])


@case("replay")
def replay_speed(context: Context) -> Result:
    """Response tokens replayed a second, every position drafted for with 8 tokens (median, quartiles)."""
    target = ReplayTarget(vocab_size=49_152, max_model_len=8192)
    recorded = texts(context)
    result = Result(["proposer", *(f"{c} at once" for c in CONCURRENCIES), "tokens a forward (32)"])
    for name, (spec, provides) in PROPOSERS.items():
        config, cells, length = load_config(spec), [], 0.0
        for at_once in CONCURRENCIES:
            context.say(f"{name}, {at_once} at once")
            speeds = []
            for _ in range(1 if context.quick else 3):
                done = replay(recorded, config, target, concurrency=at_once, provides=provides)
                speeds.append(done.positions_per_second)
            cells.append(spread(speeds, 0))
            if at_once == 32:
                counts = done.counts()
                length = 1 + counts.accepted_tokens.sum() / counts.steps.sum()
        result.rows.append([name, *cells, f"{length:.2f}"])
    result.notes.append(
        f"{len(recorded)} texts of {PROMPT} and {RESPONSE} tokens from Python's own library; tokenization "
        "and compilation excluded. One thread. Where requests share nothing, 128 go side by side whatever is "
        "asked for."
    )
    return result
