"""SGLang's server with proposers, asked over HTTP: the answers are those of a plain server."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_settings import CONTEXT_LENGTH
from http_server import START_SECONDS
from served import Served, eventually, serve, start
from served_questions import COMMON, MODEL, REGEX, RESPONSE, SCHEMA, Prompts, chat, complete, text
from speculating import PATIENT
from toys import HANGS_AT

from spec_plugins.adapters.sglang.names import CONFIG_VARIABLE
from spec_plugins.metrics import COUNTERS, GAUGES, figures
from spec_plugins.request_switch import SWITCH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = ["--constrained-json-disable-any-whitespace", "--decode-log-interval", "4"]


def generate(client: Any, prompt: Sequence[int], *, stream: bool = False, **params: Any) -> Any:
    """SGLang's own route; of a stream the last piece, which has all."""
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True, **params}
    asked = urllib.request.Request(
        str(client.base_url).replace("/v1/", "/generate"),
        json.dumps({"input_ids": list(prompt), "sampling_params": sampling, "stream": stream}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        if not stream:
            return json.load(answer)
        return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")][-1]


def structured(client: Any, prompts: Prompts, **kind: Any) -> Any:
    return [text(complete(client, p, 120, extra_body={"ignore_eos": False, **kind})) for p in prompts[:3]]


QUESTIONS: dict[str, Callable[[Any, Prompts], Any]] = {
    **COMMON,
    "generate": lambda c, prompts: [generate(c, p)["output_ids"] for p in prompts[::3]],
    "generate, streamed": lambda c, prompts: generate(c, prompts[1], stream=True)["text"],
    "regex": lambda c, prompts: structured(c, prompts, regex=REGEX),
    "schema": lambda c, prompts: structured(c, prompts, json_schema=json.dumps(SCHEMA)),
    "response format": lambda c, _: text(
        chat(c, response_format=RESPONSE, max_tokens=120, extra_body={"ignore_eos": False})
    ),
    # One a request: of several that end in one step, SGLang takes the first of its list, not of the text.
    "stop": lambda c, prompts: [
        text(complete(c, p, stop=[stop]))
        for p in prompts[:4]
        for said in [text(complete(c, p))[0]]
        for stop in (said[20:22], said[5:7])
    ],
    "to the context's end": lambda c, prompts: text(
        complete(c, prompts[0], CONTEXT_LENGTH - len(prompts[0]) - 1)
    ),
}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of a server without speculation, which has ended."""
    with serve(tiny_model, *FLAGS, log=tmp_path_factory.mktemp("plain") / "log") as server:
        return {name: ask(server.client(), prompts) for name, ask in QUESTIONS.items()}


@pytest.fixture(scope="module")
def served(
    tiny_model: Path, expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server with the suffix proposer."""
    fields = json.dumps({**PATIENT, "options": {"min_probability": 0.05}})
    flags = ["--speculative-algorithm", "SPEC_SUFFIX", "--speculative-num-steps", "6", *FLAGS]
    log = tmp_path_factory.mktemp("suffix") / "log"
    with serve(tiny_model, *flags, log=log, env={CONFIG_VARIABLE: fields}) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Any:
    return served.client()


def told(server: Served) -> dict[str, Any]:
    """What /server_info says of the driver."""
    found: dict[str, Any] = json.loads(server.get("/server_info")[1])["internal_states"][0]["spec_plugins"]
    return found


def shown(server: Served, name: str) -> dict[str, float]:
    """One of our metrics by its label, or under an empty one."""
    label, _ = {**COUNTERS, **GAUGES}[name]
    full = f"spec_plugins:{name}" + ("_total" if name in COUNTERS else "")
    return server.by(full, label) if label else {"": server.total(full) or 0.0}


def idle(server: Served) -> bool:
    """Wait until nothing runs."""
    return bool(eventually(lambda: not server.total("sglang:num_running_reqs")))


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_those_of_a_plain_server(
    client: Any, expected: dict[str, Any], prompts: Prompts, question: str
) -> None:
    assert QUESTIONS[question](client, prompts) == expected[question]


def test_structured_answers_are_valid(expected: dict[str, Any]) -> None:
    for said, reason, _ in expected["regex"]:
        assert re.fullmatch(REGEX, said)
        assert reason == "stop"
    for said, _, _ in (*expected["schema"], expected["response format"]):
        assert json.loads(said).keys() == {"kind", "numbers"}


def test_many_clients_at_once(served: Served, expected: dict[str, Any], prompts: Prompts) -> None:
    asked = [*range(len(prompts)), *range(4)] * 2
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: text(complete(served.client(), prompts[i])), asked))
    assert found == [expected["completions"][i] for i in asked]


