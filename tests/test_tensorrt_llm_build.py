"""``spec-plugins build tensorrt-llm``: without TensorRT-LLM, and with stand-ins of its programs.

``trtllm-build`` is a small script here, which writes what the real one would in ``config.json``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")
from tensorrt_llm_targets import ranks_of, target_checkpoint
from test_cli import Result
from trained_heads import EAGLE, EAGLE3, MEDUSA, make, store

from spec_plugins import launch
from spec_plugins.adapters.tensorrt_llm import building
from spec_plugins.adapters.tensorrt_llm.engine import check_engine, executor_config, runtime_of
from spec_plugins.adapters.tensorrt_llm.trees import lookahead_draft_len
from spec_plugins.checkpoints import write_head
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError

TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
MEDUSA_SPEC: dict[str, Any] = {"proposer": "medusa", "options": {"model": "heads", "choices": TREE}}
EAGLE_SPEC: dict[str, Any] = {"proposer": "eagle", "options": {"model": "eagle", "choices": TREE}}
LOOKAHEAD_SPEC: dict[str, Any] = {
    "proposer": "lookahead", "options": {"window": 7, "ngram": 7, "verification_set": 7}
}  # fmt: skip
DRAFT_SPEC: dict[str, Any] = {
    "proposer": "draft_model", "num_speculative_tokens": 4, "options": {"model": "draft"}
}  # fmt: skip
MODES = {"medusa": 4, "eagle": 32, "lookahead_decoding": 8, "draft_tokens_external": 2}
BUILDER = """#!{python}
import json, pathlib, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, checkpoint = pathlib.Path(words["--output_dir"]), pathlib.Path(words["--checkpoint_dir"])
print("building", flush=True)
config = json.loads((checkpoint / "config.json").read_text())
mode = {modes}.get(words.get("--speculative_decoding_mode"), 1)
for rank in range(config["mapping"]["tp_size"]):
    (out / f"rank{{rank}}.engine").write_text("engine")
    print("rank", rank, flush=True)
{more}
drafts = int(words.get("--max_draft_len", 0))
built = {{"max_draft_len": drafts, "speculative_decoding_mode": mode}}
(out / "config.json").write_text(json.dumps({{"build_config": built, "pretrained_config": config}}))
"""


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "installed_version", lambda engine: None)
    write_head(make(MEDUSA), "heads", "medusa")
    write_head(make(EAGLE), "eagle", "eagle")
    target_checkpoint(Path("target"), 2)
    target_checkpoint(Path("draft"))


def builder(more: str = "") -> None:
    """Puts the stand-in of ``trtllm-build`` on PATH."""
    Path("bin").mkdir(exist_ok=True)
    file = Path("bin", "trtllm-build")
    file.write_text(BUILDER.format(python=sys.executable, modes=MODES, more=more))
    file.chmod(0o755)


def build(spec: Any, *more: str, out: str = "out", checkpoint: str = "target") -> Result:
    return Result(
        "build", "tensorrt-llm", json.dumps(spec), "--checkpoint", checkpoint, "--out", out, *more
    )  # fmt: skip


def runtime() -> dict[str, Any]:
    found = json.loads(Path("out", "runtime.json").read_text())
    assert isinstance(found, dict)
    return found


def everything() -> list[Path]:
    return sorted(Path().rglob("*"))


# -------------------------------------------------------------------------------------- what is written


def test_lookaheads_draft_length_is_tensorrt_llms() -> None:
    assert lookahead_draft_len(7, 7, 7) == 83
    assert lookahead_draft_len(4, 3, 4) == 15
    assert lookahead_draft_len(1, 1, 0) == 0


@pytest.mark.parametrize(
    ("spec", "mode", "length", "decoding", "arguments"),
    [
        (
            MEDUSA_SPEC, "medusa", 6, {"medusa_choices": TREE},
            ["--medusa_choices=[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"],
        ),
        (
            EAGLE_SPEC, "eagle", 6,
            {"eagle_config": {"eagle_choices": TREE, "greedy_sampling": True, "posterior_threshold": None}},
            ["--eagle_choices=[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"],
        ),
        (
            {"proposer": "eagle", "num_speculative_tokens": 2,
             "options": {"model": "eagle", "posterior_threshold": 0.09}}, "eagle", 2,
            {"eagle_config": {
                "eagle_choices": [[0], [0, 0]], "greedy_sampling": False, "posterior_threshold": 0.09}},
            ["--eagle_choices=[[0],[0,0]]", "--eagle_posterior_threshold=0.09"],
        ),
        (
            LOOKAHEAD_SPEC, "lookahead_decoding", 83,
            {"lookahead_decoding_config": {
                "max_window_size": 7, "max_ngram_size": 7, "max_verification_set_size": 7}},
            ["--lookahead_config=[7,7,7]"],
        ),
        (
            DRAFT_SPEC, "draft_tokens_external", 4, None,
            ["--draft_engine_dir=draft-engine", "--draft_target_model_config=[4,[0],[0],False]",
             "--kv_cache_enable_block_reuse"],
        ),
    ],
)  # fmt: skip
def test_a_configuration_becomes_files_and_a_command(
    spec: Any, mode: str, length: int, decoding: Any, arguments: list[str]
) -> None:
    done = build(spec, "--max-batch-size", "8", "--max_seq_len", "512")
    assert done.code == 0, done.err
    assert "trtllm-build is not on PATH" in done.err
    held = runtime()
    assert (held["speculative_decoding_mode"], held["max_draft_len"]) == (mode, length)
    assert (held.get("decoding_config"), held["run_arguments"]) == (decoding, arguments)
    joined = spec["proposer"] in ("medusa", "eagle")
    checkpoint = Path("out/checkpoint" if joined else "target").absolute()
    command = [
        "trtllm-build", "--checkpoint_dir", str(checkpoint),
        "--output_dir", str(Path("out/engine").absolute()), "--gemm_plugin", "bfloat16",
        "--max_batch_size", "8", "--speculative_decoding_mode", mode, "--max_draft_len", str(length),
    ]  # fmt: skip
    paged = [] if mode in ("medusa", "lookahead_decoding") else ["--use_paged_context_fmha", "enable"]
    lines = [shlex.split(line) for line in done.out.splitlines()[1:]]
    assert lines[0] == [*command, *paged, "--max_seq_len", "512"]
    if mode == "draft_tokens_external":
        assert lines[1][:5] == [
            "trtllm-build", "--checkpoint_dir", str(Path("draft").absolute()), "--output_dir",
            str(Path("out/draft-engine").absolute()),
        ]  # fmt: skip
        assert "--speculative_decoding_mode" not in lines[1]
    assert sorted(p.name for p in Path("out").iterdir()) == [*["checkpoint"] * joined, "runtime.json"]
    if joined:
        config = json.loads((checkpoint / "config.json").read_text())
        assert config["max_draft_len"] == length
        assert len(ranks_of(checkpoint)) == 2


def test_eagles_default_is_a_chain() -> None:
    """Of as many tokens as TensorRT-LLM's own converter has nets."""
    build({"proposer": "eagle", "options": {"model": "eagle"}})
    assert json.loads(Path("out", "checkpoint", "config.json").read_text())["num_eagle_layers"] == 4


