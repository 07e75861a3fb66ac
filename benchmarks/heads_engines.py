"""Trained proposers in vLLM and in SGLang, beside the replay of the same answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Context, Result, case
from benchmarks.heads_acceptance import PROMPT_TOKENS, recorded_answers, replayed
from benchmarks.server import Environment, Server, Speculated, environment
from benchmarks.sglang_server import STAND_INS, SglangServer, algorithm
from benchmarks.vllm_heads import heads
from benchmarks.vllm_server import VllmServer, plug_in
from benchmarks.vllm_serving import settings
from spec_plugins.evaluation.replay_target import ReplayTarget

PROMPTS, TOKENS, CONCURRENCY = 4, 48, 4
METHODS = {"draft": ("draft_model", 3), "medusa": ("medusa", 4), "eagle3": ("eagle3", 3)}
"""The method of each of the example's folders, and how many tokens it drafts."""


@dataclass(frozen=True)
class Row:
    """What one engine made of one set of prompts."""

    acceptance_length: float
    at_positions: Sequence[float]
    answers: Sequence[Sequence[int]]


def vllm_server(env: Environment, model: Path, method: str, k: int, folder: Path, core: int) -> Server:
    """With prefix caching off, as all here: a head sees no states of what is cached."""
    flags = [*settings("float32", CONCURRENCY), *plug_in(method, k, model=str(folder))]
    return VllmServer(f"vLLM {method}", env, model, flags, cores=[core])


def sglang_server(env: Environment, model: Path, method: str, k: int, folder: Path, core: int) -> Server:
    """Drafts are chains, as vLLM's."""
    flags, extra = algorithm(method, k, model=str(folder))
    flags += ["--dtype", "float32", "--context-length", "2048", "--disable-radix-cache"]
    flags += ["--max-running-requests", str(CONCURRENCY), "--max-total-tokens", str(2048 * CONCURRENCY)]
    return SglangServer(f"SGLang {method}", env, model, flags, extra, [core])


def asked(server: Server, sets: Mapping[str, Sequence[Sequence[int]]], tokens: int) -> Iterator[Row]:
    """What a server answers to each set."""
    with server:
        for prompts in sets.values():
            block = server.block(prompts, tokens, CONCURRENCY)
            found: Speculated = block.speculated
            shares = [n / found.drafts for n in found.by_position[:4]]
            yield Row(found.acceptance_length, shares, [a.token_ids for a in block.answers])


@case("heads-engines", needs="vllm")
def heads_engines(context: Context) -> Result:
    """Acceptance by position of trained proposers: replayed, inside vLLM, and inside SGLang."""
    engines: dict[str, tuple[Environment, Callable[..., Server]]] = {
        "vLLM": (environment("vllm", "spec_plugins.adapters.vllm"), vllm_server),
        "SGLang": (environment("sglang", "spec_plugins.adapters.sglang", STAND_INS), sglang_server),
    }
    folder = heads()
    methods = {name: m for name, m in METHODS.items() if (folder / name).is_dir()}
    count, tokens = (2, 16) if context.quick else (PROMPTS, TOKENS)
    target = ReplayTarget.open(context.model, dtype="float32")
    texts = recorded_answers(context, target, count, tokens)
    sets = {
        name: [recorded.conversation(i)[:-tokens].tolist() for i in range(count)]
        for name, recorded in texts.items()
    }
    cores = sorted(os.sched_getaffinity(0))

    def in_engine(number: int, engine: str) -> dict[str, list[Row]]:
        env, server = engines[engine]
        found = {}
        for name, (method, k) in methods.items():
            context.say(f"{engine}, {name}")
            one = server(env, context.model, method, k, folder / name, cores[number % len(cores)])
            found[name] = list(asked(one, sets, tokens))
        return found

    # Side by side, since nothing is timed.
    with ThreadPoolExecutor(len(cores)) as pool:
        served = dict(zip(engines, pool.map(in_engine, range(len(engines)), engines), strict=True))
    result = Result(
        ["prompts", "proposer", "where", "acceptance length", "at 1–4", "same answers"],
        about={key: value for env, _ in engines.values() for key, value in env.about.items()},
    )
    for i, (kind, recorded) in enumerate(texts.items()):
        answers = [recorded.conversation(j)[-tokens:].tolist() for j in range(count)]
        for name, (method, k) in methods.items():
            context.say(f"replaying {name}, {kind}")
            fields = {
                "proposer": method, "num_speculative_tokens": k, "options": {"model": str(folder / name)},
            }  # fmt: skip
            counts = replayed(recorded, fields, target)
            drafts = int(counts.drafted[:, 0].sum())
            shares = (counts.accepted.sum(0)[:4] / drafts).tolist()
            rows = {
                "replay": Row(1 + counts.accepted_tokens.sum() / drafts, shares, answers),
                **{engine: found[name][i] for engine, found in served.items()},
            }
            for where, row in rows.items():
                same = sum(a == b for a, b in zip(row.answers, answers, strict=True))
                result.rows.append([
                    kind, f"{method}, {k}", where, f"{row.acceptance_length:.2f}",
                    " ".join(f"{share:.2f}".removeprefix("0") for share in row.at_positions),
                    f"{same}/{len(answers)}",
                ])  # fmt: skip
    result.notes.append(
        f"{context.model.name}, float32, greedy, {count} prompts each of at most {PROMPT_TOKENS} tokens, "
        f"{tokens} new ones, {CONCURRENCY} at once, chains. Acceptance length: over the steps with a draft; "
        "at 1–4: of them, the share accepted up to that position. Replayed over the embedded engine's "
        "answers."
    )
    return result
