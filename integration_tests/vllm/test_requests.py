"""Single requests: the switch, aborts, tenants, the end of the context, what is held. One engine for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from offline import ask, drafter_of, greedy, our_warnings, statistics_of, token_ids

SWITCH = "spec_plugins_num_speculative_tokens"


@pytest.fixture(scope="module")
def llm(make_engine: Any) -> Iterator[Any]:
    """One engine, with ``suffix``."""
    with make_engine("suffix", max_num_seqs=4) as made:
        yield made


def params(max_tokens: int = 40, wanted: Any = None, **settings: Any) -> Any:
    from vllm import SamplingParams

    extra = {} if wanted is None else {"extra_args": {SWITCH: wanted}}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **extra, **settings)


def figures(llm: Any, request_id: str) -> dict[str, int]:
    (found,) = llm.collective_rpc("spec_plugins_statistics", args=(request_id,))
    return dict(found)


def run_dry(llm: Any) -> None:
    """Step until nothing is left, the step that takes the last request away included."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        llm.llm_engine.step()


def add(llm: Any, request_id: str, prompt: list[int], settings: Any) -> None:
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, settings)


@pytest.mark.contract
def test_the_switch_holds_for_its_request_alone(llm: Any, prompts: list[list[int]]) -> None:
    wanted = [0, None, 2, 0]
    most: dict[str, int] = {}
    driver = drafter_of(llm).driver
    propose = driver.propose

    def watch(ids: Any, *args: Any, **more: Any) -> Any:
        drafts = propose(ids, *args, **more)
        for r, count in zip(ids, drafts.counts.tolist(), strict=True):
            most[r] = max(count, most.get(r, 0))
        return drafts

    driver.propose = watch
    try:
        answers = ask(llm, prompts[:4], [params(60, w) for w in wanted])
    finally:
        del driver.propose
    found = [figures(llm, a.request_id) for a in answers]
    longest = [next(m for r, m in most.items() if r.startswith(f"{a.request_id}-")) for a in answers]
    assert [f["drafts"] for f in found[::3]] == [0, 0]
    assert all(f["verify_steps"] == 59 for f in found[::3])
    assert found[1]["accepted_tokens"] > 0
    assert found[2]["accepted_tokens"] > 0
    assert (longest[0], longest[2], longest[3]) == (0, 2, 0)
    assert longest[1] > 2
    # Without drafts it is vLLM without speculation.
    assert token_ids(answers) == greedy(llm, prompts[:4], 60, extra_args={SWITCH: 0})


@pytest.mark.contract
@pytest.mark.parametrize("bad", ["x", -1, 1.5, True])
def test_a_bad_switch_is_named_once(llm: Any, prompts: list[list[int]], bad: Any) -> None:
    drafter_of(llm).state._switch._warned = False  # of the parameter before this
    with our_warnings() as warnings:
        answers = ask(llm, prompts[:2], params(40, bad))
        assert token_ids(answers) == greedy(llm, prompts[:2], 40)
    (warning,) = warnings
    assert SWITCH in warning
    assert repr(bad) in warning
    assert "set it to a whole number" in warning
    assert sum(figures(llm, a.request_id)["drafts"] for a in answers) > 0


def test_aborted_requests_leave_nothing(llm: Any, prompts: list[list[int]]) -> None:
    run_dry(llm)
    expected = greedy(llm, prompts[:4], 50)
    for i in range(4):
        add(llm, f"abort-{i}", prompts[i], params(50))
    for _ in range(4):
        llm.llm_engine.step()
    assert drafter_of(llm).driver.requests_held == 4
    llm.llm_engine.abort_request(["abort-1", "abort-2"])
    # One id comes back at once, with other tokens.
    add(llm, "abort-1", prompts[3], params(50))
    done = {}
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        for answer in llm.llm_engine.step():
            if answer.finished:
                done[answer.request_id] = list(answer.outputs[0].token_ids)
    kept = {r: t for r, t in done.items() if t and r != "abort-2"}
    assert kept == {"abort-0": expected[0], "abort-3": expected[3], "abort-1": expected[3]}
    drafter = drafter_of(llm)
    assert drafter.driver.requests_held == 0
    assert not drafter.state._requests
    assert not drafter.state._tenants
    assert not statistics_of(llm).running


def test_an_id_may_come_again(llm: Any, prompts: list[list[int]]) -> None:
    """vLLM makes internal ids of its own; the driver is told of each end, so that it need not trust them."""
    expected = greedy(llm, prompts[4:6], 30)
    for i in (0, 1):
        add(llm, "again", prompts[4 + i], params(30))
        found: list[Any] = []
        while llm.llm_engine.has_unfinished_requests():
            found += llm.llm_engine.step()
        assert list(found[-1].outputs[0].token_ids) == expected[i]
    run_dry(llm)
    assert drafter_of(llm).driver.requests_held == 0
    assert drafter_of(llm).statistics()["requests_held"] == 0


def test_salts_keep_tenants_apart(llm: Any) -> None:
    prompt = [(11 * i * i + 5 * i) % 113 + 4 for i in range(30)]

    def accepted(salt: str | None) -> int:
        (answer,) = ask(llm, [prompt], params(60), **({} if salt is None else {"cache_salt": salt}))
        run_dry(llm)
        return figures(llm, answer.request_id)["accepted_tokens"]

    cold = accepted("first")
    assert accepted("first") > cold + 10
    # As if nobody had asked before.
    assert accepted("second") == cold
    # Without a salt, all are one tenant: it holds what other tests asked, too.
    nobody = accepted(None)
    assert abs(nobody - cold) < 10
    assert accepted(None) > nobody + 10
    assert accepted("second") > cold + 10


def test_one_request_near_the_limit_stops_no_other(llm: Any, prompts: list[list[int]]) -> None:
    """vLLM itself stops all drafting while one request of the batch has no room for a whole draft."""
    longest = llm.llm_engine.model_config.max_model_len
    add(llm, "other", prompts[0], params(120))
    for _ in range(12):
        llm.llm_engine.step()
    near = (prompts[-1] * 4)[: longest - 6]
    # It has no drafts, so that it stays near the limit for as long as it can.
    add(llm, "near", near, params(500, 0))
    before = figures(llm, "other")
    steps = 0
    answers: list[Any] = []
    while "near" not in {a.request_id for a in answers if a.finished}:
        answers = llm.llm_engine.step()
        steps += 1
    after = figures(llm, "other")
    assert steps >= 6
    assert after["verify_steps"] - before["verify_steps"] >= 6
    assert after["drafts"] - before["drafts"] >= 3
    run_dry(llm)


def test_what_vllm_refuses_with_speculation_is_still_refused(llm: Any, prompts: list[list[int]]) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    for settings in ({"min_p": 0.1}, {"logit_bias": {5: 1.0}}):
        with pytest.raises(VLLMValidationError, match="speculative decoding"):
            ask(llm, prompts[:1], SamplingParams(temperature=1.0, max_tokens=5, **settings))
