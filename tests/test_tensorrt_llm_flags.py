"""TensorRT-LLM's settings, written from the project's configuration, without the engine."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from spec_plugins import launch, support
from spec_plugins.adapters.tensorrt_llm import flags as tensorrt_flags
from spec_plugins.adapters.tensorrt_llm.settings import Settings
from spec_plugins.cli import app
from spec_plugins.config import Config, load_config
from spec_plugins.errors import ConfigError, SpecPluginsError, UnsupportedError
from spec_plugins.launch import example, flags_of, prepare
from spec_plugins.registry import registry


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest known version is assumed, whatever this environment has."""
    monkeypatch.setattr(launch, "installed_version", lambda engine: None)


def written(source: Any, version: str | None = None) -> dict[str, Any]:
    """What the file holds."""
    found = prepare("tensorrt-llm", source, version)
    assert found.route == "native"
    (held,) = yaml.safe_load(found.file).items()
    assert held[0] == "speculative_config"
    return dict(held[1])


EAGLE = {"proposer": "eagle3", "num_speculative_tokens": 3, "options": {"model": "a 'head': #1"}}
DRAFT = {"proposer": "draft_model", "num_speculative_tokens": 2, "options": {"model": "D"}}


def test_names_are_the_versions() -> None:
    new = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "a 'head': #1"}
    old = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "a 'head': #1"}
    for version in ("1.2.0", "v1.3.0rc5", None):
        assert written(EAGLE, version) == new
    for version in ("1.0.0", "1.1.0rc2"):
        assert written(EAGLE, version) == old
    assert written(DRAFT, "1.1") == {
        "decoding_type": "DraftTarget", "max_draft_len": 2, "speculative_model_dir": "D"
    }  # fmt: skip
    assert written(DRAFT, "1.2")["decoding_type"] == "Draft_Target"
    mtp = {"proposer": "mtp", "num_speculative_tokens": 2}
    assert written(mtp, "1.2") == {"decoding_type": "MTP", "num_nextn_predict_layers": 2}
    assert written(mtp, "1.3") == {"decoding_type": "MTP", "max_draft_len": 2}


def test_every_option_is_the_engines_by_its_own_name() -> None:
    options = {"max_ngram": 3, "shared": True, "keep_all": False, "oldest": False}
    assert set(options) == set(tensorrt_flags.NgramOptions.model_fields)
    source = {"proposer": "ngram", "route": "native", "num_speculative_tokens": 5, "options": options}
    assert written(source) == {
        "decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 3, "is_public_pool": True,
        "is_keep_all": False, "is_use_oldest": False,
    }  # fmt: skip
    one = {**EAGLE, "options": {"model": "H", "one_model": False}}
    assert written(one)["eagle3_one_model"] is False


def test_requests_share_no_text_unless_asked() -> None:
    assert written({"proposer": "ngram", "route": "native"})["is_public_pool"] is False


def test_the_table_and_the_flags_name_the_same_methods() -> None:
    native = support.ENGINES["tensorrt-llm"].native
    assert set(native) == set(tensorrt_flags.NATIVE) == set(tensorrt_flags.EXAMPLES)
    for method in ("medusa", "eagle", "lookahead"):
        assert tensorrt_flags.MODES[method] in native[method]


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead", "combine"])
def test_token_only_proposers_take_the_plugin_route(name: str) -> None:
    options = {"proposers": [{"name": "ngram"}, {"name": "suffix"}]} if name == "combine" else {}
    found = prepare("tensorrt-llm", {"proposer": name, "options": options})
    flag, value = found.flags
    assert (found.route, flag, found.file) == ("plugin", "--spec", "")
    assert json.loads(value)["proposer"] == name
    assert "can hold a drafter" in found.notes[-1]


