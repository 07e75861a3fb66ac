"""The proposers inside `vllm serve`, against no speculation and against vLLM's own methods."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Context, Result, case, spread, together
from benchmarks.server import Block, Environment, Server, Speculated, environment
from benchmarks.vllm_server import VllmServer, model_dtype, plug_in
from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench

__all__ = ["cut", "encoder"]

NONE = "none"
TOKENS = 64
CONTEXT = 2048
PROMPT_TOKENS = {"HumanEval": CONTEXT - TOKENS, "agent": 512}
"""The longest prompt. Agents' would fill the context, and prefill would be most of what is timed."""
REQUESTS = {1: 3, 4: 8, 16: 16}
"""How many requests a block has, by concurrency. All rounds together take 162 of HumanEval's 164."""
ROUNDS = 6
MINUTES = 20.0
"""No round begins that would likely end later than this after the first began."""
NGRAM_K, SUFFIX_K = 5, 8

Encode = Callable[[Sequence[Mapping[str, str]]], list[int]]
"""The tokens of a conversation, ready for an answer."""


@dataclass(frozen=True)
class Variant:
    """One server's settings."""

    name: str
    settings: list[str]
    against: str | None = None
    """Which of vLLM's own methods does the same."""


def cut(messages: Sequence[Mapping[str, str]], encode: Encode, limit: int) -> list[int]:
    """The tokens of the newest messages that fit ``limit``; the newest alone keeps its end."""
    role, text = messages[-1]["role"], messages[-1]["content"]
    text = text[-16 * limit :]  # so that no more is encoded than could ever fit
    while len(tokens := encode([{"role": role, "content": text}])) > limit:
        if not text:
            raise ValueError(f"an empty message is {len(tokens)} tokens, more than {limit}")
        text = text[len(text) * (len(tokens) - limit) // len(tokens) + 1 :]
    chosen: list[Mapping[str, str]] = [{"role": role, "content": text}]
    for message in reversed(messages[:-1]):
        if len(message["content"]) > 16 * limit:
            break
        chosen.insert(0, message)
        longer = encode(chosen)
        if len(longer) > limit:
            break
        if message["role"] == "user":  # a conversation that begins with an answer is none
            tokens = longer
    return tokens


def encoder(model: Path) -> Encode:
    """Puts conversations through the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def encode(messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    return encode


def variants(env: Environment) -> tuple[list[Variant], list[str]]:
    """What to compare, and what had to be left out."""
    ngram = {"method": "ngram", "num_speculative_tokens": NGRAM_K, "prompt_lookup_max": 4}
    suffix = {"method": "suffix", "num_speculative_tokens": SUFFIX_K}
    chosen = [
        Variant(NONE, []),
        Variant("vLLM ngram", ["--speculative-config", json.dumps({**ngram, "prompt_lookup_min": 2})]),
    ]
    left_out = []
    ours = "spec_plugins.adapters.vllm" in env.modules
    if ours:
        chosen.append(
            Variant("plug-in ngram", plug_in("ngram", NGRAM_K, min_ngram=2, max_ngram=4), "vLLM ngram")
        )
    else:
        left_out.append("the plug-ins, since spec_plugins.adapters.vllm is not in vLLM's environment")
    if "arctic_inference" in env.modules:
        chosen.append(Variant("vLLM suffix", ["--speculative-config", json.dumps(suffix)]))
    else:
        left_out.append("vLLM's suffix, since arctic_inference is not in vLLM's environment")
    if ours:
        # A draft no longer than the match, as vLLM's; the project's own default is four times that.
        chosen.append(
            Variant("plug-in suffix", plug_in("suffix", SUFFIX_K, length_factor=1.0), "vLLM suffix")
        )
    if only := os.environ.get("SPEC_PLUGINS_VARIANTS"):
        chosen = [v for v in chosen if v.name == NONE or v.name in only.split(",")]
        left_out.append(f"what SPEC_PLUGINS_VARIANTS does not name: {only}")
    return chosen, left_out


def ratios(ours: Sequence[Block], theirs: Sequence[Block]) -> list[float]:
    """How much faster each block was."""
    pairs = zip(ours, theirs, strict=True)
    return [a.tokens_per_second / b.tokens_per_second for a, b in pairs]


def measured(
    blocks: Mapping[str, Sequence[Block]], against: Mapping[str, str | None]
) -> Iterator[tuple[str, list[str]]]:
    """Each variant's cells, from its blocks by round: rates, ratios within rounds, acceptance, answers."""

    def ratio(name: str, other: str | None) -> str:
        if other is None or other not in blocks or name == other:
            return ""
        return spread(ratios(blocks[name], blocks[other]))

    plain = [answer.token_ids for block in blocks[NONE] for answer in block.answers]
    for name, ran in blocks.items():
        seen = sum((block.speculated for block in ran), Speculated())
        answers = [answer.token_ids for block in ran for answer in block.answers]
        same = sum(a == b for a, b in zip(answers, plain, strict=True))
        yield (
            name,
            [
                spread([block.tokens_per_second for block in ran], 1),
                ratio(name, NONE),
                ratio(name, against.get(name)),
                f"{seen.acceptance_length:.2f}" if seen.drafts else "",
                f"{seen.tokens_per_step:.2f}",
                " ".join(f"{n / seen.drafts:.2f}".removeprefix("0") for n in seen.by_position[:4])
                if seen.drafts
                else "",
                f"{seen.propose_seconds / sum(block.seconds for block in ran):.1%}"
                if seen.propose_seconds
                else "",
                "" if name == NONE else f"{same}/{len(plain)}",
            ],
        )


def idle_share(servers: Mapping[str, Server], seconds: float = 5.0) -> float:
    """How many processors the servers keep busy together while they have nothing to do."""
    before = sum(server.processor_seconds() for server in servers.values())
    started = time.monotonic()
    time.sleep(seconds)
    used = sum(server.processor_seconds() for server in servers.values()) - before
    return used / (time.monotonic() - started)


@dataclass(frozen=True)
class Plan:
    """What is asked of every server, and how often."""

    prompts: Mapping[str, Sequence[Sequence[int]]]
    """By a name, enough for all rounds."""
    warm: Sequence[Sequence[int]]
    requests: Mapping[int, int]
    """How many a block has, by concurrency."""
    rounds: int
    new_tokens: int
    minutes: float


def settings(dtype: str, concurrency: int) -> list[str]:
    """The flags that every server gets. Prefix caching is off, so that all prefill alike."""
    flags = ["--dtype", dtype, "--enforce-eager", "--max-model-len", str(CONTEXT)]
    return [*flags, "--max-num-seqs", str(concurrency), "--no-enable-prefix-caching"]


def serve(context: Context, env: Environment, chosen: Sequence[Variant], dtype: str, plan: Plan) -> Result:
    """Start a server for each variant, ask all of them in turn, and put what came of it in a table."""
    requests, chosen = plan.requests, list(chosen)
    ran: dict[tuple[str, int], dict[str, list[Block]]] = {
        (name, c): {v.name: [] for v in chosen} for name in plan.prompts for c in requests
    }
    done = blocks = 0
    with contextlib.ExitStack() as stack:
        servers = {}
        for variant in chosen:
            context.say(f"starting vllm serve, {variant.name}")
            flags = [*settings(dtype, max(requests)), *variant.settings]
            servers[variant.name] = stack.enter_context(VllmServer(variant.name, env, context.model, flags))
        for name, server in servers.items():
            context.say(f"warming up {name}")
            server.block(plan.warm, 8 if context.quick else 24, max(requests))
        context.say("idle")
        idle = idle_share(servers)
        started = time.monotonic()
        for r in range(plan.rounds):
            used = time.monotonic() - started
            if r and used * (r + 1) / r > 60 * plan.minutes:
                break
            taken = dict.fromkeys(plan.prompts, r * sum(requests.values()))
            for name, concurrency in ran:
                some = plan.prompts[name][taken[name] : taken[name] + requests[concurrency]]
                taken[name] += requests[concurrency]
                for variant in chosen[blocks % len(chosen) :] + chosen[: blocks % len(chosen)]:
                    context.say(
                        f"round {r + 1} of {plan.rounds}: {name}, concurrency {concurrency}, {variant.name}"
                    )
                    block = servers[variant.name].block(some, plan.new_tokens, concurrency)
                    ran[name, concurrency][variant.name].append(block)
                blocks += 1
            done += 1
        minutes = (time.monotonic() - started) / 60

    result = Result(
        [
            "prompts", "at once", "variant", "tokens/s", "over none", "over vLLM's own",
            "acceptance length", "tokens/step", "accepted at 1–4", "proposing", "same as none",
        ],
        about={**env.about, "engine_dtype": dtype},
    )  # fmt: skip
    against = {v.name: v.against for v in chosen}
    for (name, concurrency), by_variant in ran.items():
        result.rows += [[name, concurrency, v, *cells] for v, cells in measured(by_variant, against)]
    for one in chosen:
        if one.against in against:
            every = [r for by in ran.values() for r in ratios(by[one.name], by[one.against])]
            result.notes.append(
                f"{one.name} over {one.against}, all {len(every)} blocks: {together(every)}, geometric mean "
                "with its 95% bootstrap interval."
            )
    used_prompts = {name: tokens[: done * sum(requests.values())] for name, tokens in plan.prompts.items()}
    lengths = ", ".join(f"{n} {statistics.median(map(len, t)):.0f}" for n, t in used_prompts.items())
    result.notes += [
        f"{context.model.name}, {dtype}, eager, greedy, {plan.new_tokens} new tokens a request whatever it "
        f"says; median prompt tokens: {lengths}. Rounds: {done}, in {minutes:.0f} minutes; median and "
        "quartiles over rounds, of the ratios too, which are within a round. Every variant gets a round's "
        "prompts, in a rotating order, and each round has others.",
        "The seconds are a block's, prefill and its last, thinner batches included. Prefix caching is off, "
        "so that all variants prefill alike. vLLM schedules asynchronously without speculation only.",
        "Acceptance length is vLLM's: over steps with a draft, as is the share of drafts accepted up to a "
        "position. tokens/step is over all steps of a request. Proposing is the share of the time that was "
        "spent in this project's proposer.",
        f"All {len(chosen)} servers were up all the time; idle, they kept {idle:.2f} of a processor busy "
        "together.",
    ]
    if dtype != "float32":
        result.notes.append(
            "In bfloat16 rounding depends on how many tokens are verified, and may change answers."
        )
    return result


@case("vllm-serving", needs="vllm")
def vllm_serving(context: Context) -> Result:
    """Output tokens/s of `vllm serve`: the plug-ins, vLLM's own methods and no speculation, in turn."""
    env = environment("vllm", "spec_plugins.adapters.vllm", "arctic_inference")
    chosen, left_out = variants(env)
    if context.quick:
        chosen = [v for v in chosen if "suffix" not in v.name]
        left_out.append("suffix, since this run is quick")
    rounds, new_tokens = (1, 32) if context.quick else (ROUNDS, TOKENS)
    requests = {1: 1, 4: 4} if context.quick else REQUESTS
    context.say("preparing the prompts")
    encode = encoder(context.model)
    need = rounds * sum(requests.values())
    prompts = {
        name: [cut(p.messages, encode, PROMPT_TOKENS[name]) for p in source[:need]]
        for name, source in (("HumanEval", humaneval(context.data)), ("agent", agent_replays(context.data)))
    }
    warm = [cut(p.messages, encode, 256) for p in mtbench(context.data)[: 2 if context.quick else 16]]
    plan = Plan(prompts, warm, requests, rounds, new_tokens, MINUTES)
    result = serve(context, env, chosen, model_dtype(), plan)
    result.notes.append(f"ngram: K={NGRAM_K}, n-grams of 2 to 4; suffix: K={SUFFIX_K}.")
    if left_out:
        result.notes.append(f"Left out: {'; '.join(left_out)}.")
    return result
