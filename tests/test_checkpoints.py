"""Trained heads in files: every layout, both ways, and everything that can be wrong with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")
from safetensors.torch import load_file, save_file  # noqa: E402
from trained_heads import (  # noqa: E402
    EAGLE,
    EAGLE3,
    HEADS,
    LLAMA3_ROPE,
    MEDUSA,
    edit,
    losses,
    make,
    model_folder,
    same,
    store,
)

from spec_plugins import Target  # noqa: E402
from spec_plugins.checkpoints import (  # noqa: E402
    Head,
    HeadConfig,
    Wanted,
    check_fits,
    check_head,
    misfits,
    read_head,
    read_target,
    target_ids,
    write_head,
)
from spec_plugins.checkpoints.files import read_folder, write_folder  # noqa: E402
from spec_plugins.checkpoints.layouts import LAYOUTS, find_head  # noqa: E402
from spec_plugins.checkpoints.medusa import VllmMedusaLayout  # noqa: E402
from spec_plugins.errors import ConfigError, UnsupportedError  # noqa: E402


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", HEADS)
def test_every_pair_of_layouts_gives_back_every_bit(name: str, tmp_path: Path) -> None:
    head = make(HEADS[name])
    able = [layout for layout, lost in losses(head).items() if not lost]
    assert "spec-plugins" in able
    for first in able:
        write_head(head, tmp_path / first, first)
        assert find_head(read_folder(tmp_path / first)).layout.name == first
        assert same(read_head(tmp_path / first), head)
        for second in able:
            there, back = tmp_path / f"{first}-{second}", tmp_path / f"{first}-{second}-{first}"
            write_head(read_head(tmp_path / first), there, second)
            write_head(read_head(there), back, first)
            assert files(back) == files(tmp_path / first), (first, second)


def test_who_may_read_a_folder_may_read_its_weights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_head(make(EAGLE3), tmp_path / "head", "spec-plugins")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "head").iterdir()} == {0o644}


def test_the_pairs_are_those_that_are_promised() -> None:
    able = {
        name: {n for n, lost in losses(make(config)).items() if not lost} for name, config in HEADS.items()
    }
    for found in able.values():
        found.remove("spec-plugins")
    every = {"vllm", "sglang", "eagle", "speculators"}
    assert able == {
        "medusa": {"vllm", "medusa"},
        "medusa, two layers, no biases": {"vllm", "medusa"},
        "medusa, no layers": {"vllm", "medusa"},
        "medusa, shared": {"vllm", "medusa"},
        "medusa, shared and reduced": set(),
        "medusa, own and reduced": set(),
        "medusa, the target's": set(),
        "medusa, the target's and reduced": set(),
        "eagle": {"vllm", "sglang", "eagle"},
        "eagle, bias": {"sglang", "eagle"},
        "eagle, two layers": {"vllm", "sglang", "eagle"},
        "eagle, own embeddings": {"vllm"},
        "eagle3": every,
        "eagle3, whole vocabulary": every,
        "eagle3, layers": every - {"eagle"},
        "eagle3, as speculators trains": {"vllm", "speculators"},
        "eagle3, norm_output": every - {"eagle"},
        "eagle3, narrow": every,
        "eagle3, biases": {"vllm", "speculators"},
    }


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """The comparison above can fail."""
    head = make(EAGLE3)
    changed = {**head.tensors, "norm.weight": head.tensors["norm.weight"] * 2}
    assert not same(head, Head(head.config, changed))
    assert not same(head, Head(head.config.model_copy(update={"rope_theta": 1.0}), head.tensors))
    write_head(head, tmp_path / "a", "vllm")
    write_head(Head(head.config, changed), tmp_path / "b", "vllm")
    assert files(tmp_path / "a") != files(tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "layout", "lost"),
    [
        ("medusa, the target's", "vllm", "the LM head, which is the target's own.*--target"),
        ("medusa, the target's and reduced", "medusa", "the reduced vocabulary.*the LM head.*--target"),
        ("medusa, own and reduced", "vllm", "the reduced vocabulary .40 of 128 tokens.*does not start"),
        ("eagle, bias", "vllm", "the bias of fc, which is not zero"),
        ("eagle, own embeddings", "sglang", "own embeddings.*--target"),
        ("eagle, own embeddings", "eagle", "biases of the attention"),
        ("eagle3, layers", "eagle", "aux_layers 0, 3, 5, 7.*--target"),
        ("eagle3, as speculators trains", "sglang", "norm_before_residual, which SGLang does not have"),
        ("eagle3, as speculators trains", "eagle", "layers: 2.*norm_before_residual; norm_output"),
        ("eagle3, biases", "sglang", "biases of the attention.*own embeddings"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_named_and_nothing_written(
    name: str, layout: str, lost: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedError, match=f"(?s)layout {layout} would lose.*{lost}.*Nothing was written"
    ):
        write_head(make(HEADS[name]), tmp_path / "out", layout)
    assert not list(tmp_path.iterdir())


def test_no_layout_for_the_method() -> None:
    for layout, method, message in (
        ("sglang", MEDUSA, "SGLang has no medusa of its own"),
        ("speculators", EAGLE, "speculators has no place for eagle. Nearest: --to one of"),
        ("medusa", EAGLE3, "medusa has no place for eagle3"),
        ("tensorrt-llm", EAGLE3, "builder has no eagle3. Nearest: --to eagle, for its PyTorch backend"),
        ("tensorrt-llm", MEDUSA, "convert --to tensorrt-llm --target CHECKPOINT"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            write_head(make(method), "unused", layout)
    with pytest.raises(ConfigError, match="'vlm' is no layout; did you mean 'vllm'"):
        write_head(make(MEDUSA), "unused", "vlm")


def test_a_bias_of_zeros_may_go(tmp_path: Path) -> None:
    head = make(HEADS["eagle, bias"])
    head = Head(head.config, {**head.tensors, "fc.bias": torch.zeros(32)})
    write_head(head, tmp_path / "out", "vllm")
    assert "fc.bias" not in load_file(tmp_path / "out" / "model.safetensors")


# ------------------------------------------------------------------------------ what engines and others read


def written(head: Head, folder: Path, layout: str, **wanted: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = write_head(head, folder, layout, Wanted(**wanted))
    assert whole.config.method == head.config.method
    [weights] = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(weights)


def test_medusa_as_vllm_reads_it(tmp_path: Path) -> None:
    config, tensors = written(make(HEADS["medusa, shared"]), tmp_path / "out", "vllm")
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    assert (config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]) == (3, 1, 128)
    assert config["original_lm_head"] is True
    assert config["medusa_fc_bias"] is True
    assert tensors["lm_head.weight"].shape == (128, 32)
    # vLLM renames every key with "num" and one of these in it.
    for word in ("heads", "layers"):
        assert len([key for key in config if "num" in key and word in key]) == 1


def test_medusas_own_always_has_biases_and_an_lm_head_each(tmp_path: Path) -> None:
    head = make(MEDUSA.model_copy(update={"lm_head": "shared", "bias": False}))
    config, tensors = written(head, tmp_path / "out", "medusa")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    for i in range(3):
        assert not tensors[f"{i}.0.linear.bias"].any()
        assert tensors[f"{i}.1.weight"].equal(head.tensors["lm_head.weight"])
    assert same(read_head(tmp_path / "out"), head)


def test_layers_are_counted_as_each_engine_does(tmp_path: Path) -> None:
    head = make(HEADS["eagle3, layers"])
    vllm, _ = written(head, tmp_path / "vllm", "vllm")
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5, 7]
    assert "eagle_config" not in vllm
    sglang, _ = written(head, tmp_path / "sglang", "sglang")
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 2, 4, 6]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang
    speculators, _ = written(head, tmp_path / "speculators", "speculators")
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5, 7]
    # vLLM sizes fc by this.
    assert vllm["num_aux_hidden_states"] == sglang["num_aux_hidden_states"] == 4
    assert speculators["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_no_layers_are_written_where_the_usual_ones_are_taken(tmp_path: Path) -> None:
    for layout in ("vllm", "sglang", "eagle", "speculators"):
        config, _ = written(make(EAGLE3), tmp_path / layout, layout)
        assert "layer_ids" not in json.dumps(config)
        assert "num_aux_hidden_states" not in json.dumps(config)


def test_eagle3_as_each_reads_it(tmp_path: Path) -> None:
    head = make(EAGLE3)
    _, own = written(head, tmp_path / "eagle", "eagle")
    assert own["midlayer.hidden_norm.weight"].equal(head.tensors["layers.0.hidden_norm.weight"])
    assert own["t2d"].dtype == torch.bool
    assert own["t2d"].nonzero().flatten().equal(own["d2t"] + torch.arange(40))
    config, _ = written(head, tmp_path / "speculators", "speculators", num_speculative_tokens=5)
    said = config["speculators_config"]
    assert said["proposal_methods"][0]["speculative_tokens"] == 5
    assert said["verifier"]["name_or_path"] == "acme/target"
    assert config["norm_before_residual"] is False  # vLLM takes true where nothing is said
    _, sglang = written(make(HEADS["eagle3, norm_output"]), tmp_path / "sglang", "sglang")
    assert "layers.1.hidden_norm.weight" in sglang
    assert "layers.1.input_layernorm.weight" not in sglang


def test_eagle_for_sglang_has_a_bias_which_others_do_not_see(tmp_path: Path) -> None:
    head = make(EAGLE)
    config, tensors = written(head, tmp_path / "out", "sglang")
    # SGLang would start from a random one.
    assert not tensors["fc.bias"].any()
    # And it takes this for biases of the attention.
    assert "bias" not in config
    assert same(read_head(tmp_path / "out"), head)


@pytest.mark.parametrize("layout", ["vllm", "sglang", "eagle", "speculators"])
@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE])
def test_transformers_reads_the_configuration(
    layout: str, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    head = make(EAGLE3.model_copy(update={"rope_scaling": rope, "head_dim": 16}))
    config, _ = written(head, tmp_path / "out", layout)
    read = transformers.LlamaConfig(**config.get("transformer_layer_config", config))
    assert read.rope_parameters == {"rope_theta": 500_000.0, **(rope or {"rope_type": "default"})}
    assert (read.head_dim, read.num_key_value_heads, read.intermediate_size) == (16, 2, 48)
    assert read.tie_word_embeddings is False
    assert read.dtype in (torch.bfloat16, "bfloat16")


def test_what_others_wrote_is_read(tmp_path: Path) -> None:
    """Files as trainers publish them, with what they add."""
    head = make(MEDUSA.model_copy(update={"accuracies": ()}))
    folder = tmp_path / "medusa"
    folder.mkdir()
    said = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "acme/target"}
    (folder / "config.json").write_text(json.dumps(said))
    layout = next(layout for layout in LAYOUTS if layout.name == "medusa")
    stored = {f"medusa_heads.{layout.stored_name(n, head.config)}": t for n, t in head.tensors.items()}
    assert "medusa_heads.2.0.linear.bias" in stored
    assert "medusa_heads.2.1.weight" in stored
    torch.save(stored, folder / "medusa_lm_head.pt")
    assert same(read_head(folder), head)

    eagle = make(HEADS["eagle, bias"], torch.float16)
    folder = tmp_path / "eagle"
    folder.mkdir()
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "vocab_size": 128,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 256, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(llama))
    table = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save({**eagle.tensors, **table}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(read_head(folder), eagle)

    eagle3 = make(EAGLE3.model_copy(update={"target": None, "aux_layers": (2, 4, 6), "rms_norm_eps": 1e-6}))
    folder = tmp_path / "eagle3"
    write_head(Head(eagle3.config.model_copy(update={"aux_layers": ()}), eagle3.tensors), folder, "eagle")
    del llama["rms_norm_eps"]
    llama |= {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(llama))
    assert same(read_head(folder), eagle3)


def test_both_ways_to_name_layers_must_agree(tmp_path: Path) -> None:
    write_head(make(HEADS["eagle3, layers"]), tmp_path / "out", "vllm")
    edit(tmp_path / "out", eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 2, 4, 6]})
    assert read_head(tmp_path / "out").config == HEADS["eagle3, layers"]
    edit(tmp_path / "out", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5, 7]})
    with pytest.raises(ConfigError, match="not the same layers"):
        read_head(tmp_path / "out")


def test_offsets_of_a_whole_vocabulary_are_left_out(tmp_path: Path) -> None:
    head = make(HEADS["eagle3, whole vocabulary"])
    write_head(head, tmp_path / "out", "eagle")
    more = {"d2t": torch.zeros(128, dtype=torch.int64), "t2d": torch.ones(128, dtype=torch.bool)}
    store(tmp_path / "out", lambda tensors: {**tensors, **more})
    assert same(read_head(tmp_path / "out"), head)


@pytest.mark.parametrize("name", ["medusa, shared and reduced", "medusa, own and reduced"])
@pytest.mark.parametrize("whole", [False, True])
def test_medusa_with_a_token_map_is_read(name: str, whole: bool, tmp_path: Path) -> None:
    """In vLLM's layout, which has a place for one; its LM head may have every row."""
    head, layout = make(HEADS[name]), VllmMedusaLayout()
    tensors = layout.tensors(head)
    for key in [key for key in tensors if whole and key.startswith("lm_head")]:
        every = torch.zeros(128, 32, dtype=torch.bfloat16)
        every[head.tensors["token_map"]] = tensors[key]
        tensors[key] = every
    write_folder(tmp_path / "out", layout.config(head, Wanted()), tensors)
    assert same(read_head(tmp_path / "out"), head)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(kind: str, tmp_path: Path) -> None:
    head = make(EAGLE)
    write_head(head, tmp_path / "out", "vllm")
    shard(tmp_path / "out", kind)
    assert same(read_head(tmp_path / "out"), head)


