"""Heads in checkpoints for TensorRT-LLM's engine builder, against names and splits read in its source."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'spec-plugins[transformers]'")
from tensorrt_llm_targets import (  # noqa: E402
    HIDDEN,
    INNER,
    KEYS,
    QUERIES,
    VOCAB,
    ranks_of,
    target_checkpoint,
    whole_target,
)
from trained_heads import EAGLE, EAGLE3, HEADS, MEDUSA, edit, make, store  # noqa: E402

from spec_plugins.adapters.tensorrt_llm import shards  # noqa: E402
from spec_plugins.adapters.tensorrt_llm.base import read_base  # noqa: E402
from spec_plugins.adapters.tensorrt_llm.checkpoint import write_checkpoint  # noqa: E402
from spec_plugins.adapters.tensorrt_llm.trees import chain  # noqa: E402
from spec_plugins.checkpoints import Head, read_head, write_head  # noqa: E402
from spec_plugins.checkpoints.streaming import Streamed, streamed  # noqa: E402
from spec_plugins.errors import ConfigError, SpecPluginsError, UnsupportedError  # noqa: E402

TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
"""Three deep; two nodes of its first level have children."""
Tensors = dict[str, torch.Tensor]


def joined(
    folder: Path, head: Head, tp: int = 1, choices: Any = TREE, **changes: Any
) -> tuple[dict[str, Any], list[Tensors]]:
    """A head in a target's checkpoint: its ``config.json``, and the ranks' tensors."""
    base = read_base(target_checkpoint(folder / "target", tp, vocab=head.config.vocab_size, **changes))
    write_checkpoint(head, base, folder / "out", choices)
    return json.loads((folder / "out" / "config.json").read_text()), ranks_of(folder / "out")


def together(ranks: list[Tensors], name: str, dim: int = 0) -> torch.Tensor:
    return torch.cat([rank[name] for rank in ranks], dim)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: dtypes too."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(one.equal(other))


# ------------------------------------------------------------------------------------------------- Medusa

MEDUSAS = [
    "medusa", "medusa, two layers, no biases", "medusa, no layers", "medusa, shared", "medusa, the target's"
]  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MEDUSAS)
def test_medusas_ranks_put_together_are_the_head(tmp_path: Path, name: str, tp: int) -> None:
    head = make(HEADS[name])
    config, ranks = joined(tmp_path, head, tp)
    about: Any = head.config
    names = set(whole_target())
    for i in range(about.num_heads):
        for layer in range(about.num_layers):
            linear = f"medusa_heads.{i}.medusa_layers.{layer}.linear"
            names |= {f"{linear}.weight", f"{linear}.bias"}
            block = f"blocks.{i}.layers.{layer}"
            assert equal(together(ranks, f"{linear}.weight"), head.tensors[f"{block}.weight"])
            bias = head.tensors.get(f"{block}.bias", torch.zeros(HIDDEN).bfloat16())
            assert equal(together(ranks, f"{linear}.bias"), bias)
        lm_head = f"medusa_heads.{i}.lm_head.weight"
        names.add(lm_head)
        own = {"own": f"lm_heads.{i}.weight", "shared": "lm_head.weight"}.get(about.lm_head)
        assert equal(together(ranks, lm_head), head.tensors[own] if own else whole_target()["lm_head.weight"])
    assert [set(rank) for rank in ranks] == [names] * tp
    assert [r[n].shape[0] for r in ranks for n in r if n.startswith("medusa_heads.0.lm")] == [
        VOCAB // tp
    ] * tp
    added = {
        "architecture": "MedusaForCausalLM", "max_draft_len": len(TREE), "num_medusa_heads": 3,
        "num_medusa_layers": about.num_layers, "model_type": "llama",
    }  # fmt: skip
    assert config == {**json.loads((tmp_path / "target" / "config.json").read_text()), **added}


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"architecture": "Qwen2ForCausalLM"}, "qwen2"),
        ({"architecture": "QWenForCausalLM", "qwen_type": "qwen"}, "qwen"),
        ({"architecture": "MistralForCausalLM"}, "llama"),
        ({"model_type": "mistral"}, "mistral"),
    ],
)
def test_medusas_class_is_told_which_layers_the_target_has(
    tmp_path: Path, said: dict[str, Any], kind: str
) -> None:
    config, _ = joined(tmp_path, make(MEDUSA), **said)
    assert config["model_type"] == kind


# -------------------------------------------------------------------------------------------------- EAGLE

EAGLES = ["eagle", "eagle, bias", "eagle, two layers", "eagle, own embeddings"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", EAGLES)
def test_eagles_ranks_put_together_are_the_head(tmp_path: Path, name: str, tp: int) -> None:
    about: Any = HEADS[name].model_copy(update={"rope_scaling": None, "attention_bias": False})
    head = make(about)
    config, ranks = joined(tmp_path, head, tp)
    source, width = head.tensors, HIDDEN // QUERIES
    names = set(whole_target())
    for net in range(3):
        drafter = f"eagle_nets.{net}.drafter"
        want: dict[str, tuple[torch.Tensor, int | None]] = {
            f"eagle_nets.{net}.lm_head.weight": (whole_target()["lm_head.weight"], 0),
            f"{drafter}.fc.weight": (source["fc.weight"], 0),
            f"{drafter}.fc.bias": (source.get("fc.bias", torch.zeros(HIDDEN).bfloat16()), 0),
            f"{drafter}.vocab_embedding.weight": (
                source.get("embed_tokens.weight", whole_target()["transformer.vocab_embedding.weight"]), None
            ),
        }  # fmt: skip
        for i in range(about.num_layers):
            ours, theirs = f"layers.{i}", f"{drafter}.layers.{i}"
            want |= {
                f"{theirs}.attention.dense.weight": (source[f"{ours}.self_attn.o_proj.weight"], 1),
                f"{theirs}.mlp.fc.weight": (source[f"{ours}.mlp.gate_proj.weight"], 0),
                f"{theirs}.mlp.gate.weight": (source[f"{ours}.mlp.up_proj.weight"], 0),
                f"{theirs}.mlp.proj.weight": (source[f"{ours}.mlp.down_proj.weight"], 1),
                f"{theirs}.post_layernorm.weight": (source[f"{ours}.post_attention_layernorm.weight"], None),
            }
            if i:
                want[f"{theirs}.input_layernorm.weight"] = (source[f"{ours}.input_layernorm.weight"], None)
            qkv = f"{theirs}.attention.qkv.weight"
            names.add(qkv)
            keys = max(1, KEYS // tp) * width
            parts = [rank[qkv].split([HIDDEN // tp, keys, keys]) for rank in ranks]
            copies = max(1, tp // KEYS)  # ranks that hold the same key head
            for which, letter in enumerate("qkv"):
                found = [part[which] for part in parts][:: 1 if letter == "q" else copies]
                assert equal(torch.cat(found), source[f"{ours}.self_attn.{letter}_proj.weight"])
            for one in range(0, tp, copies):
                assert all(equal(parts[one][1], parts[one + n][1]) for n in range(copies))
        for tensor, (whole, dim) in want.items():
            if dim is None:
                assert all(equal(rank[tensor], whole) for rank in ranks)
            else:
                assert equal(together(ranks, tensor, dim), whole)
        names |= set(want)
    assert [set(rank) for rank in ranks] == [names] * tp
    target = json.loads((tmp_path / "target" / "config.json").read_text())
    net = config.pop("eagle_net_config")
    added = {
        "architecture": "EagleForCausalLM", "max_draft_len": len(TREE), "num_eagle_layers": 3,
        "max_non_leaves_per_layer": 2,
    }  # fmt: skip
    assert config == {**target, **added}
    assert net == {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32",
        "num_hidden_layers": about.num_layers, "num_attention_heads": QUERIES, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_key_value_heads": KEYS, "vocab_size": VOCAB,
        "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": 256, "hidden_act": "silu",
        "rotary_base": 500_000.0, "rotary_scaling": None, "norm_epsilon": 1e-5,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1}, "use_parallel_embedding": False,
        "embedding_sharding_dim": 0, "head_dim": width, "head_size": width,
    }  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_embeddings_are_split_as_the_targets(tmp_path: Path, own: bool, dim: int) -> None:
    head = make(EAGLE.model_copy(update={"own_embeddings": own, "vocab_size": 127, "draft_vocab_size": 127}))
    _, ranks = joined(tmp_path, head, 2, use_parallel_embedding=True, embedding_sharding_dim=dim)
    name = "transformer.vocab_embedding.weight"
    whole = head.tensors["embed_tokens.weight"] if own else whole_target(127)[name]
    parts = [rank["eagle_nets.2.drafter.vocab_embedding.weight"] for rank in ranks]
    assert [part.shape for part in parts] == [rank[name].shape for rank in ranks]
    assert equal(torch.cat(parts, dim)[:127], whole)


# ----------------------------------------------------------------------------------------- in both alike


@pytest.mark.parametrize("name", ["medusa", "medusa, shared", "medusa, the target's", "eagle"])
def test_a_vocabulary_that_ranks_cannot_divide_is_padded(tmp_path: Path, name: str) -> None:
    head = make(HEADS[name].model_copy(update={"vocab_size": 126, "draft_vocab_size": 126}))
    config, ranks = joined(tmp_path, head, 4)
    assert config["vocab_size"] == 126
    lm_head = next(n for n in ranks[0] if re.fullmatch(r"(medusa_heads|eagle_nets)\.1\.lm_head\.weight", n))
    assert [rank[lm_head].shape for rank in ranks] == [(32, HIDDEN)] * 4
    whole = together(ranks, lm_head)
    source = {"medusa": "lm_heads.1.weight", "medusa, shared": "lm_head.weight"}.get(name)
    assert equal(whole[:126], head.tensors[source] if source else whole_target(126)["lm_head.weight"])
    assert not whole[126:].count_nonzero()


def test_the_targets_bytes_are_copied_whatever_their_dtype(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = target_checkpoint(tmp_path / "target")
    file = folder / "rank0.safetensors"
    more = {"odd": torch.arange(3, dtype=torch.int8), "scale": torch.tensor(0.5), "none": torch.zeros(0, 4)}
    save_file({**load_file(file), **more}, file)
    write_checkpoint(make(MEDUSA), read_base(folder), tmp_path / "out", TREE)
    [written] = ranks_of(tmp_path / "out")
    for name, tensor in load_file(file).items():
        assert equal(written[name], tensor)


def test_a_head_is_rounded_to_the_targets_dtype_and_not_beyond(tmp_path: Path) -> None:
    head = make(MEDUSA, torch.float32)
    _, [written] = joined(tmp_path, head)
    name = "blocks.0.layers.0.weight"
    assert equal(written["medusa_heads.0.medusa_layers.0.linear.weight"], head.tensors[name].bfloat16())
    head.tensors[name][0, 0] = 7e4  # more than float16 has
    base = read_base(target_checkpoint(tmp_path / "half", dtype="float16"))
    with pytest.raises(ConfigError, match="beyond float16"):
        write_checkpoint(head, base, tmp_path / "half-out", TREE)
    assert not (tmp_path / "half-out").exists()


@pytest.mark.parametrize("layout", ["medusa", "pickle", "spec-plugins"])
def test_files_of_every_layout_give_the_same(tmp_path: Path, layout: str) -> None:
    head = make(MEDUSA)
    write_head(head, tmp_path / "head", "medusa" if layout == "pickle" else layout)
    if layout == "pickle":
        from safetensors.torch import load_file

        file = tmp_path / "head" / "medusa_lm_head.safetensors"
        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    joined(tmp_path / "one", head, 2)
    base = read_base(tmp_path / "one" / "target")
    write_checkpoint(read_head(tmp_path / "head"), base, tmp_path / "two", TREE)
    for rank in range(2):
        name = f"rank{rank}.safetensors"
        assert (tmp_path / "one" / "out" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_two_tensors_are_in_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: bool
) -> None:
    """The control makes them all before it writes them."""
    head = make(MEDUSA, torch.float32)  # so that none is a view of the head's file
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def counted(dtype: torch.dtype, shape: tuple[int, ...], build: Callable[[], torch.Tensor]) -> Streamed:
        def built() -> torch.Tensor:
            nonlocal most
            tensor = build()
            alive.add(tensor)
            most = max(most, len(alive))
            return tensor

        if one_by_one:
            return streamed(dtype, shape, built)
        before = built()
        return streamed(dtype, shape, lambda: before)

    monkeypatch.setattr(shards, "streamed", counted)
    _, ranks = joined(tmp_path, head, 4)
    assert len(ranks[0]) == len(whole_target()) + 9
    assert most == (1 if one_by_one else 4 * 9)


def test_a_head_is_left_in_its_file_until_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head of 32 MB the process itself never holds 6, pages of files apart."""
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("needs /proc, to see how much memory a process holds")

    def held() -> int:
        return 1024 * int(status.read_text().partition("RssAnon:")[2].split()[0])

    sizes: Any = {"vocab_size": 32768, "draft_vocab_size": 32768, "num_heads": 16}
    write_head(make(MEDUSA.model_copy(update=sizes)), tmp_path / "head", "spec-plugins")
    base = read_base(target_checkpoint(tmp_path / "target", 2, vocab=32768, dtype="float16"))
    gc.collect()
    before, most = held(), 0

    def measured(dtype: torch.dtype, shape: tuple[int, ...], build: Callable[[], torch.Tensor]) -> Streamed:
        def built() -> torch.Tensor:
            nonlocal most
            tensor = build()
            most = max(most, held() - before)
            return tensor

        return streamed(dtype, shape, built)

    monkeypatch.setattr(shards, "streamed", measured)
    write_checkpoint(read_head(tmp_path / "head"), base, tmp_path / "out", [[0]])
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("rank*")) > 32 << 20
    assert most < 6 << 20