@pytest.mark.parametrize(
    ("accuracies", "more", "tree"),
    [
        # Worth .6, .2, .24, .12, .072; and for another head's record .6, .5, .3, .25.
        (((0.6, 0.2), (0.4, 0.2), (0.3, 0.1)), 4, [[0], [1], [0, 0], [0, 1]]),
        (((0.6, 0.5), (0.1, 0.1), (0.1, 0.1)), 3, [[0], [1], [0, 0]]),
        (((0.9, 0.1), (0.9, 0.1), (0.9, 0.1)), 4, [[0], [1], [0, 0], [0, 0, 0]]),
    ],
)
def test_a_medusa_tree_is_chosen_by_what_the_head_records(accuracies: Any, more: int, tree: Any) -> None:
    write_head(make(MEDUSA.model_copy(update={"accuracies": accuracies})), "measured", "medusa")
    spec = {
        "proposer": "medusa", "num_speculative_tokens": 3, "max_draft_nodes": more,
        "options": {"model": "measured"},
    }  # fmt: skip
    done = build(spec)
    assert done.code == 0, done.err
    assert f"the tree of {more} draft tokens was chosen by the accuracies" in done.err
    assert "no effect" not in done.err
    assert runtime()["decoding_config"] == {"medusa_choices": tree}
    config = json.loads(Path("out", "checkpoint", "config.json").read_text())
    assert (config["max_draft_len"], config["num_medusa_heads"]) == (more, 3)


