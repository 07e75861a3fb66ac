"""Every command, run in this process."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

import spec_plugins
from spec_plugins import launch, support
from spec_plugins.cli import app, generate, main, output
from spec_plugins.registry import Registration, registry

COMMANDS = (
    "list", "explain", "args", "serve", "build", "schema", "inspect", "convert", "generate", "train",
    "evaluate", "calibrate", "replay", "recommend", "confirm", "baseline", "doctor", "demo",
)  # fmt: skip
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Result:
    """What a command printed, without colours."""

    def __init__(self, *arguments: str) -> None:
        done = CliRunner().invoke(app, list(arguments))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        self.code = done.exit_code
        self.out, self.err = ANSI.sub("", done.stdout), ANSI.sub("", done.stderr)

    @property
    def words(self) -> str:
        """The output without line breaks and frames."""
        return " ".join(re.sub(r"[│─╭╮╰╯]", " ", self.out + self.err).split())


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers three more proposers, two of them unusable, and a package that was set aside."""
    (tmp_path / "acme_with_extra.py").write_text("import absent_extra")
    monkeypatch.syspath_prepend(tmp_path)
    for name, path in (
        ("heavy", "acme_with_extra:X"),
        ("bad", "math:sqrt"),
        ("states", f"{__name__}:NeedsStates"),
    ):
        monkeypatch.setitem(registry().proposers, name, Registration(name, path, "acme"))
    monkeypatch.setattr(registry(), "faults", ["acme: entry point 'x' failed"])


class NeedsStates(spec_plugins.Proposer):
    """Reads the target's mind.

    And more.
    """

    needs = frozenset({spec_plugins.Need.HIDDEN_STATES})
    uses = frozenset({spec_plugins.Need.TREES, spec_plugins.Need.PROBABILITIES})

    def propose(self, step: spec_plugins.Step) -> list[spec_plugins.Draft]:
        raise NotImplementedError


def test_help_names_every_command() -> None:
    shown = Result("--help")
    assert shown.code == 0
    for command in COMMANDS:
        assert f" {command} " in shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    shown = Result(command, "--help")
    assert shown.code == 0
    assert f"Usage: spec-plugins {command}" in shown.words or f"Usage: root {command}" in shown.words


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["spec-plugins", "--version"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"spec-plugins {spec_plugins.__version__}\n"


def test_unknown_command_and_option_are_usage_errors() -> None:
    assert Result("lits").code == 2
    assert Result("list", "--jsn").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["explain", "transformers"],
        ["args", "vllm", "suffix"],
        ["args", "sglang", "suffix"],
        ["schema"],
    ],
)
def test_light_commands_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from spec_plugins.cli import app\n"
        f"assert CliRunner().invoke(app, {arguments!r}).exit_code == 0\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ list


def test_list_shows_the_built_in_proposers() -> None:
    shown = Result("list")
    assert shown.code == 0
    assert all(name in shown.out for name in ("ngram", "suffix", "lookahead", "combine"))
    assert shown.err == ""


@pytest.mark.usefixtures("strangers")
def test_list_says_why_a_proposer_cannot_be_used() -> None:
    shown = Result("list")
    assert "pip install absent_extra" in shown.words
    assert "math:sqrt" in shown.words
    assert "hidden_states" in shown.words
    assert "Warning: acme: entry point 'x' failed" in shown.err


@pytest.mark.usefixtures("strangers")
def test_list_as_json() -> None:
    shown = json.loads(Result("list", "--json").out)
    entries = {entry["name"]: entry for entry in shown["proposers"]}
    assert shown["faults"] == ["acme: entry point 'x' failed"]
    assert entries["states"]["usable"]
    assert entries["states"]["summary"] == "Reads the target's mind."
    assert entries["states"]["needs"] == ["hidden_states"]
    assert entries["states"]["uses"] == ["probabilities", "trees"]
    assert entries["combine"]["needs"] is None
    assert not entries["heavy"]["usable"]
    assert not entries["heavy"]["broken"]
    assert entries["bad"]["broken"]


# --------------------------------------------------------------------------------------------- explain


def explained(engine: str, method: str) -> dict[str, Any]:
    return dict(json.loads(Result("explain", engine, method, "--json").out))


def test_registered_proposers_run_in_transformers_by_the_plugin_route() -> None:
    found = explained("transformers", "lookahead")
    assert found["route"] == "plugin"
    assert found["takes"] == {"trees": True, "predictions": True, "probabilities": False}
    assert explained("transformers", "ngram")["takes"]["trees"] is False
    assert explained("transformers", "combine")["takes"] is None
    shown = Result("explain", "transformers", "ngram").words
    assert "route plugin" in shown
    assert "prompt_lookup_num_tokens" in shown
    assert "trees no" in shown
    assert "what its options ask for" in Result("explain", "transformers", "combine").words