# ----------------------------------------------------------------------------------------------- refusals


def eagle_like(**changes: Any) -> Head:
    return make(type(EAGLE).model_validate({**EAGLE.model_dump(), **changes}))


LARGE = [path for i in range(128) for path in ([i], [i, 0])] + [[0, 0, 0]]
REFUSED: list[tuple[Callable[[], Head], dict[str, Any], Any, str]] = [
    (lambda: make(EAGLE3), {}, TREE, "no eagle3, only medusa and eagle"),
    (lambda: make(HEADS["medusa, own and reduced"]), {}, TREE, "no place for a reduced vocabulary"),
    (lambda: make(MEDUSA), {"hidden_size": 64}, TREE, "hidden size 32, and this one has 64"),
    (lambda: make(MEDUSA), {"vocab_size": 100}, TREE, "128 tokens, and this one has 100"),
    (lambda: make(MEDUSA), {"tp": 3}, TREE, "hidden_size 32 cannot be split over the 3 ranks"),
    (lambda: make(MEDUSA), {"architecture": "GPTForCausalLM"}, TREE, "is GPTForCausalLM"),
    (lambda: make(MEDUSA), {"hidden_act": "gelu"}, TREE, "hidden_act, 'gelu'"),
    (lambda: make(MEDUSA), {"quantization": {"quant_algo": "FP8"}}, TREE, "is quantized (quant_algo FP8)"),
    (lambda: make(MEDUSA), {"dtype": "float8"}, TREE, "dtype is 'float8'"),
    (lambda: make(MEDUSA), {"mapping": {"tp_size": 1, "pp_size": 2}}, TREE, "pipeline parallelism (pp_size"),
    (lambda: make(MEDUSA), {"mapping": {"tp_size": 2}}, TREE, "rank1.safetensors is not there"),
    (lambda: make(MEDUSA), {"mapping": {"tp_size": 0}}, TREE, "mapping.tp_size is 0"),
    (lambda: make(EAGLE), {"num_attention_heads": ...}, TREE, "num_attention_heads is None"),
    (lambda: make(EAGLE), {"rotary_base": None}, TREE, "rope_theta is 500000.0 in the head and 10000.0"),
    (lambda: make(EAGLE), {"rotary_scaling": "linear"}, TREE, "rope_scaling is None in the head and"),
    (lambda: make(MEDUSA), {"mapping": ...}, TREE, "no checkpoint of TensorRT-LLM's"),
    (lambda: make(MEDUSA), {}, chain(4), "4 tokens deep, and there are 3 Medusa heads"),
    (lambda: make(EAGLE), {"tp": 8}, TREE, "num_attention_heads 4 cannot be split over the 8 ranks"),
    (lambda: eagle_like(intermediate_size=49), {"tp": 2}, TREE, "intermediate_size 49 cannot be split"),
    (lambda: eagle_like(num_key_value_heads=4), {}, TREE, "num_key_value_heads is 4 in the head and 2"),
    (lambda: eagle_like(head_dim=16), {}, TREE, "head_dim is 16 in the head and 8"),
    (lambda: make(EAGLE), {"rotary_base": 1e4}, TREE, "rope_theta is 500000.0 in the head and 10000.0"),
    (lambda: make(HEADS["eagle, two layers"]), {}, TREE, "rope_scaling is {'rope_type': 'llama3'"),
    (lambda: make(HEADS["eagle, own embeddings"]), {}, TREE, "no place for the biases of the attention"),
    (lambda: make(EAGLE), {"architecture": "Qwen2ForCausalLM"}, TREE, "is Qwen2ForCausalLM"),
    (lambda: make(EAGLE), {}, LARGE, "257 draft tokens, and with EAGLE TensorRT-LLM takes 256 at most"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "target", "choices", "says"), REFUSED)
