"""Greedy output is that of the same engine without speculation, whatever the engine is asked to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from offline import drafter_of, statistics_of
from tiny_heads import begun_head
from workloads import WORKLOADS

# How the engine is set up. Preemption: room for three requests of up to 256 tokens or so, not for four.
GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 4},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
    "starved": {"max_num_seqs": 8, "num_gpu_blocks_override": 13},
}
PROPOSERS: dict[str, dict[str, Any]] = {
    "suffix": {},
    "ngram": {},
    "lookahead": {},
    "combine": {"proposers": ["suffix", {"name": "eagle3", "options": {}}], "min_tokens": 2},
}
"""The head's folder is set below."""
CASES = [("roomy", p) for p in PROPOSERS] + [("chunked", "suffix"), ("starved", "suffix")]
ON_BOTH_VERSIONS = [("roomy", "suffix"), ("roomy", "combine")]
"""What is run on vLLM's second version too: all workloads, and a head's hidden states."""
SOME = ("moving_rows", "long_prompts", "grammars", "mixed_sampling")
"""What proposers other than ``suffix`` are asked to do."""


def case(settings: str, proposer: str, *name: str) -> Any:
    """A test's parameters, marked where it runs on both versions."""
    both = (settings, proposer) in ON_BOTH_VERSIONS
    return pytest.param(settings, proposer, *name, marks=[pytest.mark.contract] if both else [])


@dataclass
class Run:
    """One engine's answers to all workloads."""

    answers: dict[str, Any]
    """What each gave, or the exception that it raised."""
    accepted: dict[str, int]
    """Draft tokens accepted in each."""
    preemptions: dict[str, float]
    statistics: Any
    metrics: dict[str, Any]


@pytest.fixture(scope="session")
def run(
    make_engine: Any, tiny_model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """``run(settings, proposer)``: all workloads in one engine, once a session."""
    head = begun_head(tmp_path_factory.mktemp("heads") / "eagle3", "eagle3", tiny_model)
    PROPOSERS["combine"]["proposers"][1]["options"]["model"] = str(head)

    @functools.cache
    def once(settings: str, proposer: str | None) -> Run:
        options = PROPOSERS.get(proposer or "", {})
        chosen = {"structured_outputs_config": GRAMMAR, **SETTINGS[settings]}
        with make_engine(proposer, options=options, **chosen) as llm:
            return all_workloads(llm, prompts, tuple(WORKLOADS) if proposer in (None, "suffix") else SOME)

    return once


def all_workloads(llm: Any, prompts: list[list[int]], names: Sequence[str]) -> Run:
    found = Run({}, {}, {}, None, {})
    guard_steps(llm)
    for name in names:
        llm.reset_prefix_cache()
        before = counters(llm)
        accepted = statistics_of(llm).accepted_tokens if drafter_of(llm) else 0
        try:
            found.answers[name] = WORKLOADS[name](llm, prompts)
        except Exception as error:
            found.answers[name] = error
        found.preemptions[name] = counters(llm)["vllm:num_preemptions"] - before["vllm:num_preemptions"]
        if drafter_of(llm):
            found.accepted[name] = statistics_of(llm).accepted_tokens - accepted
    found.metrics = counters(llm)
    found.statistics = statistics_of(llm).snapshot() if drafter_of(llm) else None
    return found


def guard_steps(llm: Any) -> None:
    """Fail in place of a hang.

    BUG: with ``suffix``, in "roomy", ``log_probabilities`` was seen to take empty steps without end, after
    the workloads before it; alone (all prompt_logprobs, or all logprobs) it ends. Cause not found.
    """
    step, empty = llm.llm_engine.step, 0

    def guarded() -> Any:
        nonlocal empty
        answers = step()
        empty = 0 if answers else empty + 1
        if empty > 500:
            left = list(llm.llm_engine.output_processor.request_states)
            llm.llm_engine.abort_request(left, internal=True)
            empty = 0
            raise RuntimeError(f"500 steps without any output; unfinished: {left}")
        return answers

    llm.llm_engine.step = guarded


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own, by name; those with positions as lists."""
    return {m.name: getattr(m, "values", None) or getattr(m, "value", 0) for m in llm.get_metrics()}


def same(one: Any, other: Any) -> bool:
    """Equal, numbers with a fraction nearly."""
    if isinstance(one, float):
        return bool(abs(one - other) < 1e-4)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize(
    ("settings", "proposer", "name"),
    [case(s, p, name) for s, p in CASES for name in (WORKLOADS if p == "suffix" else SOME)],
)
def test_the_output_is_that_without_speculation(
    run: Callable[..., Run], settings: str, proposer: str, name: str
) -> None:
    plain, ours = run(settings, None), run(settings, proposer)
    for answer in (plain.answers[name], ours.answers[name]):
        if isinstance(answer, Exception):
            raise answer
    if name == "same_prefix_twice" and settings == "starved":
        # What was evicted before a hit depends on which requests ran at once.
        plain.answers[name][2] = ours.answers[name][2]
    assert same(plain.answers[name], ours.answers[name])
    assert ours.accepted[name] > 0


@pytest.mark.parametrize(("settings", "proposer"), [case(s, p) for s, p in CASES])
def test_nothing_was_contained(run: Callable[..., Run], settings: str, proposer: str) -> None:
    figures = run(settings, proposer).statistics
    assert figures["faults"] == {}
    assert figures["rests"] == figures["skipped_steps"] == 0


@pytest.mark.parametrize(("settings", "proposer"), [case(s, p) for s, p in CASES])
def test_vllms_counters_are_ours(run: Callable[..., Run], settings: str, proposer: str) -> None:
    """Grammars cut drafts, chunked prompts go without, and both count alike."""
    ours, metrics = run(settings, proposer).statistics, run(settings, proposer).metrics
    theirs = {
        name.removeprefix("vllm:spec_decode_num_"): v for name, v in metrics.items() if "spec_decode" in name
    }
    assert theirs["accepted_tokens"] == ours["accepted_tokens"]
    assert theirs["accepted_tokens_per_pos"] == ours["accepted_by_position"]
    # A preempted request that comes back with one token to process is padded to a draft's width, and vLLM
    # counts the padding.
    padded = theirs["drafts"] - ours["drafts"]
    assert 0 <= padded <= sum(run(settings, proposer).preemptions.values())
    assert theirs["draft_tokens"] - ours["draft_tokens"] == 6 * padded


def test_the_starved_engine_preempts(run: Callable[..., Run]) -> None:
    assert run("starved", None).preemptions["moving_rows"] > 0
    assert run("starved", "suffix").preemptions["moving_rows"] > 0