@pytest.mark.parametrize(
    ("engine", "method", "how"),
    [
        ("vllm", "eagle3", '"method": "eagle3"'),
        ("vllm", "mtp", "for models with such layers"),
        ("sglang", "nextn", "NEXTN"),
        ("SGLang", "STANDALONE", "STANDALONE"),
        ("sglang", "eagle", "EAGLE"),
        ("trtllm", "medusa", "up to 1.2"),
        ("tensorrt_llm", "eagle-3", "Eagle3DecodingConfig"),
    ],
)
def test_engines_own_methods_take_the_native_route(engine: str, method: str, how: str) -> None:
    found = explained(engine, method)
    assert found["route"] == "native"
    assert how in found["native"]
    refused = "not in this version" in found["plugin"] or "not possible" in found["plugin"]
    assert refused or support.OWN_FIRST_WHY in found["native"]
    assert how in Result("explain", engine, method).words


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_registered_proposers_run_in_vllm_by_the_plugin_route(method: str) -> None:
    found = explained("vllm", method)
    assert found["route"] == "plugin"
    assert "chains only" in found["plugin"]
    assert found["flags"][0] == "--speculative-config"
    assert json.loads(found["flags"][1])["model"] == f"spec_plugins.adapters.vllm.{method}"
    assert shlex.join(found["flags"]) in Result("explain", "vllm", method).words
    assert '"method": "suffix"' in explained("vllm", "suffix")["native"]
    assert explained("vllm", "combine")["route"] == "plugin"
    assert explained("vllm", "combine")["flags"] is None
    assert "options.proposers: missing; set it" in Result("explain", "vllm", "combine").words


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_registered_proposers_run_in_sglang_by_the_plugin_route(method: str) -> None:
    found = explained("sglang", method)
    assert found["route"] == "plugin"
    assert "SPEC_<NAME>" in found["plugin"]
    assert found["takes"]["trees"] == (method != "ngram")
    assert found["flags"] == ["--speculative-algorithm", f"SPEC_{method.upper()}"]
    assert shlex.join(found["flags"]) in Result("explain", "sglang", method).words
    assert ("NGRAM" in found["native"]) == (method == "ngram")
    assert (found["native"] == "none in SGLang") == (method != "ngram")