def test_what_does_not_go_together_is_one_error_and_nothing_is_written(
    tmp_path: Path, head: Callable[[], Head], target: dict[str, Any], choices: Any, says: str
) -> None:
    folder = target_checkpoint(tmp_path / "target", **target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecPluginsError, match=re.escape(says)):
        write_checkpoint(head(), read_base(folder), tmp_path / "out", choices)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ([], "must hold paths"),
        ([[]], "must hold paths"),
        ([[0], [0, 0], [0]], "[0] is there twice"),
        ([[0], [1, 0]], "[1, 0] is there without [1], which it continues"),
        ([[0], [0, 0, 0]], "[0, 0, 0] is there without [0, 0]"),
        ([[0], [-1]], "[-1] ends in rank -1; ranks go from 0, the likeliest, to 127"),
        ([[0], [128]], "[128] ends in rank 128"),
        ([[0], [2]], "[2] is there without the likelier [1]"),
    ],
)
def test_choices_are_a_tree(tmp_path: Path, choices: Any, says: str) -> None:
    base = read_base(target_checkpoint(tmp_path / "target"))
    with pytest.raises(ConfigError, match=re.escape(f"options.choices: {says}")):
        write_checkpoint(make(EAGLE), base, tmp_path / "out", choices)
    if choices == [[0], [2]]:  # which Medusa may have
        write_checkpoint(make(MEDUSA), base, tmp_path / "out", choices)


