"""Suffix trees inside SGLang, beside SGLang's own n-gram trees of as many nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.case import Context, Result, case
from benchmarks.server import environment
from benchmarks.sglang_server import STAND_INS, SglangServer, algorithm
from benchmarks.vllm_server import model_dtype
from benchmarks.vllm_serving import CONTEXT, cut, encoder
from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench

__all__ = ["Seen"]

WIDTH = 12
"""Nodes that are verified in a step, the last committed token included: the default of SGLang's NGRAM."""
DEPTH = 8
PROMPTS, TOKENS, CONCURRENCY = 24, 96, 4
AGENT_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Seen:
    """What one server made of a set of prompts."""

    answers: Sequence[Sequence[int]]
    steps: int
    """In which a request was verified, over all requests."""
    drafted: int
    """Draft tokens verified."""

    @classmethod
    def of(cls, told: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> Seen:
        """Out of answers and SGLang's ``meta_info`` of each."""
        return cls(
            [tokens for tokens, _ in told],
            sum(meta["spec_verify_ct"] for _, meta in told),
            sum(meta["spec_num_proposed_drafts"] for _, meta in told),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens a step; the first of a request is the prefill's."""
        return sum(len(tokens) - 1 for tokens in self.answers) / self.steps

    @property
    def nodes(self) -> float:
        """Verified a step, the last committed token included."""
        return 1 + self.drafted / self.steps


@case("sglang-acceptance", needs="sglang")
def sglang_acceptance(context: Context) -> Result:
    """Acceptance length inside SGLang: `suffix` trees, and NGRAM's with the same number of nodes."""
    env = environment("sglang", "spec_plugins.adapters.sglang", STAND_INS)
    count, new_tokens = (3, 24) if context.quick else (PROMPTS, TOKENS)
    dtype = model_dtype()
    context.say("preparing the prompts")
    encode = encoder(context.model)
    sets = {"HumanEval": humaneval, "MT-bench": mtbench, "agent": agent_replays}
    prompts = {
        name: [cut(p.messages, encode, AGENT_PROMPT_TOKENS) for p in source(context.data)[:count]]
        for name, source in sets.items()
    }
    settings = ["--dtype", dtype, "--context-length", str(CONTEXT)]
    settings += ["--max-running-requests", str(CONCURRENCY), "--max-total-tokens", str(CONCURRENCY * CONTEXT)]
    ngram = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(WIDTH)]
    variants: dict[str, tuple[list[str], dict[str, str]]] = {
        "SGLang NGRAM": (ngram, {}),
        "plug-in suffix": algorithm("suffix", DEPTH, WIDTH - 1),
        "plug-in suffix, chains": algorithm("suffix", WIDTH - 1, WIDTH - 1, tree=False),
    }
    cores = sorted(os.sched_getaffinity(0))
    seen: dict[tuple[str, str], Seen] = {}
    # As many at a time as there are processors: nothing is timed.
    waiting = list(variants)
    while waiting:
        some, waiting = waiting[: len(cores)], waiting[len(cores) :]
        with contextlib.ExitStack() as stack:
            pools: dict[str, tuple[SglangServer, ThreadPoolExecutor]] = {}
            for core, name in zip(cores, some, strict=False):
                context.say(f"starting {name}")
                flags, extra = variants[name]
                server = SglangServer(name, env, context.model, [*settings, *flags], extra, [core])
                stack.enter_context(server)
                pools[name] = server, stack.enter_context(ThreadPoolExecutor(CONCURRENCY))
            for kind, texts in prompts.items():
                context.say(f"{', '.join(some)}: {kind}")
                asked: dict[str, list[Future[Any]]] = {
                    name: [pool.submit(server.generate, text, new_tokens) for text in texts]
                    for name, (server, pool) in pools.items()
                }
                for name, futures in asked.items():
                    answers = [future.result() for future in futures]
                    seen[name, kind] = Seen.of([(a.token_ids, meta) for a, meta in answers])

    result = Result(
        ["prompts", "variant", "acceptance length", "over NGRAM's", "nodes verified a step", "same answers"],
        about={**env.about, "engine_dtype": dtype},
    )
    for kind in prompts:
        own = seen["SGLang NGRAM", kind]
        for name in variants:
            one = seen[name, kind]
            same = sum(a == b for a, b in zip(one.answers, own.answers, strict=True))
            result.rows.append([
                kind, name, f"{one.acceptance_length:.2f}",
                "" if one is own else f"{one.acceptance_length / own.acceptance_length:.2f}",
                f"{one.nodes:.1f}", f"{same}/{len(own.answers)}",
            ])  # fmt: skip
    result.notes += [
        f"{context.model.name}, {dtype}, greedy, {count} prompts each, {new_tokens} new tokens whatever it "
        f"says, {CONCURRENCY} at once; both draft from earlier answers too. At most {WIDTH} nodes are "
        "verified a step, the last committed token included, which is NGRAM's default and what it always "
        f"takes; a suffix tree is at most {DEPTH} deep and may have fewer.",
        "Acceptance length: tokens a step, over all steps of a request.",
    ]
    return result