# ---------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_lm_head_is_copied_in(tied: bool, tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target", tied)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    lm_head = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    head = make(HEADS["medusa, the target's"])
    config, tensors = written(head, tmp_path / "vllm", "vllm", target=target)
    assert tensors["lm_head.weight"].equal(lm_head)
    assert config["original_lm_head"] is True
    _, tensors = written(head, tmp_path / "medusa", "medusa", target=target)
    assert all(tensors[f"{i}.1.weight"].equal(lm_head) for i in range(3))
    ids = torch.tensor([3, 70, 100])
    assert target.lm_head(ids).equal(lm_head[ids])


def test_the_targets_sizes_may_stand_in_a_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"text_config": {"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 7}, "hidden_size": 1}
        )
    )
    found = read_target(tmp_path)
    assert (found.hidden_size, found.vocab_size, found.num_layers) == (8, 9, 7)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": "8"}))
    with pytest.raises(ConfigError, match="hidden_size is '8'; is this a target model"):
        read_target(tmp_path)


def test_an_lm_head_that_cannot_be_found_is_said(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target")
    store(tmp_path / "target", lambda t: {"x": t["lm_head.weight"]})
    with pytest.raises(ConfigError, match="its LM head cannot be told"):
        target.lm_head()
    store(tmp_path / "target", lambda t: {"lm_head.weight": t["x"][:5]})
    with pytest.raises(ConfigError, match=r"is \[5, 32\].*calls for \[128, 32\]"):
        target.lm_head()


def test_own_embeddings_may_go_to_sglang_where_they_are_the_targets(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target")
    head = make(EAGLE.model_copy(update={"own_embeddings": True}))
    with pytest.raises(UnsupportedError, match="which are not the target's"):
        write_head(head, tmp_path / "out", "sglang", Wanted(target))
    head = Head(head.config, {**head.tensors, "embed_tokens.weight": target.embeddings()})
    write_head(head, tmp_path / "out", "sglang", Wanted(target))
    assert same(read_head(tmp_path / "out"), head)


def test_layers_that_are_the_usual_ones_may_go_to_eagle(tmp_path: Path) -> None:
    head = make(EAGLE3.model_copy(update={"aux_layers": (2, 6, 9)}))
    with pytest.raises(UnsupportedError, match="aux_layers 2, 6, 9"):
        write_head(head, tmp_path / "out", "eagle", Wanted(model_folder(tmp_path / "other", layers=14)))
    write_head(head, tmp_path / "out", "eagle", Wanted(model_folder(tmp_path / "target")))
    assert same(read_head(tmp_path / "out"), head)


@pytest.mark.parametrize(
    ("config", "sizes", "fault"),
    [
        (EAGLE3, {}, ""),
        (MEDUSA, {"hidden_size": None, "num_layers": None}, ""),
        (MEDUSA, {"hidden_size": 64}, "target of hidden size 32, and this one has 64"),
        (EAGLE, {"vocab_size": 200}, "target of 128 tokens, and this one has 200"),
        (HEADS["eagle3, narrow"], {}, "target of hidden size 64, and this one has 32"),
        (HEADS["eagle3, narrow"], {"hidden_size": 64}, ""),
        (EAGLE3, {"num_layers": 6}, "layers 2, 3, 3, that are taken where its files name none"),
        (EAGLE3, {"num_layers": 7}, ""),
        (EAGLE, {"num_layers": 1}, ""),
        (HEADS["eagle3, layers"], {"num_layers": 8}, ""),
        (HEADS["eagle3, layers"], {"num_layers": 7}, "layers 0, 3, 5, 7, named in its files.*layers 0 to 6"),
    ],
)  # fmt: skip
def test_fits(config: HeadConfig, sizes: dict[str, int | None], fault: str) -> None:
    given: Any = {"hidden_size": 32, "vocab_size": 128, "num_layers": 12, **sizes}
    target = Target(max_model_len=64, max_num_seqs=1, **given)
    assert len(misfits(config, target)) == bool(fault)
    if fault:
        with pytest.raises(ConfigError, match=fault):
            check_fits(config, target)
    else:
        check_fits(config, target)


# -------------------------------------------------------------------------------------------- broken input


def shard(folder: Path, kind: str = "safetensors") -> Path:
    """Spread the weights over two files; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = [f"{stem}-0000{i}-of-00002.{kind}" for i in (1, 2)]
    where = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        if kind == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return index


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    write_head(make(EAGLE3), tmp_path / "eagle3", "vllm")
    return tmp_path / "eagle3"


@pytest.fixture
def medusa(tmp_path: Path) -> Path:
    write_head(make(MEDUSA), tmp_path / "medusa", "medusa")
    return tmp_path / "medusa"


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        read_head(folder)
    assert str(folder) in str(caught.value)
    assert "Error:" not in str(caught.value)


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_file_that_is_cut_off(eagle3: Path, left: int) -> None:
    file = eagle3 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    refused(eagle3, "model.safetensors: cut off, or no safetensors file")


@pytest.mark.parametrize("left", [0, 100, -100])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_is_cut_off(medusa: Path, left: int, zipped: bool) -> None:
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    (medusa / "medusa_lm_head.safetensors").unlink()
    file = medusa / "medusa_lm_head.pt"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[:left])
    refused(medusa, "medusa_lm_head.pt: (cut off|holds something other than tensors)")


class Harmful:
    """A pickle of this writes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_not_run(medusa: Path, tmp_path: Path, zipped: bool) -> None:
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    (medusa / "medusa_lm_head.safetensors").unlink()
    trace, file = tmp_path / "trace", medusa / "medusa_lm_head.pt"
    torch.save({**tensors, "x": Harmful(trace)}, file, _use_new_zipfile_serialization=zipped)
    refused(medusa, "holds something other than tensors.*nothing of it was run")
    assert not trace.exists()
    # It would have been run.
    torch.load(file, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "must hold tensors by name, and holds a list"),
        ({"0.1.weight": 3}, "0.1.weight is no plain tensor but a int"),
        ({"0.1.weight": torch.ones(2).to_sparse()}, "no plain tensor"),
        ({"0.1.weight": torch.ones(1, 1).expand(2**20, 2**20)}, "more elements than the file holds"),
    ],
)
def test_a_pickle_of_something_else(medusa: Path, value: Any, message: str) -> None:
    (medusa / "medusa_lm_head.safetensors").unlink()
    torch.save(value, medusa / "medusa_lm_head.pt")
    refused(medusa, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"hidden_size 64.*fc.weight is \[32, 96\], not \[64, 192\]"),
        ({"num_hidden_layers": 2}, "num_layers 2: lacks layers.1.self_attn.q_proj.weight.* and 6 more"),
        ({"vocab_size": 130, "draft_vocab_size": 130}, r"lm_head.weight is \[40, 32\], not \[130, 32\]"),
        ({"draft_vocab_size": 41}, r"d2t is \[40\], not \[41\]"),
        ({"draft_vocab_size": ...}, "draft_vocab_size 128.*has no place for d2t"),
        ({"vocab_size": 64}, r"names token 1\d\d, and the target has 64"),
        ({"vocab_size": ...}, "vocab_size: missing"),
        ({"intermediate_size": -1}, "intermediate_size: -1 is out of range"),
        ({"num_hidden_layers": 10**9}, "num_layers: 1000000000 is out of range"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3', and only 'llama'"),
        ({"fc_norm": True}, "norms before fc are not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is set"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 3, 1]}, r"aux_layers \[5, 3, 1\] must ascend"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "must be a list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight is \[32, 96\], not \[32, 64\]"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, and .* names none"),
        ({"rope_parameters": 3}, "must be an object"),
        ({"architectures": ["Unheard"]}, ""),
    ],
)  # fmt: skip
def test_a_configuration_of_another_head(eagle3: Path, changes: dict[str, Any], message: str) -> None:
    edit(eagle3, **changes)
    if message:
        refused(eagle3, message)
    else:
        assert same(read_head(eagle3), make(EAGLE3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": 2}, "num_heads 2.*no place for 2.0.linear.bias, 2.0.linear.weight, 2.1.weight"),
        ({"medusa_num_heads": 4}, "num_heads 4.*lacks 3.0.linear.weight"),
        ({"medusa_num_layers": 2}, "num_layers 2.*lacks 0.1.linear.weight"),
        ({"hidden_size": 33}, r"0.0.linear.weight is \[32, 32\], not \[33, 33\]"),
        ({"vocab_size": 127}, r"0.1.weight is \[128, 32\], not \[127, 32\]"),
        ({"medusa_num_heads": "many"}, "num_heads: 'many' cannot be used"),
    ],
)  # fmt: skip
def test_a_medusa_configuration_of_another_head(medusa: Path, changes: dict[str, Any], message: str) -> None:
    edit(medusa, **changes)
    refused(medusa, message)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.weight", lambda t: t.index_fill(0, torch.tensor(3), float("nan")), "norm.weight holds NaN"),
        ("fc.weight", lambda t: t.index_fill(0, torch.tensor(3), float("inf")), "fc.weight holds NaN or inf"),
        ("fc.weight", lambda t: t.to(torch.int8), "fc.weight is int8; weights must be"),
        ("fc.weight", lambda t: t.to(torch.float8_e4m3fn), "fc.weight is float8_e4m3fn; weights must be"),
        ("fc.weight", lambda t: t[0, 0].clone(), r"fc.weight is \[\], not"),
        ("d2t", lambda t: t.float(), "d2t must hold token ids as int64, and is float32"),
        ("d2t", lambda t: t - 200, "names token -"),
        ("d2t", lambda t: t.index_fill(0, torch.tensor(39), 0), "must ascend, each of them once"),
        ("norm.weight", lambda t: None, "lacks norm.weight"),
        ("fc.weight", lambda t: None, "lacks fc.weight"),
    ],
)  # fmt: skip
def test_broken_tensors(eagle3: Path, name: str, change: Callable[[Any], Any], message: str) -> None:
    store(eagle3, lambda old: {n: t for n, t in {**old, name: change(old[name])}.items() if t is not None})
    refused(eagle3, message)