def test_a_chosen_tree_keeps_within_the_head_and_num_speculative_tokens() -> None:
    def tree(**fields: Any) -> list[list[int]]:
        done = build({"proposer": "medusa", "options": {"model": "heads"}, **fields}, "--dry-run", "--json")
        choices = json.loads(done.out)["runtime"]["decoding_config"]["medusa_choices"]
        assert isinstance(choices, list)
        return choices

    assert len(tree()) == 2 + 4 + 8  # all that the record has: two guesses of three heads
    assert max(map(len, tree(num_speculative_tokens=9, max_draft_nodes=9))) == 3
    assert max(map(len, tree(num_speculative_tokens=2))) == 2
    wide = tuple(tuple(0.9 / (rank + 2) for rank in range(10)) for _ in range(3))
    write_head(make(MEDUSA.model_copy(update={"accuracies": wide})), "wide", "medusa")
    assert len(tree(options={"model": "wide"})) == 24


def test_without_a_record_a_chain_is_drafted_and_the_reason_told() -> None:
    write_head(make(MEDUSA.model_copy(update={"accuracies": ()})), "unmeasured", "medusa")
    done = build({"proposer": "medusa", "options": {"model": "unmeasured"}})
    assert "record no accuracies to choose a tree by, so a chain of 3 is drafted" in done.err
    assert runtime()["decoding_config"] == {"medusa_choices": [[0], [0, 0], [0, 0, 0]]}
    # The control: with choices of one's own there is nothing to tell.
    assert "accuracies" not in build(MEDUSA_SPEC, "--dry-run").err


def test_a_dry_run_writes_nothing_and_json_is_for_programs() -> None:
    before = everything()
    done = build(MEDUSA_SPEC, "--dry-run", "--json")
    told = json.loads(done.out)
    assert (told["method"], told["written"], told["built"]) == ("medusa", False, False)
    assert told["commands"]["engine"][0] == "trtllm-build"
    assert everything() == before
    assert "nothing was written" in build(MEDUSA_SPEC, "--dry-run").err
    assert everything() == before


def test_notes_say_what_has_no_effect_and_what_is_not_lossless() -> None:
    shown = build(
        {**LOOKAHEAD_SPEC, "num_speculative_tokens": 9, "containment": {"max_faults": 1}}, "--dry-run"
    )
    assert "containment and num_speculative_tokens: no effect" in shown.err
    options = {**EAGLE_SPEC["options"], "posterior_threshold": 0.1}
    shown = build({**EAGLE_SPEC, "options": options}, "--dry-run")
    assert "does not keep the target's distribution" in shown.err
    target_checkpoint(Path("half"), dtype="float16")
    assert (
        "converted from torch.bfloat16 to torch.float16"
        in build(MEDUSA_SPEC, "--dry-run", checkpoint="half").err
    )


# ------------------------------------------------------------------------------------------- what is run


@pytest.mark.parametrize(
    "spec", [MEDUSA_SPEC, EAGLE_SPEC, LOOKAHEAD_SPEC, DRAFT_SPEC], ids=lambda s: s["proposer"]
)
def test_trtllm_build_is_run_where_it_is(spec: Any) -> None:
    builder()
    done = build(spec)
    assert done.code == 0, done.err
    assert "built: " in done.out
    built = json.loads(Path("out/engine/config.json").read_text())
    assert built["build_config"]["max_draft_len"] == runtime()["max_draft_len"]
    assert sorted(p.name for p in Path("out/engine").glob("rank*")) == ["rank0.engine", "rank1.engine"]
    assert Path("out/engine.log").read_text().startswith("building\nrank 0\n")
    assert Path("out/draft-engine").exists() == (spec is DRAFT_SPEC)


def test_a_failed_build_leaves_the_checkpoint_and_no_engine() -> None:
    builder("sys.exit('out of memory')")
    done = build(MEDUSA_SPEC)
    assert done.code == 2
    assert "trtllm-build ended with exit code 1" in done.err
    assert "out of memory" in done.err
    assert sorted(p.name for p in Path("out").iterdir()) == ["checkpoint", "engine.log", "runtime.json"]


def test_an_engine_that_was_built_otherwise_is_refused() -> None:
    builder("words['--max_draft_len'] = 5")
    done = build(MEDUSA_SPEC)
    assert done.code == 2
    assert "max_draft_len is 5, and 6 is asked for" in done.err
    assert not Path("out/engine").exists()


