"""What a request may say for itself, and who may be shown its text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from speculating import configured
from workloads import Prompts, ask, greedy, ids

from spec_plugins.request_switch import SWITCH

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suffix(make_engine: Any) -> Iterator[Any]:
    with (
        configured({"proposer": "suffix"}) as algorithm,
        make_engine(speculative_algorithm=algorithm) as engine,
    ):
        yield engine


@pytest.mark.parametrize(("wanted", "longest"), [(0, 0), (2, 2), ("many", 8), (None, 8)])
def test_a_request_limits_its_drafts(suffix: Any, prompts: Prompts, wanted: Any, longest: int) -> None:
    """Beside others that do not."""
    free = ids(ask(suffix, prompts[:4], greedy(60)))
    extra = {} if wanted is None else {"custom_params": {SWITCH: wanted}}
    answers = ask(suffix, prompts[:4] * 2, [greedy(60, **extra)] * 4 + [greedy(60)] * 4)
    assert ids(answers) == free * 2
    # SGLang counts steps by how many draft tokens were accepted.
    deepest = [len(a["meta_info"]["spec_correct_drafts_histogram"]) - 1 for a in answers]
    assert max(deepest[:4]) == longest
    assert max(deepest[4:]) == 8
    drafted = [sum(a["meta_info"]["spec_plugins_draft_tokens"]) for a in answers]
    assert (max(drafted[:4]) == 0) == (wanted == 0)


@pytest.mark.parametrize("named", ["extra_key", "cache_salt"])
def test_answers_are_kept_for_the_same_tenant_only(suffix: Any, prompts: Prompts, named: str) -> None:
    """suffix continues an earlier answer at once, where it may see it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    def steps(salt: str) -> int:
        asked = GenerateReqInput(
            input_ids=[*prompts[7], 99, 98, 97], sampling_params=greedy(40), **{named: salt}
        )
        answers = suffix.tokenizer_manager.generate_request(asked, None)
        answer = suffix.loop.run_until_complete(anext(answers))
        return int(answer["meta_info"]["spec_verify_ct"])

    first, other = steps("anna"), steps("bert")
    again = steps("anna")
    assert first == other
    assert again < 0.6 * first


def test_log_of_what_was_drafted_fits_the_output_when_streamed(suffix: Any, prompts: Prompts) -> None:
    pieces = list(suffix.generate(input_ids=prompts[1], sampling_params=greedy(40), stream=True))
    meta = pieces[-1]["meta_info"]
    assert sum(meta["spec_plugins_draft_tokens"]) == meta["spec_num_proposed_drafts"] > 0
    assert meta["completion_tokens"] == 40
