"""Replay counts exactly what vLLM counted when it served the same requests."""

from __future__ import annotations

import numpy as np
from offline import MakeEngine, greedy, statistics_of

TOKENS, LENGTH = 48, 6


def accepted_by_vllm(llm: object) -> list[int]:
    """Accepted draft tokens at each position, by vLLM's own counters."""
    found = {m.name: m for m in llm.get_metrics()}  # type: ignore[attr-defined]
    return list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values)


def test_replay_counts_what_vllm_counted(make_engine: MakeEngine, prompts: list[list[int]]) -> None:
    options = {"cache_tokens": 0}
    with make_engine("suffix", k=LENGTH, options=options, max_num_seqs=4) as llm:
        answers = greedy(llm, prompts, TOKENS)
        figures, theirs = statistics_of(llm), accepted_by_vllm(llm)
        # numba comes with it, after vLLM
        from spec_plugins.config import load_config
        from spec_plugins.evaluation.recorded import bring_together
        from spec_plugins.evaluation.replay import replay
        from spec_plugins.evaluation.replay_target import ReplayTarget
        from spec_plugins.support import ENGINES
        from spec_plugins.traffic.conversations import Conversation

        made = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = np.array([*prompt, *answer], np.int32)
            made.append(Conversation(tokens, np.arange(len(tokens)) >= len(prompt)))
        config = load_config({"proposer": "suffix", "num_speculative_tokens": LENGTH, "options": options})
        result = replay(
            bring_together(made),
            config,
            ReplayTarget(128, 256),
            provides=ENGINES["vllm"].provides or frozenset(),
        )
        counts = result.counts()
        assert not figures.faults
        assert figures.accepted_tokens > 50
        assert counts.steps.sum() == figures.verify_steps
        assert counts.draft_tokens.sum() == figures.draft_tokens
        assert counts.drafted.sum(0).tolist() == figures.drafted_by_position.tolist()
        assert counts.accepted.sum(0).tolist() == figures.accepted_by_position.tolist() == theirs
        other = result.counts(LENGTH - 2)  # another draft length is told apart
        assert other.accepted.sum(0).tolist() != theirs
