"""What engines are asked to do, with and without speculation; each returns what must be equal then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from offline import ask, token_ids

Prompts = list[list[int]]
Workload = Callable[[Any, Prompts], Any]
WORKLOADS: dict[str, Workload] = {}


def workload(function: Workload) -> Workload:
    """Add to the workloads."""
    WORKLOADS[function.__name__] = function
    return function


def greedy_params(max_tokens: int = 48, **settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **settings})


@workload
def moving_rows(llm: Any, prompts: Prompts) -> Any:
    """More requests than rows, which leave at different times."""
    return token_ids(ask(llm, prompts, [greedy_params(5 + 23 * i % 60) for i in range(len(prompts))]))


@workload
def long_prompts(llm: Any, prompts: Prompts) -> Any:
    """Prompts of over 100 tokens that come while others decode."""
    mixed = [p for i, long in enumerate(prompts[-4:]) for p in (prompts[i], long * 2)]
    return token_ids(ask(llm, mixed, [greedy_params(70 if i % 2 == 0 else 30) for i in range(len(mixed))]))


@workload
def same_prefix_twice(llm: Any, prompts: Prompts) -> Any:
    """A prefix that the cache holds; returns how much of it was found too."""
    first = ask(llm, prompts[4:8], greedy_params())
    # Their answers are in the cache as well.
    again = [p + list(a.outputs[0].token_ids[:20]) for p, a in zip(prompts[4:8], first, strict=True)]
    hits = [ask(llm, [p], greedy_params(24)) for p in (*prompts[4:8], *again)]
    cached = [a.num_cached_tokens for h in hits for a in h]
    assert sum(cached) > 0
    return [token_ids(first), [token_ids(h) for h in hits], cached]


@workload
def into_the_limit(llm: Any, prompts: Prompts) -> Any:
    """Requests that run into ``max_model_len``, beside others."""
    longest = llm.llm_engine.model_config.max_model_len
    near = [(prompts[-1] * 4)[: longest - back] for back in (30, 9, 2, 1)]
    answers = ask(llm, [*near, *prompts[:4]], [*[greedy_params(500)] * 4, *[greedy_params(60)] * 4])
    assert [len(a.prompt_token_ids) + len(a.outputs[0].token_ids) for a in answers[:4]] == [longest] * 4
    assert {a.outputs[0].finish_reason for a in answers} == {"length"}
    return token_ids(answers)


@workload
def stops(llm: Any, prompts: Prompts) -> Any:
    """Stop strings and tokens, chosen where a draft may well be; min_tokens; the end of a text."""
    free = ask(llm, prompts[2:5], greedy_params(60))
    few = []
    for prompt, answer in zip(prompts[2:5], free, strict=True):
        text, ids = answer.outputs[0].text, list(answer.outputs[0].token_ids)
        few += [
            (prompt, greedy_params(60, stop=[text[30:32]])),
            (prompt, greedy_params(60, stop=[text[21:24]], include_stop_str_in_output=True)),
            (prompt, greedy_params(60, stop_token_ids=[ids[25], ids[40]])),
            (prompt, greedy_params(60, stop_token_ids=[ids[10]], min_tokens=35)),
            (prompt, greedy_params(120, ignore_eos=False)),
        ]
    stopped = ask(llm, [p for p, _ in few], [s for _, s in few])
    assert {a.outputs[0].finish_reason for a in stopped} == {"stop", "length"}
    assert all(len(a.outputs[0].token_ids) > 35 for a in stopped[3::5])
    found = [(a.outputs[0].text, a.outputs[0].finish_reason, a.outputs[0].stop_reason) for a in stopped]
    return [token_ids(stopped), found]


@workload
def several_answers(llm: Any, prompts: Prompts) -> Any:
    """``n`` answers to a prompt. Greedy ones vLLM refuses, so these can be but one: the most likely token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, top_k=1, n=3, max_tokens=40, ignore_eos=True)
    answers = ask(llm, prompts[:5], params)
    assert all(len({tuple(o.token_ids) for o in a.outputs}) == 1 for a in answers)
    assert [len(a.outputs) for a in answers] == [3] * 5
    return token_ids(answers)


@workload
def log_probabilities(llm: Any, prompts: Prompts) -> Any:
    """Those of outputs and prompts; requests with and without."""
    params = [
        greedy_params(30, logprobs=(None, 0, 3)[i % 3], prompt_logprobs=(None, 2)[i % 2]) for i in range(8)
    ]
    answers = ask(llm, prompts[:8], params)

    def plain(rows: Any) -> Any:
        return rows and [row and {t: (p.logprob, p.rank) for t, p in row.items()} for row in rows]

    return [token_ids(answers), [(plain(a.outputs[0].logprobs), plain(a.prompt_logprobs)) for a in answers]]


@workload
def grammars(llm: Any, prompts: Prompts) -> Any:
    """Structured outputs, beside free ones."""
    from vllm.sampling_params import StructuredOutputsParams as Grammar

    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["hot and hot and hot", "cold"]},
            "n": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 5, "maxItems": 8},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    }  # fmt: skip
    asked = [
        Grammar(regex=r"(ab|cd){12}x{3}y"),
        Grammar(choice=["yes and no and yes and no", "no and yes and no and yes"]),
        Grammar(json=json.dumps(schema)),
    ]
    few = [
        (p, greedy_params(180, ignore_eos=False, structured_outputs=g)) for p in prompts[:3] for g in asked
    ]
    few += [(p, greedy_params(40)) for p in prompts[4:7]]
    answers = ask(llm, [p for p, _ in few], [s for _, s in few])
    texts = [a.outputs[0].text for a in answers]
    for i in range(0, 9, 3):
        assert re.fullmatch(r"(ab|cd){12}x{3}y", texts[i])
        assert " and " in texts[i + 1]
        found = json.loads(texts[i + 2])
        assert set(found) == {"name", "n"}
        assert set(found["n"]) <= {1, 22}
    return [token_ids(answers), texts]


@workload
def mixed_sampling(llm: Any, prompts: Prompts) -> Any:
    """Settings of many kinds in one batch. What is greedy must be equal, what is sampled must end.

    No seeds: on the CPU, vLLM 0.32 itself fails when a seeded request runs beside greedy ones. No ``min_p``
    and no ``logit_bias``: vLLM refuses them with speculation.
    """
    from vllm import SamplingParams

    banned = [" a", "b", "cd"]
    alike = [
        greedy_params(40),
        greedy_params(40, repetition_penalty=1.2),
        greedy_params(40, presence_penalty=0.6, frequency_penalty=0.3),
        greedy_params(40, bad_words=banned),
        greedy_params(40, allowed_token_ids=list(range(20, 60))),
    ]
    free = [
        SamplingParams(temperature=t, max_tokens=40, ignore_eos=True, **more)
        for t, more in (
            (1.0, {}), (0.7, {"top_p": 0.8}), (0.3, {"top_k": 5}), (1.0, {"repetition_penalty": 1.3}),
            (0.5, {"bad_words": banned}), (0.4, {"allowed_token_ids": list(range(9, 20))}),
        )
    ]  # fmt: skip
    params = [p for i in range(6) for p in (*alike[i : i + 1], free[i])]
    answers = ask(llm, (prompts * 2)[: len(params)], params)
    assert {len(a.outputs[0].token_ids) for a in answers} == {40}
    assert set(answers[-1].outputs[0].token_ids) <= set(range(9, 20))
    return token_ids([a for a, p in zip(answers, params, strict=True) if p.temperature == 0])