def test_explain_shows_flags_where_the_engine_is_started_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained("transformers", "ngram")["flags"] is None
    assert explained("tensorrt-llm", "ngram")["flags"] == [
        "--spec",
        '{"proposer": "ngram", "route": "plugin"}',
    ]
    assert "in its compiled engine builder alone" in Result("explain", "tensorrt-llm", "medusa").words
    assert explained("sglang", "eagle3")["flags"][:2] == ["--speculative-algorithm", "EAGLE3"]
    assert json.loads(explained("vllm", "eagle3")["flags"][1])["method"] == "eagle3"
    monkeypatch.delitem(registry().proposers, "medusa")
    monkeypatch.setattr(launch, "installed_version", lambda engine: "0.33.0")
    assert explained("vllm", "medusa")["flags"] is None
    assert "but vLLM 0.33 has no medusa" in Result("explain", "vllm", "medusa").words
    monkeypatch.setattr(launch, "installed_version", lambda engine: "0.32.0")
    assert json.loads(explained("vllm", "medusa")["flags"][1])["method"] == "medusa"
    assert " but " not in Result("explain", "vllm", "medusa").words


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_medusa_in_vllm_is_the_proposer_and_explain_says_where_vllms_own_was(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(launch, "installed_version", lambda engine: version)
    found = explained("vllm", "medusa")
    assert found["route"] == "plugin"
    assert "proposer 'medusa' of spec-plugins" in found["plugin"]
    assert '"method": "medusa"' in found["native"]
    assert "up to 0.32: 0.33 removed it" in found["native"]
    assert found["native"].endswith("Taken with `route: native`")
    shown = Result("explain", "vllm", "medusa").words
    assert "route plugin" in shown
    assert "Taken with `route: native`" in shown
    assert explained("sglang", "medusa")["native"] == "none in SGLang"
    assert "route: native" not in explained("transformers", "ngram")["native"]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa"])
def test_a_name_stands_for_weights_in_the_flags_that_explain_shows(method: str) -> None:
    weights = support.METHODS[method].example["options"]["model"]
    taken = [explained(engine, method) for engine in ("vllm", "sglang")]
    assert all(weights in shlex.join([*e["flags"], *e["environment"].values()]) for e in taken)
    # Of the plugin route too, whichever is taken.
    words = Result("explain", "vllm", method).words
    assert f'"model": "spec_plugins.adapters.vllm.{method}"' in words
    assert f"""--additional-config '{{"spec_plugins": {{"options": {{"model": "{weights}"}}}}}}'""" in words
    words = Result("explain", "sglang", method).words
    assert f"flags --speculative-algorithm SPEC_{method.upper()} --speculative-num-steps" in words
    assert f"""export SPEC_PLUGINS_CONFIG='{{"options": {{"model": "{weights}"}}}}'""" in words


@pytest.mark.parametrize(
    ("engine", "method", "nearest"),
    [
        ("sglang", "medusa", "eagle3 on sglang (native), or medusa on vllm (native)"),
    ],
)
def test_what_cannot_work_comes_with_the_nearest_that_does(
    engine: str, method: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry().proposers, "medusa")
    found = explained(engine, method)
    assert found["route"] is None
    assert found["nearest"] == nearest
    shown = Result("explain", engine, method).words
    assert "route none yet" in shown
    assert nearest in shown


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_head_methods_cannot_be_plugins_where_no_hidden_states_are_shown(
    method: str, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not registered:
        monkeypatch.delitem(registry().proposers, method)
    found = explained("tensorrt-llm", method)
    assert found["plugin"].startswith("not possible, since it needs hidden states")
    assert found["route"] == "native"
    for other in ("suffix", "draft_model"):
        assert f"proposer {other!r} of spec-plugins" in explained("tensorrt-llm", other)["plugin"]


@pytest.mark.usefixtures("strangers")
def test_strangers_are_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained("transformers", "states")["takes"]["probabilities"] is True
    assert explained("vllm", "states")["takes"] == {
        "trees": False,
        "predictions": False,
        "probabilities": True,
    }
    assert explained("sglang", "states")["takes"] == {
        "trees": True,
        "predictions": False,
        "probabilities": True,
    }
    # Its class says what it needs, and the table of methods does not have it.
    assert "needs hidden states" in explained("tensorrt-llm", "states")["plugin"]
    assert (
        explained("tensorrt-llm", "states")["nearest"]
        == "suffix on tensorrt-llm (plugin), or states on transformers (plugin)"
    )
    assert "pip install absent_extra" in explained("transformers", "heavy")["plugin"]
    less = support.replace(support.ENGINES["transformers"], provides=frozenset({spec_plugins.Need.TREES}))
    monkeypatch.setitem(support.ENGINES, "transformers", less)
    assert "it needs hidden_states" in explained("transformers", "states")["plugin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vlm"], "'vlm' is no engine; did you mean 'vllm'? Known: transformers, vllm"),
        (["vlm", "ngram"], "did you mean 'vllm'"),
        (["vllm", "egle3"], "'egle3' is no method; did you mean 'eagle3'? Known: calibration, combine"),
        (["vllm", "zzz"], "'zzz' is no method. Known: calibration, combine"),
    ],
)
def test_explain_suggests(arguments: list[str], message: str) -> None:
    refused = Result("explain", *arguments)
    assert refused.code == 2
    assert message in refused.err


def test_explain_without_a_method_shows_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry().proposers, "medusa")
    shown = Result("explain", "sglang")
    assert "medusa" in shown.out
    assert "none yet" in shown.out
    assert "which has no proposer 'medusa'. Nearest: eagle3 on sglang (native)" in shown.words
    every = json.loads(Result("explain", "vllm", "--json").out)
    assert {e["method"] for e in every} >= {*support.METHODS, *registry().proposers}


def test_every_nearest_method_is_known() -> None:
    for name, method in support.METHODS.items():
        assert set(method.nearest) <= set(support.METHODS) - {name}
    for engine in support.ENGINES.values():
        assert set(engine.native) <= set(support.METHODS)


def test_the_table_says_what_the_embedded_engine_provides() -> None:
    pytest.importorskip("transformers")
    from spec_plugins.adapters.transformers.engine import PROVIDES

    assert support.ENGINES["transformers"].provides == PROVIDES


# ---------------------------------------------------------------------------------------------- schema


def test_schema() -> None:
    schema = json.loads(Result("schema").out)
    assert {"proposer", "num_speculative_tokens", "options"} <= schema["properties"].keys()
    options = json.loads(Result("schema", "--proposer", "ngram").out)
    assert options["type"] == "object"
    assert options["properties"]
    refused = Result("schema", "--proposer", "ngrm")
    assert refused.code == 2
    assert "did you mean 'ngram'" in refused.err


