"""The embedded engine against transformers' own prompt lookup."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.case import Context, Result, case, spread
from spec_plugins.adapters.transformers import Engine, SamplingParams, load_model, speculate
from spec_plugins.evaluation.prompts import humaneval, interleaved, mtbench

K = 4
TOKENS = 96


def compare(context: Context, dtype: str) -> Result:
    """Every way on every prompt, in turn."""
    model, tokenizer = load_model(context.model, dtype=dtype)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)
    params = SamplingParams(max_new_tokens=TOKENS)
    spec = {"proposer": "ngram", "num_speculative_tokens": K}
    hooked = speculate(spec)

    def ours(spec: Any) -> Callable[[Any], list[int]]:
        engine = Engine(model, tokenizer, spec, max_num_seqs=1)
        return lambda ids: engine.generate([ids[0].tolist()], params)[0].token_ids

    def theirs(**settings: Any) -> Callable[[Any], list[int]]:
        def run(ids: Any) -> list[int]:
            out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, **settings)
            return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

        return run

    ways = {
        "transformers, plain": theirs(),
        "embedded engine, plain": ours(None),
        f"transformers, prompt_lookup_num_tokens={K}": theirs(prompt_lookup_num_tokens=K),
        f"embedded engine, ngram, {K} tokens": ours(spec),
        f"generate(custom_generate=…), ngram, {K} tokens": theirs(custom_generate=hooked),
    }
    per_set = 1 if context.quick else 6
    chosen = interleaved(humaneval(context.data)[:per_set], mtbench(context.data)[:per_set])
    prompts = [
        tokenizer.apply_chat_template(
            list(p.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for p in chosen
    ]
    for way in ways.values():
        way(prompts[0][:, :8])
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[int]] = {name: [] for name in names}
    answers: dict[str, list[list[int]]] = {name: [] for name in names}
    for i, ids in enumerate(prompts):
        context.say(f"prompt {i + 1} of {len(prompts)}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            forwards, started = 0, time.perf_counter()
            answers[name].append(ways[name](ids))
            seconds[name].append(time.perf_counter() - started)
            steps[name].append(forwards)
    result = Result(
        [
            "way",
            "tokens/forward HumanEval",
            "MT-bench",
            "tokens/s",
            "speed over transformers plain",
            "over prompt lookup",
            "same output",
        ]
    )
    plain, lookup = names[0], names[2]
    for name in names:
        rate = [
            (sum(len(a) for a in answers[name][s::2]) - len(answers[name][s::2]))
            / (sum(steps[name][s::2]) - len(steps[name][s::2]))
            for s in (0, 1)
        ]
        tokens = sum(map(len, answers[name]))
        result.rows.append(
            [
                name,
                f"{rate[0]:.2f}",
                f"{rate[1]:.2f}",
                f"{tokens / sum(seconds[name]):.1f}",
                spread([a / b for a, b in zip(seconds[plain], seconds[name], strict=True)]),
                spread([a / b for a, b in zip(seconds[lookup], seconds[name], strict=True)]),
                f"{sum(a == b for a, b in zip(answers[plain], answers[name], strict=True))}/{len(prompts)}",
            ]
        )
    result.notes.append(
        f"{context.model.name}, {dtype}, concurrency 1, {TOKENS} new tokens, {len(prompts)} prompts "
        f"(HumanEval and MT-bench), median and quartiles over prompts; median prompt "
        f"{statistics.median(p.shape[1] for p in prompts):.0f} tokens."
    )
    return result


@case("prompt-lookup")
def prompt_lookup(context: Context) -> Result:
    """`ngram` against transformers' `prompt_lookup_num_tokens`, float32, the same prompts in turn."""
    return compare(context, "float32")


@case("prompt-lookup-bf16")
def prompt_lookup_bf16(context: Context) -> Result:
    """The same in bfloat16, where rounding may change a greedy answer."""
    return compare(context, "bfloat16")