def test_structured_and_free_requests_at_once(
    served: Served, expected: dict[str, Any], prompts: Prompts
) -> None:
    names = ["regex", "completions", "schema", "chat", "response format", "stop", "generate"]
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: QUESTIONS[name](served.client(), prompts), names))
    assert found == [expected[name] for name in names]


def test_sampled_requests_finish(client: Any, prompts: Prompts) -> None:
    answer = complete(client, prompts[0], temperature=0.8, n=3, extra_body={"top_k": 20, "min_p": 0.02})
    assert len(answer.choices) == 3
    assert answer.usage.completion_tokens == 3 * 48


def test_clients_that_go_away(
    served: Served, client: Any, expected: dict[str, Any], prompts: Prompts
) -> None:
    """Some while they wait, since more come than run at once."""
    aborted = "sglang:num_aborted_requests_total"
    before = served.total(aborted) or 0

    def leave(i: int) -> None:
        stream = complete(served.client(), prompts[i], 150, stream=True)
        for _ in range(1 + i % 8):
            next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        left = [pool.submit(leave, i) for i in range(12)]
        stayed = [pool.submit(complete, served.client(), prompts[i]) for i in range(4)]
        for job in left:
            job.result()
        assert [text(job.result()) for job in stayed] == expected["completions"][:4]
    assert eventually(lambda: (served.total(aborted) or 0) > before)
    assert QUESTIONS["completions"](client, prompts) == expected["completions"]
    assert idle(served)
    assert eventually(lambda: told(served)["requests_held"] == 0)
    assert eventually(lambda: shown(served, "requests_held") == {"": 0})
    assert shown(served, "state")["requests"] == 0
    assert served.get("/flush_cache")[0] == 200
    assert told(served)["kv_tokens_used"] == 0


def test_switch(served: Served, client: Any, expected: dict[str, Any], prompts: Prompts) -> None:
    def switched(value: Any) -> list[int]:
        """How many drafts reached each position."""
        before = told(served)["drafted_by_position"]
        answer = generate(client, prompts[0], custom_params={SWITCH: value})
        assert answer["output_ids"] == expected["generate"][0]
        after = told(served)["drafted_by_position"]
        assert any(answer["meta_info"]["spec_plugins_draft_tokens"]) == (after != before)
        return [a - b for a, b in zip(after, before, strict=True)]

    assert switched(None)[2] > 0
    assert switched(0) == [0] * 6
    assert switched(2) == switched(2.0)
    assert switched(2)[1] > 0 == switched(2)[2]
    for bad in ("many", -1, 1.5, [1]):
        assert switched(bad)[2] > 0
    assert "'many' cannot be used" in served.log.read_text(encoding="utf-8")


def test_switch_through_the_openai_routes(
    served: Served, client: Any, expected: dict[str, Any], prompts: Prompts
) -> None:
    before = told(served)
    body = {"custom_params": {SWITCH: 0}}
    assert text(complete(client, prompts[0], extra_body=body)) == expected["completions"][0]
    assert text(chat(client, extra_body=body)) == expected["chat"]
    after = told(served)
    assert after["draft_tokens"] == before["draft_tokens"]
    assert after["verify_steps"] - before["verify_steps"] == 2 * 47
    complete(client, prompts[0])
    assert told(served)["draft_tokens"] > before["draft_tokens"]