# -------------------------------------------------------------------------------------------- generate


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    shown = Result("generate", *arguments, "--json")
    assert shown.code == 0, shown.err
    return [json.loads(line) for line in shown.out.splitlines()]


def test_generate_gives_the_same_text_with_and_without_speculation(tiny_model_dir: Path) -> None:
    model, prompts = str(tiny_model_dir), ["the cat sat", "on the mat"]
    common = [model, *prompts, "--max-new-tokens", "24", "--dtype", "float32", "--max-num-seqs", "2"]
    without = lines_of(*common)
    with_it = lines_of(*common, "--spec", "ngram", "--num-speculative-tokens", "3")
    assert [line["token_ids"] for line in with_it] == [line["token_ids"] for line in without]
    assert [line["index"] for line in with_it] == [0, 1]
    assert all(line["acceptance_length"] == 1 for line in without)
    assert all(line["finish_reason"] in ("stop", "length") for line in without)
    for line in with_it:
        assert line["accepted_tokens"] <= line["draft_tokens"] <= 3 * line["verify_steps"]
        assert line["acceptance_length"] == pytest.approx(1 + line["accepted_tokens"] / line["verify_steps"])


def test_generate_prints_text_and_one_line_of_statistics(tiny_model_dir: Path) -> None:
    common = ["generate", str(tiny_model_dir), "the cat", "--max-new-tokens", "12", "--dtype", "float32"]
    streamed = Result(*common, "--spec", '{"proposer": "suffix"}')
    whole = Result(*common, "--no-stream")
    assert streamed.code == whole.code == 0
    assert streamed.out == whole.out
    assert streamed.out.strip()
    (line,) = streamed.err.strip().splitlines()
    assert re.match(r"\d+ tokens in \d+ target forwards, [\d.]+ tokens a forward, [\d.]+ tokens/s", line)
    assert "draft tokens accepted" in line
    assert "draft tokens" not in whole.err


def test_generate_reads_prompts_from_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("the cat\n\nthe mat\n")
    lines.write_text(
        json.dumps({"prompt": "the cat"})
        + "\n\n"
        + json.dumps({"messages": [{"role": "user", "content": "the mat"}]})
    )
    common = ["generate", str(tiny_model_dir), "--max-new-tokens", "6", "--prompt-file"]
    from_text, from_lines = Result(*common, str(text)), Result(*common, str(lines))
    assert from_text.out == from_lines.out
    assert "=== 1 of 2" in from_text.out
    assert "=== 2 of 2" in from_text.out


def test_generate_uses_the_chat_template_unless_told_not_to(tiny_model_dir: Path, tmp_path: Path) -> None:
    common = ["the cat", "--max-new-tokens", "8"]
    as_chat, as_text = (
        lines_of(str(tiny_model_dir), *common),
        lines_of(str(tiny_model_dir), *common, "--no-chat"),
    )
    assert as_chat[0]["token_ids"] != as_text[0]["token_ids"]
    without = shutil.copytree(tiny_model_dir, tmp_path / "m", ignore=shutil.ignore_patterns("chat_template*"))
    assert lines_of(str(without), *common) == as_text
    refused = Result("generate", str(without), *common, "--chat")
    assert refused.code == 2
    assert "no chat template" in refused.err


def test_generate_samples_repeatably_and_stops(tiny_model_dir: Path) -> None:
    common = [str(tiny_model_dir), "the cat", "--max-new-tokens", "12", "--no-chat"]
    sampled = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]
    first = lines_of(*common, *sampled)
    assert first == lines_of(*common, *sampled)
    text = lines_of(*common)[0]["text"]
    (cut,) = lines_of(*common, "--stop", text[2:4])
    assert cut["finish_reason"] == "stop"
    assert text.startswith(cut["text"])
    assert len(cut["text"]) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--spec", "ngrm"], "did you mean 'ngram'"),
        (["x", "--spec", "{nonsense"], "is not valid JSON"),
        (["x", "--spec", '{"proposer": "ngrm"}'], "did you mean 'ngram'"),
        (["x", "--spec", '{"proposer": "ngram", "options": {"nope": 1}}'], "options.nope: unknown field"),
        (["x", "--spec", "/nowhere/spec.json"], "cannot read the configuration"),
        (["x", "--spec", "ngram", "--num-speculative-tokens", "0"], "set it to at least 1"),
        (["x", "--num-speculative-tokens", "4"], "needs --spec"),
        ([], "there is no prompt"),
        (["--prompt-file", "/nowhere/prompts.txt"], "cannot be read"),
        (["--prompt-file", "prompts.csv"], "give a .txt or a .jsonl file"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens: 0 is out of range"),
        (["x", "--top-p", "0"], "top_p: 0.0 is out of range"),
        (["x", "--max-num-seqs", "0"], "max_num_seqs: 0 is out of range"),
    ],
)
def test_generate_refuses_with_one_message(tiny_model_dir: Path, arguments: list[str], message: str) -> None:
    refused = Result("generate", str(tiny_model_dir), *arguments)
    assert refused.code == 2
    assert refused.out == ""
    assert refused.err.startswith("Error: ")
    assert refused.err.count("Error") == 1
    assert message in refused.err


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not valid JSON"), ("[]", "line 2: give 'prompt'"), ('{"messages": [{}]}', "'role'")],
)
def test_generate_names_the_faulty_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "x"}) + "\n" + line)
    refused = Result("generate", "model", "--prompt-file", str(file))
    assert refused.code == 2
    assert message in refused.err


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_generate_names_the_missing_folder(model: str) -> None:
    refused = Result("generate", model, "x")
    assert refused.code == 2
    assert f"there is no folder {model!r}" in refused.err


