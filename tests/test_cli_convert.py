"""``spec-plugins convert`` and ``spec-plugins inspect``."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")

from test_cli import Result
from trained_heads import EAGLE, EAGLE3, HEADS, MEDUSA, edit, make, model_folder, same

from spec_plugins import launch
from spec_plugins.checkpoints import read_head, write_head


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "installed_version", lambda engine: None)


@pytest.fixture
def eagle3() -> Path:
    write_head(make(EAGLE3), "eagle3", "eagle")
    return Path("eagle3")


def rows(shown: Result) -> dict[str, str]:
    """The table of ``inspect``."""
    lines = [line.strip().partition("  ") for line in shown.out.splitlines() if "  " in line.strip()]
    return {name: value.strip() for name, _, value in lines}


# --------------------------------------------------------------------------------------------- convert


def test_convert_says_what_it_did_and_how_to_use_it(eagle3: Path) -> None:
    done = Result("convert", "eagle3", "--to", "vllm", "--num-speculative-tokens", "5")
    assert done.code == 0
    assert same(read_head("eagle3-vllm"), make(EAGLE3))
    first, second = done.out.splitlines()
    assert (
        first == f"eagle3, eagle to vllm: {len(make(EAGLE3).tensors)} tensors in {Path.cwd() / 'eagle3-vllm'}"
    )
    engine, _, flags = second.partition(": ")
    # As `args` writes them.
    wanted = {
        "proposer": "eagle3", "route": "native", "num_speculative_tokens": 5,
        "options": {"model": str(Path("eagle3-vllm").resolve())},
    }  # fmt: skip
    assert (engine, shlex.split(flags)) == ("vllm", launch.prepare("vllm", wanted).flags)


def test_convert_prints_flags_for_every_engine_that_loads_the_result(eagle3: Path) -> None:
    done = Result("convert", "eagle3", "--to", "spec-plugins")
    assert done.out.count("\n") == 1
    done = Result("convert", "eagle3-spec-plugins", "--to", "eagle", "--out", "back", "--json")
    told = json.loads(done.out)
    assert (told["method"], told["from"], told["to"], told["folder"]) == (
        "eagle3", "spec-plugins", "eagle", "back",
    )  # fmt: skip
    assert set(told["flags"]) == {"vllm", "sglang"}
    assert "--speculative-draft-model-path" in told["flags"]["sglang"]
    assert same(read_head("back"), make(EAGLE3))


def test_convert_medusa_needs_the_target_and_says_what_vllm_removed() -> None:
    write_head(make(HEADS["medusa, the target's"]), "heads", "spec-plugins")
    model_folder(Path("target"))
    refused = Result("convert", "heads", "--to", "vllm")
    assert refused.code == 2
    assert "the LM head, which is the target's own and has to be copied in: add --target" in refused.err
    assert not Path("heads-vllm").exists()
    done = Result("convert", "heads", "--to", "vllm", "--target", "target")
    assert done.code == 0
    assert Path("heads-vllm", "model.safetensors").is_file()
    assert "0.33 removed it" in done.err


def test_convert_refuses_before_it_writes(eagle3: Path, tiny_model_dir: Path) -> None:
    Path("full").mkdir()
    Path("full", "mine").write_text("mine")
    model_folder(Path("narrow"), hidden_size=16)
    for arguments, message in (
        (["absent", "--to", "vllm"], "absent: no such folder"),
        (["eagle3", "--to", "vlm"], "'vlm' is no layout; did you mean 'vllm'?"),
        (["eagle3", "--to", "tensorrt-llm"], "engine builder has no eagle3. Nearest: --to eagle"),
        (["eagle3", "--to", "medusa"], "medusa has no place for eagle3"),
        (["eagle3", "--to", "vllm", "--out", "full"], "full: is there already, and not empty"),
        (["eagle3", "--to", "vllm", "--target", "narrow"], "does not fit the target"),
        ([str(tiny_model_dir), "--to", "vllm"], "is a causal language model and needs no conversion"),
    ):
        before = sorted(Path().rglob("*"))
        refused = Result("convert", *arguments)
        assert refused.code == 2, arguments
        assert message in refused.err
        assert refused.err.count("Error:") == 1
        assert sorted(Path().rglob("*")) == before


def test_convert_help_has_examples() -> None:
    shown = Result("convert", "--help")
    assert "spec-plugins convert path/to/medusa --to vllm --target path/to/model" in shown.words


# --------------------------------------------------------------------------------------------- inspect


def test_inspect_says_what_a_head_is(eagle3: Path) -> None:
    shown = Result("inspect", "eagle3")
    assert shown.code == 0
    found = rows(shown)
    assert found["method"].startswith("eagle3: ")
    assert (found["layout"], found["made for"]) == ("eagle", "acme/target")
    assert (found["hidden size"], found["vocabulary"], found["draft vocabulary"]) == ("32", "128", "40")
    assert found["target layers"] == "the input of the usual ones, 2, the middle one and the last but 2"
    assert found["vllm"].startswith("loads it as it is: --speculative-config")
    assert found["sglang"].startswith("loads it as it is: --speculative-algorithm EAGLE3")
    head = make(EAGLE3)
    weights = [t for t in head.tensors.values() if t.is_floating_point()]
    assert found["parameters"] == f"{sum(t.numel() for t in weights):,}"
    # And the two maps of the vocabulary.
    assert found["bytes"] == f"{sum(t.nbytes for t in weights) + 40 * 8 + 128:,}"
    assert found["dtype"] == "bfloat16"


def test_inspect_says_whether_it_fits(eagle3: Path) -> None:
    model_folder(Path("target"))
    shown = Result("inspect", "eagle3", "--target", "target")
    assert shown.code == 0
    assert rows(shown)["fits target"] == "yes"
    assert rows(shown)["target layers"].endswith("the last but 2: 2, 6, 9")
    model_folder(Path("other"), hidden_size=16, vocab_size=100, layers=4)
    shown = Result("inspect", "eagle3", "--target", "other", "--json")
    assert shown.code == 1
    told = json.loads(shown.out)
    assert told["fits"] is False
    assert len(told["faults"]) == 3
    assert json.loads(Result("inspect", "eagle3", "--json").out)["fits"] is None


LOADED = "loads it as it is"


@pytest.mark.parametrize(
    ("name", "layout", "vllm", "sglang"),
    [
        ("medusa", "medusa", LOADED, "SGLang has no medusa of its own"),
        ("medusa", "vllm", LOADED, "SGLang has no medusa of its own"),
        ("medusa", "spec-plugins", "layout. It does after `spec-plugins convert --to vllm`", "no medusa"),
        ("medusa, the target's", "spec-plugins", "it does not read this layout", "no medusa"),
        ("eagle", "eagle", LOADED, "Eagle. It does after `spec-plugins convert --to sglang`"),
        ("eagle", "vllm", LOADED, "not LlamaForCausalLMEagle"),
        ("eagle", "sglang", "the architecture LlamaForCausalLMEagle, not", LOADED),
        ("eagle, bias", "eagle", "the bias of fc, which is not zero", "not LlamaForCausalLMEagle"),
        ("eagle3", "vllm", LOADED, "the architecture Eagle3LlamaForCausalLM, not"),
        ("eagle3", "sglang", LOADED, LOADED),
        ("eagle3", "speculators", LOADED, "the architecture Eagle3Speculator, not"),
        ("eagle3, layers", "vllm", LOADED, "names the target's layers as vLLM counts them"),
        ("eagle3, layers", "sglang", "names the target's layers as SGLang counts them", LOADED),
        ("eagle3, norm_output", "sglang", "later layers' norms have other names there", LOADED),
        ("eagle3, norm_output", "vllm", LOADED, "later layers' norms have other names there"),
        ("eagle3, biases", "vllm", LOADED, "biases of the attention"),
    ],
)  # fmt: skip
def test_inspect_says_which_engines_load_it(name: str, layout: str, vllm: str, sglang: str) -> None:
    write_head(make(HEADS[name]), "head", layout)
    found = rows(Result("inspect", "head"))
    for engine, wanted in (("vllm", vllm), ("sglang", sglang)):
        said = found[engine]
        assert said.startswith(LOADED) if wanted == LOADED else wanted in said, engine
        assert wanted == LOADED or not said.startswith(LOADED)


def test_inspect_sees_that_vllm_would_leave_out_biases() -> None:
    write_head(make(MEDUSA), "heads", "medusa")
    edit(Path("heads"), medusa_fc_bias=..., hidden_size=...)
    said = rows(Result("inspect", "heads"))["vllm"]
    assert "does not say hidden_size; config.json does not say medusa_fc_bias" in said
    assert "It does after `spec-plugins convert --to vllm`" in said


@pytest.mark.parametrize("name", HEADS)
def test_inspect_describes_every_head(name: str) -> None:
    write_head(make(HEADS[name]), "head", "spec-plugins")
    shown = Result("inspect", "head")
    assert (shown.code, shown.err) == (0, "")
    assert rows(shown)["layout"] == "spec-plugins"


def test_inspect_refuses_what_is_broken(eagle3: Path) -> None:
    file = eagle3 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    shown = Result("inspect", "eagle3")
    assert shown.code == 2
    assert "cut off" in shown.err
    assert shown.out == ""


def test_inspect_compares_a_draft_models_tokens(tiny_model_dir: Path) -> None:
    shown = Result("inspect", str(tiny_model_dir), "--target", str(tiny_model_dir))
    found = rows(shown)
    assert shown.code == 0
    assert found["method"] == "draft_model: a causal language model of 128 tokens"
    assert found[f"fits {tiny_model_dir}"] == "yes"
    other = Path("other")
    shutil.copytree(tiny_model_dir, other)
    file = other / "tokenizer.json"
    data: dict[str, Any] = json.loads(file.read_text())
    names = list(data["model"]["vocab"])
    swapped = {**data["model"]["vocab"], names[50]: data["model"]["vocab"][names[51]]}
    data["model"]["vocab"] = {**swapped, names[51]: data["model"]["vocab"][names[50]]}
    file.write_text(json.dumps(data))
    shown = Result("inspect", str(other), "--target", str(tiny_model_dir))
    assert shown.code == 1
    assert "its tokenizer is not the target's: 2 tokens differ, such as" in shown.out
    # Without tokenizers only the sizes can be compared.
    file.unlink()
    assert Result("inspect", str(other), "--target", str(tiny_model_dir)).code == 0
    model_folder(Path("larger"), vocab_size=200)
    shown = Result("inspect", str(other), "--target", "larger")
    assert shown.code == 1
    assert "it has 128 tokens, the target 200" in shown.out


def test_eagle_needs_no_particular_layer() -> None:
    write_head(make(EAGLE), "head", "vllm")
    model_folder(Path("target"), layers=1)
    assert rows(Result("inspect", "head", "--target", "target"))["fits target"] == "yes"


def test_inspect_takes_nothing_from_a_target_that_does_not_fit_or_has_no_weights() -> None:
    for name in ("medusa, the target's and reduced", "eagle, own embeddings"):
        for target, sizes, code in (("small", {"vocab_size": 20}, 1), ("bare", {}, 0)):
            shutil.rmtree(target, ignore_errors=True)
            model_folder(Path(target), **sizes)
            if target == "bare":
                Path(target, "model.safetensors").unlink()
            shutil.rmtree("head", ignore_errors=True)
            write_head(make(HEADS[name]), "head", "spec-plugins")
            shown = Result("inspect", "head", "--target", target)
            assert (shown.code, shown.err) == (code, "")