def test_metrics(served: Served, client: Any, prompts: Prompts) -> None:
    before = told(served)
    metas = [generate(client, p, stream=i % 2 == 1)["meta_info"] for i, p in enumerate(prompts)]
    said = told(served)
    for name in (*COUNTERS, *GAUGES):
        assert eventually(lambda name=name: shown(served, name) == pytest.approx(figures(said, name))), name

    drafted, accepted = (said[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert sum(sum(m["spec_plugins_draft_tokens"]) for m in metas) == drafted > 0
    assert sum(m["spec_num_proposed_drafts"] for m in metas) == drafted
    assert sum(m["spec_num_correct_drafts"] for m in metas) == accepted > 0

    reached, kept = ([shown(served, f"{what}_at_position")[str(p)] for p in range(6)]
                     for what in ("drafted", "accepted"))  # fmt: skip
    assert all(0 <= k <= r for k, r in zip(kept, reached, strict=True))
    assert kept == sorted(kept, reverse=True)
    assert sum(kept) == said["accepted_tokens"]
    assert sum(reached) <= said["draft_tokens"]

    assert shown(served, "draft_tokens").keys() == {"suffix"}
    assert served.by("spec_plugins:steps_total", "engine").keys() == {"0"}
    assert served.by("spec_plugins:steps_total", "model_name").keys() == {MODEL}
    assert served.by("spec_plugins:steps_total", "proposer").keys() == {"suffix"}
    assert shown(served, "faults") == {}
    assert shown(served, "state")["bytes"] > 0
    assert (served.total("sglang:spec_accept_length") or 0) > 1
    for name in ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:token_usage"):
        assert served.total(name) is not None


def test_it_ends_when_told_to(served: Served) -> None:
    """Ends the server: stands after the tests that use it."""
    ends(served)


def ends(server: Served) -> None:
    """All of its processes, after a SIGTERM."""
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)

    def gone() -> bool:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    assert eventually(gone), server.tail()


@pytest.fixture(scope="module")
def misbehaving(
    tiny_model: Path, expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server with a third party's proposer that does all that it should not."""
    fields = {
        "proposer": "toy-mixed", "num_speculative_tokens": 4,
        "containment": {"time_allowance_ms": 100, "max_faults": 1000},
    }  # fmt: skip
    log = tmp_path_factory.mktemp("misbehaving") / "log"
    flags = ["--speculative-algorithm", "SPEC", *FLAGS]
    with serve(tiny_model, *flags, log=log, env={CONFIG_VARIABLE: json.dumps(fields)}) as server:
        yield server


def test_faults_change_no_answer(misbehaving: Served, expected: dict[str, Any], prompts: Prompts) -> None:
    client = misbehaving.client()
    kinds = {
        "raised", "late", "wrong_count", "not_a_draft", "token_out_of_range", "over_budget", "finish_raised",
    }  # fmt: skip

    def ask() -> bool:
        for name in ("completions", "chat, streamed", "regex", "generate"):
            assert QUESTIONS[name](client, prompts) == expected[name]
        return kinds <= {fault for fault, count in shown(misbehaving, "faults").items() if count}

    assert eventually(ask, 120), (shown(misbehaving, "faults"), misbehaving.tail())
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda p: text(complete(misbehaving.client(), p)), prompts))
    assert found == expected["completions"]
    assert eventually(lambda: shown(misbehaving, "faults") == told(misbehaving)["faults"])
    assert shown(misbehaving, "skipped_steps")[""] > 0
    assert told(misbehaving)["accepted_tokens"] > 0
    assert "on purpose" in misbehaving.log.read_text(encoding="utf-8")


def test_it_ends_while_a_proposer_hangs(
    misbehaving: Served, expected: dict[str, Any], prompts: Prompts
) -> None:
    """Ends the server."""
    client = misbehaving.client()
    assert eventually(lambda: hangs(misbehaving))
    assert text(complete(client, prompts[0])) == expected["completions"][0]
    ends(misbehaving)


def hangs(server: Served) -> bool:
    """Ask for what makes the proposer hang; whether it hung already."""
    before = told(server)
    complete(server.client(), [HANGS_AT, 5, 9])
    after = told(server)
    return bool(after["steps"] == before["steps"] and after["skipped_steps"] > before["skipped_steps"])


def test_what_cannot_be_used_ends_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """With a message in the log, and before a model is loaded."""
    wrong = {
        "no proposer is registered as 'sufix'; did you mean 'suffix'?": ("SPEC", {"proposer": "sufix"}),
        "proposer: 'ngram' in SPEC_PLUGINS_CONFIG, but --speculative-algorithm says 'suffix'": (
            "SPEC_SUFFIX",
            {"proposer": "ngram"},
        ),
    }
    started = {}
    try:
        for i, (message, (algorithm, fields)) in enumerate(wrong.items()):
            started[message] = start(
                tiny_model, "--speculative-algorithm", algorithm,
                log=tmp_path / str(i), env={CONFIG_VARIABLE: json.dumps(fields)},
            )  # fmt: skip
        for message, server in started.items():
            assert server.process.wait(START_SECONDS)
            assert message in server.log.read_text(encoding="utf-8")
    finally:
        for server in started.values():
            server.end(patience=0.5)
