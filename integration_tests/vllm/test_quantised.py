"""A target with int8 weights and activations: its own output under speculation, and its evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from offline import MakeEngine, engine, greedy, statistics_of

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True
            },
        }
    },
}  # fmt: skip
"""A scale for each output of a weight; activations are rounded as they come, with a scale for each token."""


def quantise(model: Path, folder: Path) -> Path:
    """Write a model with its linear layers in int8, in the layout of compressed-tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        tensors[name] = weight
        if "_proj." in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = torch.round(weight / scale).to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**about, "quantization_config": W8A8}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def quantised(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model in int8."""
    return quantise(tiny_model, tmp_path_factory.mktemp("quantised") / "w8a8")


def scheme_of(llm: Any) -> str:
    """What the engine runs a linear layer with."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    layer = executor.driver_worker.worker.model_runner.model.model.layers[0].mlp.down_proj
    return type(getattr(layer, "scheme", None)).__name__


def test_the_output_is_that_of_the_quantised_target(
    quantised: Path, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    with engine(quantised, max_num_seqs=4) as plain:
        assert scheme_of(plain) == "CompressedTensorsW8A8Int8"
        wanted = greedy(plain, prompts)
    with engine(quantised, "suffix", max_num_seqs=4) as llm:
        assert scheme_of(llm) == "CompressedTensorsW8A8Int8"
        found = greedy(llm, prompts)
        figures = statistics_of(llm)
        assert not figures.faults
        assert figures.accepted_tokens > 50
    assert found == wanted
    with make_engine(max_num_seqs=4) as unquantised:
        assert scheme_of(unquantised) == "NoneType"
        other = greedy(unquantised, prompts)
    # A control: rounding changes what is said, though hardly from the first token on.
    assert other != found
    assert sum(a[0] == b[0] for a, b in zip(other, found, strict=True)) >= 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_evaluation(
    quantised: Path,
    tiny_model: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's answers are the quantised target's, and both targets' steps are measured."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("SPEC_PLUGINS_CACHE", str(tmp_path / "cache"))
    from typer.testing import CliRunner

    from spec_plugins.cli import app
    from spec_plugins.evaluation.quantisation import Quantisation

    traffic, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    traffic.write_text("\n".join(json.dumps({"prompt_token_ids": p}) for p in prompts))
    command = ["evaluate", str(quantised), "--unquantised", str(tiny_model), "--traffic", str(traffic)]
    command += ["--report", str(out), "--engine", "vllm", "--generate", "12", "--max-new-tokens", "48"]
    command += ["--concurrency", "1,2", "--steps", "8", "--dtype", "float32"]
    command += ["--spec", '{"proposer": "suffix", "num_speculative_tokens": 3}']
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    answers = {}
    for line in (out / "answered.jsonl").read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        answers[tuple(kept["prompt_token_ids"])] = kept["token_ids"]
    found = Quantisation.model_validate_json((out / "quantisation.json").read_text(encoding="utf-8"))
    assert [at.concurrency for at in found.at] == [1, 2]
    for at in found.at:
        assert at.both.value == pytest.approx(at.quantising.value * at.speculation.value)
    assert found.quantised.model != found.unquantised.model
    with engine(quantised) as plain:
        said = greedy(plain, prompts, ignore_eos=False)
    assert [answers[tuple(p)] for p in prompts] == said