def test_a_tensor_too_many_and_one_twice(eagle3: Path) -> None:
    store(eagle3, lambda tensors: {**tensors, "surplus": torch.ones(1)})
    refused(eagle3, "has no place for surplus")
    store(eagle3, lambda tensors: {**tensors, "midlayer.hidden_norm.weight": torch.ones(32)})
    refused(eagle3, "twice, under two names")


def test_a_mask_that_contradicts_the_offsets(tmp_path: Path) -> None:
    write_head(make(EAGLE3), tmp_path / "out", "eagle")
    store(tmp_path / "out", lambda tensors: {**tensors, "t2d": ~tensors["t2d"]})
    refused(tmp_path / "out", "t2d and d2t do not say the same tokens")


def test_broken_indexes(eagle3: Path) -> None:
    index = shard(eagle3)
    names = json.loads(index.read_text())["weight_map"]
    one = next(iter(names.values()))
    for value, message in (
        ({"x": "../model.safetensors"}, "is no file of weights in that folder"),
        ({"x": str(eagle3 / one)}, "is no file of weights in that folder"),
        ({"x": "config.json"}, "is no file of weights in that folder"),
        ({**names, "x": "model-00003-of-00003.safetensors"}, "which is not there; download it too"),
        ({}, "must hold a weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": value}))
        refused(eagle3, message)
    index.write_text("[]")
    refused(eagle3, "must hold an object, and holds a list")


