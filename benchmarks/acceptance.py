"""How many tokens a forward each proposer gives, replayed over texts that the model wrote once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case
from spec_plugins.adapters.transformers import Engine, SamplingParams, load_model
from spec_plugins.config import Config
from spec_plugins.driver import Driver
from spec_plugins.evaluation.prompts import humaneval, mtbench
from spec_plugins.proposer import Need, Target
from spec_plugins.registry import registry

TOKENS = 96
Text = tuple[list[int], int]
"""Prompt and answer, and how long the prompt is."""


def replay(texts: Sequence[Text], name: str, options: dict[str, Any], k: int, nodes: int) -> float:
    """Tokens a forward, greedy: a draft token is accepted where the text goes on with it."""
    provides = frozenset({Need.TREES} if nodes > k else set())
    target = Target(1 << 20, 1 << 20, 1, provides, num_speculative_tokens=k, max_draft_nodes=nodes)
    driver = Driver(
        registry().create(name, options), target, Config(num_speculative_tokens=k, max_draft_nodes=nodes)
    )
    row = np.zeros(1, np.int32)
    for i, (tokens, prompt) in enumerate(texts):
        token_ids = np.array([tokens], np.int32)
        n = prompt + 1
        while n < len(tokens):
            draft = driver.propose(
                [f"text {i}"], token_ids, row, np.array([n], np.int32),
                limits=np.array([len(tokens) - n - 1], np.int32), prompt_lengths=np.array([prompt], np.int32),
            )[0]  # fmt: skip
            parents = draft.parents if draft.parents is not None else np.arange(-1, len(draft) - 1)
            path: list[int] = []
            for j in range(len(draft)):
                if parents[j] == (path[-1] if path else -1) and draft.tokens[j] == tokens[n + len(path)]:
                    path.append(j)
            driver.observe([f"text {i}"], np.array([len(path)], np.int32), np.array([path], np.int32))
            n += len(path) + 1
    return driver.statistics.acceptance_length


def prompt_lookup_rule(texts: Sequence[Text], k: int) -> float:
    """transformers' rule, by its defaults: the longest n-gram of 2 or 1 tokens, the earliest place."""
    given = forwards = 0
    for tokens, prompt in texts:
        n = prompt + 1
        while n < len(tokens):
            starts = (s + g for g in (2, 1) for s in range(n - g) if tokens[s : s + g] == tokens[n - g : n])
            start = next(starts, n)
            draft = tokens[start : min(n, start + k)]
            accepted = 0
            while accepted < min(len(draft), len(tokens) - n - 1) and draft[accepted] == tokens[n + accepted]:
                accepted += 1
            n += accepted + 1
            given += accepted + 1
            forwards += 1
    return given / forwards


@case("acceptance")
def acceptance(context: Context) -> Result:
    """Tokens a forward on the model's own answers, replayed; greedy, float32."""
    model, tokenizer = load_model(context.model, dtype="float32")
    count = 4 if context.quick else 24
    sets = {"HumanEval": humaneval(context.data)[:count], "MT-bench": mtbench(context.data)[:count]}
    engine = Engine(model, tokenizer, max_num_seqs=12)
    texts: dict[str, list[Text]] = {}
    for name, prompts in sets.items():
        context.say(f"answering {count} prompts of {name}")
        answers = engine.generate([list(p.messages) for p in prompts], SamplingParams(max_new_tokens=TOKENS))
        texts[name] = [(a.prompt_token_ids + a.token_ids, len(a.prompt_token_ids)) for a in answers]
    ways: dict[str, Callable[[list[Text]], float]] = {
        "transformers' prompt lookup rule, 4 tokens": lambda t: prompt_lookup_rule(t, 4),
        "ngram, 4 tokens": lambda t: replay(t, "ngram", {}, 4, 4),
        "ngram, 4 tokens, most frequent": lambda t: replay(t, "ngram", {"prefer": "most_frequent"}, 4, 4),
        "transformers' prompt lookup rule, 10 tokens": lambda t: prompt_lookup_rule(t, 10),
        "ngram, 10 tokens": lambda t: replay(t, "ngram", {}, 10, 10),
        "suffix, chain of 4": lambda t: replay(t, "suffix", {}, 4, 4),
        "suffix, chain of 8": lambda t: replay(t, "suffix", {}, 8, 8),
        "suffix, tree of 8 tokens, 7 deep": lambda t: replay(t, "suffix", {}, 7, 8),
        "suffix, tree of 16 tokens, 8 deep": lambda t: replay(t, "suffix", {}, 8, 16),
        "suffix, chain of 8, no cache": lambda t: replay(t, "suffix", {"cache_tokens": 0}, 8, 8),
    }
    result = Result(["proposer", *texts])
    for way, measure in ways.items():
        context.say(way)
        result.rows.append([way, *(f"{measure(t):.2f}" for t in texts.values())])
    result.notes.append(
        f"{context.model.name}, float32, {count} prompts each, {TOKENS} new tokens. `suffix` sees the "
        "answers in turn and keeps them in its cache, as a server would. Lookahead needs the target's "
        "predictions, which a text does not hold."
    )
    return result