def test_a_broken_target_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = target_checkpoint(tmp_path / "target", 2)
    file = folder / "rank1.safetensors"
    whole = file.read_bytes()
    for broken, says in ((whole[:-9], "cut off"), (b"", "cut off")):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=says):
            write_checkpoint(make(MEDUSA), read_base(folder), tmp_path / "out", TREE)
    file.write_bytes(whole)
    write_checkpoint(make(MEDUSA), read_base(folder), tmp_path / "out", TREE)
    with pytest.raises(UnsupportedError, match="is MedusaForCausalLM"):
        write_checkpoint(make(MEDUSA), read_base(tmp_path / "out"), tmp_path / "twice", TREE)
    edit(tmp_path / "out", architecture="LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"has a head already: medusa_heads\.0"):
        write_checkpoint(make(MEDUSA), read_base(tmp_path / "out"), tmp_path / "twice", TREE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "target"]


@pytest.mark.parametrize("after", [1, 30])
def test_an_interrupted_conversion_leaves_nothing_behind(tmp_path: Path, after: int) -> None:
    base, told = read_base(target_checkpoint(tmp_path / "target", 2)), []

    def interrupt(name: str) -> None:
        told.append(name)
        if len(told) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(make(MEDUSA), base, tmp_path / "out", TREE, interrupt)
    assert told[0].startswith("rank 1 of 2, ")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_is_told_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = read_base(target_checkpoint(tmp_path / "target"))
    monkeypatch.setattr(
        type(base), "rank", lambda *_: {"large": Streamed("U8", (10**8,), 10**8, lambda: iter(()))}
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4 * 10**7}))
    with pytest.raises(ConfigError, match=r"0\.1 GB are to be written, and 0\.0 GB are free"):
        write_checkpoint(make(MEDUSA), base, tmp_path / "out", TREE)
    assert not (tmp_path / "out").exists()


def test_a_tied_target_has_one_matrix_for_both(tmp_path: Path) -> None:
    folder = target_checkpoint(tmp_path / "target")
    store(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    write_checkpoint(make(EAGLE), read_base(folder), tmp_path / "out", TREE)
    [written] = ranks_of(tmp_path / "out")
    embeddings = whole_target()["transformer.vocab_embedding.weight"]
    assert equal(written["eagle_nets.0.lm_head.weight"], embeddings)
    # Split over ranks, its whole embeddings are no rank's rows.
    for rank in range(2):
        file = target_checkpoint(tmp_path / f"two{rank}", 2) / "rank0.safetensors"
        from safetensors.torch import load_file, save_file

        save_file({n: t for n, t in load_file(file).items() if n != "lm_head.weight"}, file)
    with pytest.raises(ConfigError, match=r"vocab_embedding\.weight is \[128, 32\], and config\.json calls"):
        write_checkpoint(make(EAGLE), read_base(tmp_path / "two0"), tmp_path / "out2", TREE)
