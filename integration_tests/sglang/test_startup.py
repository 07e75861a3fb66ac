"""Registration, server arguments, and what is refused: nothing here loads a model."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make environment-sglang")

from spec_plugins.adapters.sglang import algorithm, engine_faults, hooks, plugin
from spec_plugins.adapters.sglang.names import CONFIG_VARIABLE
from spec_plugins.errors import ConfigError, UnknownProposerError, UnsupportedError
from spec_plugins.hooks import Hook, check


def arguments(**changes: Any) -> Any:
    """Server arguments as SGLang hands them over: resolved but for what an algorithm sets."""
    given = {
        "speculative_algorithm": "SPEC_SUFFIX", "speculative_num_steps": None,
        "speculative_num_draft_tokens": None, "speculative_eagle_topk": None, "enable_mixed_chunk": True,
        "max_running_requests": None, "attention_backend": "triton", "page_size": 1, "device": "cuda",
        "pp_size": 1, "disaggregation_mode": "null", **changes,
    }  # fmt: skip
    return SimpleNamespace(**given)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's table of algorithms, empty, for the time of a test."""
    from sglang.srt.speculative import spec_registry

    table: dict[str, Any] = {}
    monkeypatch.setattr(spec_registry, "_REGISTRY", table)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return table


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.path.rpartition(":")[2])
def test_sglang_is_as_the_table_says(hook: Hook) -> None:
    assert check(hook).status == "ok", check(hook).detail


def test_every_proposer_has_an_algorithm(registered: dict[str, Any]) -> None:
    plugin.register()
    plugin.register()
    assert {"SPEC", "SPEC_SUFFIX", "SPEC_NGRAM", "SPEC_LOOKAHEAD", "SPEC_COMBINE", "SPEC_TOY_RAISES"} <= set(
        registered
    )
    for made in registered.values():
        made.validate_server_args(arguments())