def test_folders_that_hold_no_head(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such folder")
    refused(tmp_path, "config.json: no such file")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused(tmp_path, "no weights; one of these must be there")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, "no layout of a head that is known")
    for own in (
        {"spec_plugins_head": 3},
        {"speculators_model_type": "mlp"},
        {"speculators_model_type": "eagle3"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(own))
        refused(tmp_path, "must be an object|'mlp' is not supported|transformer_layer_config is missing")


def test_a_causal_language_model_is_no_head(tiny_model_dir: Path) -> None:
    refused(
        tiny_model_dir, "it is a causal language model: draft with it as it is, by the method draft_model"
    )


def test_a_head_that_cannot_be() -> None:
    for config, message in (
        (EAGLE.model_copy(update={"aux_layers": (1, 2)}), "aux_layers: of eagle3 only"),
        (EAGLE3.model_copy(update={"target_hidden_size": 64}), "needs own embeddings"),
        (MEDUSA.model_copy(update={"draft_vocab_size": 129}), "is more than vocab_size 128"),
    ):
        with pytest.raises(ValueError, match=message):
            type(config).model_validate(config.model_dump())


# ------------------------------------------------------------------------------------------------- writing


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(ConfigError, match="is there already"):
            write_head(make(EAGLE), tmp_path / name, "vllm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    (tmp_path / "empty").mkdir()
    write_head(make(EAGLE), tmp_path / "empty", "vllm")
    write_head(make(EAGLE), tmp_path / "a" / "new" / "one", "vllm")
    assert same(read_head(tmp_path / "empty"), read_head(tmp_path / "a" / "new" / "one"))


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_never_half_a_folder(fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: object, filename: Path, metadata: object) -> None:
        filename.write_bytes(b"half")
        raise fault

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(ConfigError if isinstance(fault, OSError) else KeyboardInterrupt):
        write_head(make(EAGLE), tmp_path / "out", "vllm")
    assert not list(tmp_path.iterdir())


def test_a_broken_head_is_not_written(tmp_path: Path) -> None:
    head = make(EAGLE)
    for tensors in ({}, {**head.tensors, "fc.weight": head.tensors["fc.weight"] * float("nan")}):
        with pytest.raises(ConfigError, match=r"lacks|holds NaN"):
            write_head(Head(head.config, tensors), tmp_path / "out", "vllm")
    target = model_folder(tmp_path / "target", hidden_size=16)
    with pytest.raises(ConfigError, match=r"does not fit the target: .* hidden size 32"):
        write_head(head, tmp_path / "out", "vllm", Wanted(target))
    assert not (tmp_path / "out").exists()


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    head = make(MEDUSA)
    block, lm_head = torch.randn(64, 32), torch.randn(128, 32)
    shared = {
        name: lm_head if name.startswith("lm_heads") else block[int(name[7]) : int(name[7]) + 32]
        for name in head.tensors
        if name.endswith(".weight")
    }
    head = Head(head.config, {**head.tensors, **shared})
    write_head(head, tmp_path / "out", "vllm")
    assert same(read_head(tmp_path / "out"), head)


def test_tokens_of_a_reduced_vocabulary() -> None:
    head = make(EAGLE3)
    ids = target_ids(head)
    assert ids is not None
    assert ids.equal(head.tensors["d2t"] + torch.arange(40))
    assert target_ids(make(EAGLE)) is None
    reduced = make(HEADS["medusa, own and reduced"])
    assert target_ids(reduced) is not None
    check_head(reduced)


def test_reading_maps_the_file(tmp_path: Path) -> None:
    """What is not looked at costs no memory: the tensors lie one behind the other in the file's mapping."""
    write_head(make(EAGLE), tmp_path / "out", "vllm")
    tensors = read_folder(tmp_path / "out").tensors.values()
    starts = sorted((t.data_ptr(), t.nbytes) for t in tensors)
    assert starts[-1][0] + starts[-1][1] - starts[0][0] == sum(n for _, n in starts)
    shutil.rmtree(tmp_path / "out")