@pytest.mark.parametrize(
    ("source", "version", "error", "says"),
    [
        ("suffix", "0.21.0", UnsupportedError, "1.0 or newer, and this is 0.21.0"),
        (EAGLE, "0.17", UnsupportedError, "PyTorch backend, 1.0 or newer, and this is 0.17"),
        ("suffix", "newest", ConfigError, "'newest' is no version of TensorRT-LLM"),
        ("eagle3", None, ConfigError, "options.model: missing; set it"),
        ({**EAGLE, "options": {"model": "H", "topk": 2}}, None, ConfigError, "options.topk: unknown field"),
        ("eagle", "1.3", UnsupportedError, "1.3 has no builder: 1.2 was the last. Nearest: eagle3 on"),
        ("eagle", "1.2", UnsupportedError, "trtllm-build --speculative_decoding_mode eagle"),
        (
            {"proposer": "medusa", "options": {"model": "H"}},
            "1.1",
            UnsupportedError,
            "which `spec-plugins build tensorrt-llm` runs. Nearest: eagle3 on tensorrt-llm (native)",
        ),
        (
            {"proposer": "lookahead", "route": "native"},
            None,
            UnsupportedError,
            "Nearest: lookahead on tensorrt-llm (plugin)",
        ),
        ({"proposer": "suffix", "route": "native"}, None, UnsupportedError, "has no 'suffix' of its own"),
        (
            {"proposer": "eagle3", "route": "plugin", "options": {"model": "H"}},
            None,
            UnsupportedError,
            "needs hidden states",
        ),
    ],
)
def test_refusals_name_the_reason_and_what_works(
    source: Any, version: str | None, error: type[SpecPluginsError], says: str
) -> None:
    with pytest.raises(error) as refused:
        prepare("tensorrt-llm", source, version)
    assert says in str(refused.value)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_auto_takes_the_engines_own_method_first(method: str) -> None:
    assert prepare("tensorrt-llm", {"proposer": method, "options": {"model": "M"}}).route == "native"


def test_every_method_that_can_be_had_has_an_example() -> None:
    for method in [*registry().proposers, *support.METHODS]:
        found = support.explain("tensorrt-llm", method)
        if method in ("medusa", "eagle"):
            with pytest.raises(UnsupportedError, match="compiled engine builder"):
                example(found)
        elif method == "combine":
            with pytest.raises(ConfigError, match=r"options\.proposers: missing"):
                example(found)
        else:
            assert example(found) is not None


def test_notes_say_what_has_no_effect_and_which_version_is_unknown() -> None:
    source = {**EAGLE, "max_draft_nodes": 9, "containment": {"max_faults": 1}}
    notes = " ".join(prepare("tensorrt-llm", source, "1.9").notes)
    assert "1.9 is newer than what this was written from: 1.3" in notes
    assert "max_draft_nodes and containment: no effect" in notes


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_args_prints_the_file_alone_on_stdout() -> None:
    shown = run("args", "tensorrt-llm", json.dumps(EAGLE), "--engine-version", "1.1")
    assert shown.exit_code == 0
    held = yaml.safe_load(shown.stdout)
    assert held == {"speculative_config": written(EAGLE, "1.1")}
    assert "--extra_llm_api_options speculative.yaml" in shown.stderr
    assert json.loads(run("args", "tensorrt-llm", json.dumps(EAGLE), "--json").stdout)["file"]


def test_serve_starts_the_launcher_with_what_the_user_added() -> None:
    shown = run("serve", "tensorrt-llm", "org/model", "--spec", "suffix", "--dry-run", "--port", "80")
    words = shlex.split(shown.stdout)
    assert words[:4] == [sys.executable, "-m", "spec_plugins.adapters.tensorrt_llm.server", "org/model"]
    assert words[4] == "--spec"
    assert words[6:] == ["--port", "80"]
    # What the launcher is given means the same to it.
    assert prepare("tensorrt-llm", words[5]).route == "plugin"
    native = prepare("tensorrt-llm", EAGLE)
    assert prepare("tensorrt-llm", native.flags[1]).file == native.file


@pytest.mark.parametrize("word", ["--spec", "--model=x", "--speculative-config", "--backend"])
def test_what_would_replace_an_argument_of_ours_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="already says it here; leave it out"):
        flags_of("tensorrt-llm").command("M", ["--spec", "suffix"], [word, "x"])


def test_settings_survive_their_journey() -> None:
    config = load_config({"proposer": "suffix", "options": {"min_match": 2}, "num_speculative_tokens": 3})
    settings = Settings(config, 100, 200, 3, "m", 5, {1: 3, 8: 0})
    again = Settings.from_json(settings.to_json())
    assert again == settings
    assert isinstance(again.config, Config)
    target = again.target(again.config.create_proposer())
    assert (target.vocab_size, target.max_model_len, target.max_num_seqs) == (100, 200, 3)
    assert target.provides == frozenset()
    assert target.num_speculative_tokens == 3