def test_algorithms_have_all_that_sglang_asks_of_its_own() -> None:
    """CustomSpecAlgo of 0.5.23 lacks some of it."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_")}
    asked -= {algo.name for algo in SpeculativeAlgorithm} | {
        "from_string",
        "register",
        "get_platform_worker_cls",
    }
    assert not [name for name in asked if not hasattr(algorithm.Algorithm, name)]


def test_a_changed_sglang_is_refused_under_the_algorithms_own_name(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Hook("sglang.srt.speculative.ngram_worker:gone", None, "0.5.23", "is a test's")
    monkeypatch.setattr(plugin, "REQUIRED", (*hooks.REQUIRED, wrong))
    plugin.register()
    with pytest.raises(UnsupportedError, match=r"ngram_worker:gone.*spec-plugins doctor"):
        registered["SPEC_SUFFIX"].validate_server_args(arguments())


def test_two_proposers_of_one_name_are_told_apart_by_the_configuration(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"a-b": None, "a_b": None, "suffix": None}
    monkeypatch.setattr(plugin, "registry", lambda: SimpleNamespace(proposers=known))
    plugin.register()
    with pytest.raises(UnsupportedError, match="SPEC_A_B could be 'a-b' and 'a_b'; use SPEC"):
        registered["SPEC_A_B"].validate_server_args(arguments())
    registered["SPEC_SUFFIX"].validate_server_args(arguments())


def test_registration_never_stops_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(plugin, "registry", fail)
    plugin.register()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp_size": 2}, "--pp-size: 2 cannot be used with SPEC_SUFFIX.*set it to 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention cannot be used.*leave it out"),
        ({"speculative_adaptive": True}, "--speculative-adaptive cannot be used"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode: 'decode' cannot be used"),
    ],
)
def test_refusals_name_the_argument_and_the_fix(
    registered: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    plugin.register()
    with pytest.raises(UnsupportedError, match=said):
        registered["SPEC_SUFFIX"].validate_server_args(arguments(**changes))


def resolved(registered: dict[str, Any], name: str = "SPEC_SUFFIX", **changes: Any) -> Any:
    plugin.register()
    given = arguments(speculative_algorithm=name, **changes)
    registered[name].handle_server_args(given)
    return given


def test_defaults(registered: dict[str, Any]) -> None:
    given = resolved(registered)
    assert (given.speculative_num_steps, given.speculative_num_draft_tokens) == (8, 9)
    assert (given.max_running_requests, given.enable_mixed_chunk) == (48, False)
    assert resolved(registered, max_running_requests=7).max_running_requests == 7


def test_flags_say_depth_and_width(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = resolved(registered, speculative_num_steps=5, speculative_num_draft_tokens=17)
    assert (given.speculative_num_steps, given.speculative_num_draft_tokens) == (5, 17)
    monkeypatch.setenv(CONFIG_VARIABLE, '{"num_speculative_tokens": 6}')
    assert resolved(registered).speculative_num_steps == 6
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: 6 .* --speculative-num-steps says 5"):
        resolved(registered, speculative_num_steps=5)
    with pytest.raises(ConfigError, match=r"--speculative-num-draft-tokens: 1 leaves no room"):
        resolved(registered, speculative_num_draft_tokens=1)


@pytest.mark.parametrize(
    ("changes", "topk"),
    [
        ({}, 2),
        ({"attention_backend": "trtllm_mha"}, 1),
        ({"page_size": 16}, 1),
        ({"page_size": 16, "attention_backend": "flashinfer"}, 2),
        ({"page_size": 16, "attention_backend": "torch_native", "device": "cpu"}, 2),
        ({"name": "SPEC_NGRAM"}, 1),
    ],
)
def test_drafts_branch_where_sglang_verifies_branches(
    registered: dict[str, Any], changes: dict[str, Any], topk: int
) -> None:
    assert resolved(registered, **changes).speculative_eagle_topk == topk


def test_the_configuration_names_the_proposer(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, '{"proposer": "sufix"}')
    with pytest.raises(UnknownProposerError, match="did you mean 'suffix'"):
        resolved(registered, "SPEC")
    monkeypatch.setenv(CONFIG_VARIABLE, '{"proposer": "ngram"}')
    assert resolved(registered, "SPEC").speculative_eagle_topk == 1
    with pytest.raises(ConfigError, match=r"proposer: 'ngram' .* --speculative-algorithm says 'suffix'"):
        resolved(registered, "SPEC_SUFFIX")
    monkeypatch.setenv(CONFIG_VARIABLE, '{"route": "native"}')
    with pytest.raises(ConfigError, match="spec-plugins args sglang"):
        resolved(registered)


class Ending:
    """A request as SGLang decides over it: of its stops, the first of the list that is in the new tokens."""

    def __init__(self, *stops: int) -> None:
        self.sampling_params = SimpleNamespace(stop_strs=stops, stop_regex_strs=[])
        self.output_ids = array("q", [5])
        self.reason: int | None = None
        self.finished_len: int | None = None
        self.looked = 0

    def finished(self) -> bool:
        return self.reason is not None

    def look(self, new_accepted_len: int) -> None:
        self.looked += 1
        new = self.output_ids[-new_accepted_len:]
        self.reason = next((stop for stop in self.sampling_params.stop_strs if stop in new), None)


def test_of_several_stops_in_a_step_the_first_in_the_text_counts() -> None:
    mended = engine_faults._token_by_token(Ending.look)
    for look, reason, length in ((Ending.look, 9, None), (mended, 7, 3)):
        request = Ending(9, 7)
        request.output_ids.extend([6, 7, 8, 9])
        look(request, 4)
        assert (request.reason, request.finished_len) == (reason, length)
        assert request.output_ids.tolist() == [5, 6, 7, 8, 9]
    going = Ending(9)
    going.output_ids.extend([6, 7])
    mended(going, 2)
    assert (going.reason, going.looked, going.output_ids.tolist()) == (None, 2, [5, 6, 7])
    free = Ending()
    free.output_ids.extend([6, 7])
    mended(free, 2)
    assert free.looked == 1, "without stop strings nothing is looked at twice"
