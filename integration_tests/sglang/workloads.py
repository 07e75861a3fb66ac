"""What engines are asked to do, with and without speculation; each returns what must be equal then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Prompts = list[list[int]]
Workload = Callable[[Any, Prompts], Any]
WORKLOADS: dict[str, Workload] = {}


def workload(function: Workload) -> Workload:
    """Add to the workloads."""
    WORKLOADS[function.__name__] = function
    return function


def greedy(max_new_tokens: int = 48, **settings: Any) -> dict[str, Any]:
    """Sampling parameters."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **settings}


def ask(engine: Any, prompts: Prompts, params: Any, **more: Any) -> list[dict[str, Any]]:
    """All at once; the answers in order."""
    given = params if isinstance(params, list) else [params] * len(prompts)
    found: list[dict[str, Any]] = engine.generate(input_ids=prompts, sampling_params=given, **more)
    return found


def ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Their tokens."""
    return [a["output_ids"] for a in answers]


def why(answer: dict[str, Any]) -> Any:
    """How it ended: the kind, and what was matched."""
    reason = answer["meta_info"]["finish_reason"]
    return reason["type"], reason.get("matched")


@workload
def moving_rows(engine: Any, prompts: Prompts) -> Any:
    """More requests than rows, which leave at different times."""
    return ids(ask(engine, prompts, [greedy(5 + 23 * i % 60) for i in range(len(prompts))]))


@workload
def long_prompts(engine: Any, prompts: Prompts) -> Any:
    """Prompts of over 100 tokens that come while others decode."""
    mixed = [p for i, long in enumerate(prompts[-4:]) for p in (prompts[i], long * 2)]
    return ids(ask(engine, mixed, [greedy(70 if i % 2 == 0 else 30) for i in range(len(mixed))]))


@workload
def turns_of_a_conversation(engine: Any, prompts: Prompts) -> Any:
    """Each question holds the answers before it; with how much of it the radix cache had."""
    cached, answers = [], []
    for prompt in (prompts[4], prompts[5], prompts[9]):
        asked = [*prompt, 77]
        for turn in range(4):
            (answer,) = ask(engine, [asked], greedy(9 + 5 * turn))
            cached.append(answer["meta_info"]["cached_tokens"])
            answers.append(answer["output_ids"])
            asked = [*asked, *answer["output_ids"], 80 + turn, 81]
    assert sum(cached) > 200
    return [answers, cached]


@workload
def a_prefix_in_common(engine: Any, prompts: Prompts) -> Any:
    """One after the other, and all at once while the prefix is in use."""
    shared = [(11 * i) % 120 + 3 for i in range(50)]
    apart = [ask(engine, [[*shared, 5 + i, 6]], greedy(20))[0] for i in range(4)]
    at_once = ask(engine, [[*shared, 25 + i, 6] for i in range(6)], greedy(20))
    cached = [a["meta_info"]["cached_tokens"] for a in (*apart, *at_once)]
    assert min(cached[1:]) >= 48
    return [ids([*apart, *at_once]), cached]


@workload
def into_the_limit(engine: Any, prompts: Prompts) -> Any:
    """Requests that run into the context length, beside others."""
    longest = engine.server_args.context_length
    room = (30, 9, 7)
    near = [(prompts[-1] * 4)[: longest - left] for left in room]
    answers = ask(engine, [*near, *prompts[:4]], [*map(greedy, room), *[greedy(60)] * 4])
    assert {why(a)[0] for a in answers} == {"length"}
    return ids(answers)


@workload
def stops(engine: Any, prompts: Prompts) -> Any:
    """Stop strings and tokens, chosen where a draft may well be; the end of a text."""
    free = ask(engine, prompts[2:5], greedy(60))
    few = []
    for prompt, answer in zip(prompts[2:5], free, strict=True):
        text, tokens = answer["text"], answer["output_ids"]
        few += [
            (prompt, greedy(60, stop=[text[30:32]])),
            (prompt, greedy(60, stop=[text[21:24]], no_stop_trim=True)),
            (prompt, greedy(60, stop=[text[k : k + 2] for k in range(40, 10, -1)])),
            (prompt, greedy(60, stop=[text[36:39]], stop_token_ids=tokens[30:36])),
            (prompt, greedy(60, stop_token_ids=[tokens[25], tokens[40]])),
            (prompt, greedy(60, stop_token_ids=[tokens[10]], min_new_tokens=35)),
            (prompt, greedy(120, ignore_eos=False)),
        ]
    stopped = ask(engine, [p for p, _ in few], [s for _, s in few])
    assert {why(a)[0] for a in stopped} == {"stop", "length"}
    assert all(len(a["output_ids"]) >= 35 for a in stopped[5::7])
    return [ids(stopped), [(a["text"], why(a)) for a in stopped]]


@workload
def log_probabilities(engine: Any, prompts: Prompts) -> Any:
    """Those of outputs and prompts; requests with and without."""
    n = 8
    answers = ask(
        engine,
        prompts[:n],
        greedy(30),
        return_logprob=[i % 4 != 3 for i in range(n)],
        top_logprobs_num=[(0, 3)[i % 2] for i in range(n)],
        logprob_start_len=[(-1, 0)[i % 3 == 0] for i in range(n)],
    )

    def plain(answer: dict[str, Any]) -> Any:
        meta = answer["meta_info"]
        top = meta.get("output_top_logprobs") or ()
        return [
            *(
                [(None if p is None else round(p, 3), t) for p, t, _ in meta.get(key) or ()]
                for key in ("input_token_logprobs", "output_token_logprobs")
            ),
            [[(round(p, 3), t) for p, t, _ in row or ()] for row in top],
        ]

    told = [plain(a) for a in answers]
    assert [len(t[1]) for t in told] == [30 * (i % 4 != 3) for i in range(n)]
    return [ids(answers), told]


@workload
def grammars(engine: Any, prompts: Prompts) -> Any:
    """Structured outputs, beside free ones."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["hot and hot and hot", "cold"]},
            "sizes": {"type": "array", "items": {"enum": [11, 22]}, "minItems": 3, "maxItems": 5},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
    kinds: list[dict[str, Any]] = [
        {"json_schema": json.dumps(schema)},
        {"regex": "(abc ){3,6}(xyz ){2,4}done"},
        {},
    ]
    params = [greedy(90, **kinds[i % 3], **({} if i % 3 == 2 else {"ignore_eos": False})) for i in range(9)]
    answers = ask(engine, prompts[:9], params)
    for i, answer in enumerate(answers):
        if i % 3 == 0 and why(answer)[0] == "stop":
            assert set(json.loads(answer["text"])) == {"name", "sizes"}
        if i % 3 == 1 and why(answer)[0] == "stop":
            assert re.fullmatch(kinds[1]["regex"], answer["text"]), answer["text"]
    assert sum(why(a)[0] == "stop" for a in answers) >= 3
    return [ids(answers), [a["text"] for a in answers]]


@workload
def penalties(engine: Any, prompts: Prompts) -> Any:
    """Requests whose distribution depends on what they said, beside others."""
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.2},
        {"repetition_penalty": 1.4},
        {"logit_bias": {"16": 4.0, "45": -100.0}},
        {},
        {"min_new_tokens": 30, "ignore_eos": False},
    ]
    return ids(ask(engine, prompts[:12], [greedy(50, **kinds[i % 6]) for i in range(len(prompts[:12]))]))