def test_ctrl_c_ends_the_builder_and_leaves_no_engine() -> None:
    builder("print(__import__('os').getpid(), flush=True)\ntime.sleep(60)")
    config = building.configured(LOOKAHEAD_SPEC, None)
    plan = building.prepare(config, "target", "out", 8)
    building.write(plan)
    seen: list[str] = []

    def interrupt(folder: str, line: str, done: int) -> None:
        seen.append(line)
        if line.isdigit():
            assert (folder, done) == ("engine", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        building.build(plan, "bin/trtllm-build", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen[-1]), 0)
    assert sorted(p.name for p in Path("out").iterdir()) == ["engine.log", "runtime.json"]


# --------------------------------------------------------------------------- built against asked for


def engine_folder(name: str, spec: Any, **built: Any) -> Path:
    """As ``trtllm-build`` would have written it for a configuration, but for ``built``."""
    folder = Path(name)
    folder.mkdir()
    asked = runtime_of(Config(**spec))
    number = MODES[asked["speculative_decoding_mode"]]
    sizes = {"max_draft_len": asked["max_draft_len"], "speculative_decoding_mode": number}
    model = {"num_medusa_heads": 3, "num_eagle_layers": 3, "max_non_leaves_per_layer": 2}
    config = {
        "version": "1.2.0",
        "build_config": {key: built.get(key, value) for key, value in sizes.items()},
        "pretrained_config": {key: built.get(key, value) for key, value in model.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("spec", "built", "says"),
    [
        (MEDUSA_SPEC, {}, ""),
        (MEDUSA_SPEC, {"max_draft_len": 63}, ""),
        (MEDUSA_SPEC, {"speculative_decoding_mode": "MEDUSA"}, ""),
        (MEDUSA_SPEC, {"max_draft_len": 5}, "max_draft_len is 5, and 6 is asked for"),
        (MEDUSA_SPEC, {"num_medusa_heads": 2}, "num_medusa_heads is 2, and 3 is asked for"),
        (MEDUSA_SPEC, {"speculative_decoding_mode": 32}, "is 'eagle', and 'medusa' is asked for"),
        (MEDUSA_SPEC, {"speculative_decoding_mode": 1}, "is 'none', and 'medusa' is asked for"),
        (MEDUSA_SPEC, {"speculative_decoding_mode": 64}, "is 64, and 'medusa' is asked for"),
        (EAGLE_SPEC, {}, ""),
        (EAGLE_SPEC, {"num_eagle_layers": 4}, "num_eagle_layers is 4, and 3 is asked for"),
        (EAGLE_SPEC, {"max_non_leaves_per_layer": 1}, "max_non_leaves_per_layer is 1, and 2 is asked for"),
        (LOOKAHEAD_SPEC, {}, ""),
        (LOOKAHEAD_SPEC, {"max_draft_len": 84}, "max_draft_len is 84, and 83 is asked for"),
        (DRAFT_SPEC, {"max_draft_len": None}, "max_draft_len is None, and 4 is asked for"),
    ],
)
def test_an_engine_is_compared_with_what_it_is_run_with(spec: Any, built: dict[str, Any], says: str) -> None:
    folder = engine_folder("engine", spec, **built)
    shown = Result("build", "tensorrt-llm", json.dumps(spec), "--check", "engine")
    assert shown.code == (2 if says else 0)
    assert says in shown.err
    if says:
        with pytest.raises(ConfigError, match="is asked for"):
            check_engine(folder, runtime_of(Config(**spec)))


def test_a_check_chooses_the_tree_as_building_did() -> None:
    engine_folder("engine", MEDUSA_SPEC, max_draft_len=14)
    engine_folder("small", MEDUSA_SPEC, max_draft_len=13)
    spec = json.dumps({"proposer": "medusa", "options": {"model": "heads"}})
    assert Result("build", "tensorrt-llm", spec, "--check", "engine").code == 0
    refused = Result("build", "tensorrt-llm", spec, "--check", "small")
    assert "max_draft_len is 13, and 14 is asked for" in refused.err
    Path("engine/config.json").write_text("{}")
    refused = Result("build", "tensorrt-llm", spec, "--check", "engine")
    assert "has no build_config and pretrained_config" in refused.err


@pytest.mark.parametrize("spec", [MEDUSA_SPEC, EAGLE_SPEC, LOOKAHEAD_SPEC], ids=lambda s: s["proposer"])
def test_the_executors_configuration_is_made_of_the_file(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins of the executor's classes, which only keep what they are given."""
    executor: Any = ModuleType("tensorrt_llm.bindings.executor")
    for name in ("DecodingConfig", "EagleConfig", "LookaheadDecodingConfig"):
        setattr(executor, name, SimpleNamespace)
    executor.DecodingMode = SimpleNamespace(
        Medusa=lambda: "medusa", Eagle=lambda: "eagle", Lookahead=lambda: "lookahead"
    )
    for name in ("tensorrt_llm", "tensorrt_llm.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings.executor", executor)
    assert build(spec).code == 0
    made = executor_config(engine_folder("engine", spec), "out/runtime.json")
    assert made.decoding_mode == spec["proposer"]
    [held] = [value for name, value in vars(made).items() if name != "decoding_mode"]
    [asked] = runtime()["decoding_config"].values()
    assert (held if isinstance(held, list) else vars(held)) == asked
    with pytest.raises(ConfigError, match="ExternalDraftTokensConfig"):
        executor_config(engine_folder("other", DRAFT_SPEC), runtime_of(Config(**DRAFT_SPEC)))


# ----------------------------------------------------------------------------------------------- refusals


class Danger:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def spoil(what: str) -> None:
    """Makes the heads wrong in one way."""
    config = json.loads(Path("heads", "config.json").read_text())
    if what == "heads":
        config["medusa_num_heads"] = 4
    elif what == "tensor":
        store(Path("heads"), lambda t: {n: v for n, v in t.items() if n != "1.0.linear.weight"})
    elif what == "hidden":
        store(Path("heads"), lambda t: {n: v[..., :-1].contiguous() for n, v in t.items()})
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    Path("heads", "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("command", ["build", "convert"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("heads", "lacks 3.0.linear.weight"),
        ("tensor", "lacks 1.0.linear.weight"),
        ("hidden", "not those that the configuration calls for"),
    ],
)
def test_broken_heads_are_one_error_and_nothing_is_written(command: str, what: str, says: str) -> None:
    spoil(what)
    before = everything()
    if command == "build":
        refused = build(MEDUSA_SPEC)
    else:
        refused = Result("convert", "heads", "--to", "tensorrt-llm", "--target", "target", "--out", "out")
    assert refused.code == 2
    assert says in refused.err
    assert refused.err.count("Error:") == 1
    assert everything() == before


@pytest.mark.parametrize("command", ["build", "convert"])
def test_a_pickle_with_code_in_it_is_not_run(command: str) -> None:
    import torch

    Path("heads", "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Danger()}, Path("heads", "medusa_lm_head.pt"))
    before = everything()
    if command == "build":
        refused = build(MEDUSA_SPEC)
    else:
        refused = Result("convert", "heads", "--to", "tensorrt-llm", "--target", "target", "--out", "out")
    assert refused.code == 2
    assert "loading that could run code; nothing of it was run" in refused.err
    assert everything() == before
    # The control: loaded without a guard, it runs.
    torch.load(Path("heads", "medusa_lm_head.pt"), weights_only=False)
    assert Path("ran").is_dir()


@pytest.mark.parametrize(
    ("spec", "more", "says"),
    [
        (
            MEDUSA_SPEC,
            ["--engine-version", "1.3"],
            "1.3 has no builder: 1.2 was the last. Nearest: eagle3 on",
        ),
        (EAGLE_SPEC, ["--engine-version", "2.0"], "2.0 has no builder: 1.2 was the last. Nearest: eagle3 on"),
        (LOOKAHEAD_SPEC, ["--engine-version", "1.3"], "Nearest: lookahead on tensorrt-llm (plugin)"),
        (
            DRAFT_SPEC,
            ["--engine-version", "1.3"],
            'draft_model on tensorrt-llm (native), {"proposer": "draft_model"',
        ),
        (DRAFT_SPEC, ["--engine-version", "new"], "'new' is no version of TensorRT-LLM"),
        ({"proposer": "eagle3"}, [], "has medusa, eagle, lookahead, draft_model, not 'eagle3'"),
        ({}, [], "not 'the default'"),
        ({**MEDUSA_SPEC, "route": "plugin"}, [], "route: 'plugin' runs a proposer"),
        ({"proposer": "medusa"}, [], "options.model: missing; set it"),
        ({"proposer": "medusa", "options": {"model": "eagle"}}, [], "is a head of eagle, not of medusa"),
        ({"proposer": "eagle", "options": {"model": "eagle3"}}, [], "is a head of eagle3, not of eagle"),
        ({**MEDUSA_SPEC, "options": {"model": "heads", "chioces": []}}, [], "options.chioces: unknown field"),
        ({"proposer": "lookahead", "options": {"window": 1}}, [], "options.window"),
        (
            {**MEDUSA_SPEC, "options": {"model": "heads", "choices": [[0] * n for n in range(1, 5)]}},
            [],
            "4 tokens deep",
        ),
        (EAGLE_SPEC, ["--max-batch-size", "513"], "513, and with EAGLE TensorRT-LLM takes 512 at most"),
        (MEDUSA_SPEC, ["--max_draft_len=9"], "--max_draft_len: the configuration says it here; leave it out"),
        (MEDUSA_SPEC, ["--output_dir", "x"], "--output_dir: --out says it here; leave it out"),
        (DRAFT_SPEC, ["--checkpoint", "heads"], "no checkpoint of TensorRT-LLM's"),
        ({**DRAFT_SPEC, "options": {"model": "other"}}, [], "the draft has 100 tokens, and the target 128"),
        (MEDUSA_SPEC, ["--out", "heads"], "is there already, and not empty"),
    ],
)
def test_refusals_name_the_reason_and_write_nothing(spec: Any, more: list[str], says: str) -> None:
    target_checkpoint(Path("other"), vocab=100)
    write_head(make(EAGLE3), "eagle3", "eagle")
    before = everything()
    refused = build(spec, *more)
    assert refused.code == 2, refused.out
    assert says in refused.err
    assert everything() == before


def test_the_installed_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "installed_version", lambda engine: "1.3.0rc1")
    assert "1.3 has no builder" in build(MEDUSA_SPEC, "--dry-run").err
    assert build(MEDUSA_SPEC, "--dry-run", "--engine-version", "1.2.0").code == 0
    monkeypatch.setattr(launch, "installed_version", lambda engine: "1.1.0")
    assert build(MEDUSA_SPEC, "--dry-run").code == 0


def test_only_tensorrt_llm_builds_and_it_needs_a_target_and_a_folder() -> None:
    refused = Result("build", "vllm", "suffix")
    assert refused.code == 2
    assert "vLLM takes a configuration as it is" in refused.err
    for missing, given in (("--checkpoint", ["--out", "x"]), ("--out", ["--checkpoint", "target"])):
        refused = Result("build", "tensorrt-llm", json.dumps(MEDUSA_SPEC), *given)
        assert f"{missing}: missing" in refused.err


# ------------------------------------------------------------------------------------------------ convert


def test_convert_writes_a_chain_and_names_the_command() -> None:
    done = Result("convert", "heads", "--to", "tensorrt-llm", "--target", "target")
    assert done.code == 0, done.err
    first, second = done.out.splitlines()
    assert (
        first
        == f"medusa, medusa to tensorrt-llm: with the target, 2 ranks, in {Path.cwd()}/heads-tensorrt-llm"
    )
    assert second.startswith("tensorrt-llm: trtllm-build --checkpoint_dir")
    config = json.loads(Path("heads-tensorrt-llm", "config.json").read_text())
    assert (config["architecture"], config["max_draft_len"]) == ("MedusaForCausalLM", 3)
    done = Result(
        "convert", "eagle", "--to", "tensorrt-llm", "--target", "target", "--out", "e", "--json",
        "--num-speculative-tokens", "2",
    )  # fmt: skip
    assert json.loads(done.out)["flags"]["tensorrt-llm"] == [
        "trtllm-build", "--checkpoint_dir", "e", "--output_dir", "e-engine", "--gemm_plugin", "bfloat16",
        "--max_batch_size", "64", "--speculative_decoding_mode", "eagle", "--max_draft_len", "2",
        "--use_paged_context_fmha", "enable",
    ]  # fmt: skip
    assert json.loads(Path("e", "config.json").read_text())["num_eagle_layers"] == 2
    refused = Result("convert", "heads", "--to", "tensorrt-llm", "--out", "f")
    assert "`spec-plugins convert --to tensorrt-llm --target CHECKPOINT`" in refused.err