def test_generate_says_that_a_folder_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    refused = Result("generate", str(tmp_path), "x")
    assert refused.code == 2
    assert "cannot be loaded" in refused.err


def test_messages_need_the_chat_template(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    refused = Result("generate", str(tiny_model_dir), "--prompt-file", str(file), "--no-chat")
    assert refused.code == 2
    assert "--no-chat" in refused.err


def test_generate_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spec_plugins.adapters.transformers", None)
    refused = Result("generate", "model", "x")
    assert refused.code == 2
    assert "pip install 'spec-plugins[transformers]'" in refused.err


@pytest.mark.usefixtures("strangers")
def test_generate_counts_the_proposers_faults(tiny_model_dir: Path) -> None:
    shown = Result("generate", str(tiny_model_dir), "x", "--spec", "states", "--max-new-tokens", "4")
    assert shown.code == 0
    assert "faults of the proposer: raised" in shown.err


# -------------------------------------------------------------------------------------------- progress


def watched(monkeypatch: pytest.MonkeyPatch, show: Callable[[], Any], seconds: float) -> str:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=80)
    monkeypatch.setattr(output, "interactive", lambda: True)
    monkeypatch.setattr(output, "console", lambda *, stderr=False: terminal)
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    with output.progress(True, show):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and "shown" not in stream.getvalue():
            time.sleep(0.01)
    return stream.getvalue()


def test_progress_shows_only_what_takes_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, lambda: Text("shown"), 0.0) == ""
    assert "shown" in watched(monkeypatch, lambda: Text("shown"), 10.0)


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress(True, lambda: Text("shown")):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_bar_counts_prompts(tiny_model_dir: Path) -> None:
    from spec_plugins.adapters.transformers import Engine, SamplingParams

    engine = Engine(str(tiny_model_dir), max_num_seqs=1)
    params = SamplingParams.of(max_new_tokens=4, ignore_eos=True)
    requests = [engine.request(i, "the cat", params) for i in range(3)]
    with engine.accept(requests):
        while engine.waiting:
            engine.step()
        stream = io.StringIO()
        Console(file=stream, width=80).print(generate._bar(requests))
    assert "2 of 3 prompts" in stream.getvalue()


# ------------------------------------------------------------------------------------------------ demo


def test_demo_refuses_other_engines(tmp_path: Path) -> None:
    folders = ["--model", str(tmp_path), "--data", str(tmp_path)]
    refused = Result("demo", *folders, "--engine", "tensorrt-llm")
    assert refused.code == 2
    assert "use --engine transformers" in refused.words
    assert "did you mean 'sglang'" in Result("demo", *folders, "--engine", "sglan").err


def test_demo_refuses_missing_folders(tmp_path: Path) -> None:
    refused = Result("demo", "--model", "/nowhere", "--data", str(tmp_path))
    assert refused.code == 2
    assert "does not exist" in refused.words


def test_demo_runs_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    demo = pytest.importorskip("spec_plugins.evaluation.demo")
    asked: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        print("a table")
        return {"speedup": 2}

    monkeypatch.setattr(demo, "run", run)
    options = ["--model", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path), "--minutes", "1.5"]
    shown = Result("demo", *options, "--json")
    assert json.loads(shown.out) == {"speedup": 2}
    assert "a table" in shown.err
    assert asked == [(tmp_path, tmp_path, tmp_path, "transformers", 1.5, ())]
    assert Result("demo", *options, "--spec", "suffix", "--spec", "ngram").out == "a table\n"
    assert asked[1][-1] == ["suffix", "ngram"]
