"""From the project's configuration to TensorRT-LLM's own objects, of the stand-in engine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from executor_stand_in import VOCAB, engine_stand_in

from spec_plugins import support
from spec_plugins.adapters.tensorrt_llm import flags as tensorrt_flags
from spec_plugins.adapters.tensorrt_llm import speculation, speculative_config
from spec_plugins.adapters.tensorrt_llm.hooks import HOOKS
from spec_plugins.adapters.tensorrt_llm.server import main
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.hooks import check

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"vocab_size": VOCAB, "max_position_embeddings": 300}})
    )
    return str(tmp_path)


def served(engine: SimpleNamespace, *words: str) -> tuple[str, int, dict[str, Any]]:
    main(list(words))
    return engine.served.pop()  # type: ignore[no-any-return]


def refusal(*words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return str(ended.value)


@pytest.mark.parametrize("form", ["first", "second", "third"])
def test_the_hook_table_fits_every_form(form: str) -> None:
    with engine_stand_in(form):
        assert [s.detail for s in map(check, HOOKS) if s.status != "ok"] == []


def test_a_changed_engine_shows_in_the_hook_table(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = sys.modules["tensorrt_llm._torch.speculative.drafter"].Drafter
    monkeypatch.setattr(changed, "prepare_draft_tokens", lambda self, batch: None)
    (wrong,) = [s for s in map(check, HOOKS) if s.status != "ok"]
    assert wrong.status == "changed"
    assert "no longer takes scheduled_requests" in wrong.detail


def test_sizes_are_the_models(model: str) -> None:
    settings = speculative_config("suffix", model).drafter.worker.settings
    assert (settings.vocab_size, settings.max_model_len, settings.max_num_seqs) == (VOCAB, 300, 2048)
    settings = speculative_config("suffix", model, max_seq_len=99, max_batch_size=5).drafter.worker.settings
    assert (settings.vocab_size, settings.max_model_len, settings.max_num_seqs) == (VOCAB, 99, 5)


def test_versions_that_cannot_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "installed_version", lambda engine: "0.21.0")
    for source in ("suffix", "mtp"):
        with pytest.raises(UnsupportedError, match=r"1\.0 or newer, and this is 0\.21\.0"):
            speculative_config(source, model)
    monkeypatch.setattr(speculation, "installed_version", lambda engine: "1.1.0")
    source = {"proposer": "eagle3", "options": {"model": "HEAD"}}
    assert type(speculative_config(source, model)).__name__ == "EagleDecodingConfig"


def test_a_model_whose_sizes_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"no config\.json of 'org/none'.*give vocab_size and max_seq_len"):
        speculative_config("suffix", "org/none")
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ConfigError, match="holds no vocab_size"):
        speculative_config("suffix", str(tmp_path))


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3", "mtp"])
def test_native_methods_are_the_engines_own_objects_and_the_tables(method: str, model: str) -> None:
    source = {"proposer": method, "route": "native", **tensorrt_flags.EXAMPLES[method]}
    made = speculative_config(source, model)
    arguments = ", ".join(f"{name}={value!r}" for name, value in made.fields.items())
    assert (
        f"speculative_config={type(made).__name__}({arguments})"
        in support.ENGINES["tensorrt-llm"].native[method]
    )


@pytest.mark.parametrize("source", ["suffix", "mtp"])
def test_what_the_engine_does_not_take_is_said_in_one_line(
    source: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = sys.modules["tensorrt_llm.llmapi"]

    class Older:
        """Has no such field."""

        def __init__(self, max_draft_len: int, drafter: Any = None, resource_manager: Any = None) -> None:
            pass

    monkeypatch.setattr(engine, "MTPDecodingConfig", Older)
    monkeypatch.setattr(engine, "UserProvidedDecodingConfig", Older)
    with pytest.raises(ConfigError, match=r"Older does not take max_draft_len.*max_concurrency as given"):
        speculative_config(source, model, max_concurrency=4)


def test_the_server_gets_an_object_and_the_users_own_arguments(
    engine: SimpleNamespace, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("max_batch_size: 7\nkv_cache_config:\n  free_gpu_memory_fraction: 0.5\n")
    source = '{"proposer": "suffix", "num_speculative_tokens": 3}'
    host, port, llm = served(
        engine, model, "--spec", source, "--port", "81", "--extra_llm_api_options", str(file),
        "--max-seq-len=64", "--enable_chunked_prefill", "--tp_size", "1",
    )  # fmt: skip
    speculation = llm.pop("speculative_config")
    assert (host, port) == ("localhost", 81)
    assert llm == {
        "model": model, "backend": "pytorch", "max_batch_size": 7, "max_seq_len": 64,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5}, "enable_chunked_prefill": True,
        "tensor_parallel_size": 1,
    }  # fmt: skip
    settings = speculation.drafter.worker.settings
    assert (settings.config.num_speculative_tokens, settings.max_num_seqs, settings.max_model_len) == (
        3,
        7,
        64,
    )
    assert speculation.resource_manager.drafter is speculation.drafter


def test_a_native_method_is_served_on_several_gpus(engine: SimpleNamespace, model: str) -> None:
    source = '{"proposer": "eagle3", "options": {"model": "HEAD"}}'
    llm = served(engine, model, "--spec", source, "--tp_size", "4")[2]
    assert llm["tensor_parallel_size"] == 4
    assert type(llm["speculative_config"]).__name__ == "Eagle3DecodingConfig"


def test_a_proposer_is_told_of_the_engines_ranks(engine: SimpleNamespace, model: str) -> None:
    llm = served(engine, model, "--spec", "suffix", "--tp_size", "4")[2]
    assert llm["speculative_config"].drafter.worker.settings.tensor_parallel_size == 4
    assert speculative_config("suffix", model).drafter.worker.settings.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the first argument is the model"),
        (("MODEL",), "--spec: missing"),
        (("MODEL", "--spec", "sufix"), "did you mean 'suffix'"),
        (("MODEL", "--spec", "suffix", "--port", "x"), "--port: 'x' is no port"),
        (("MODEL", "--spec", "suffix", "stray"), "'stray' is no option"),
        (("MODEL", "--spec", "suffix", "--pp_size", "2"), "pipeline_parallel_size 2: a proposer of this"),
        (("MODEL", "--spec", "suffix", "--enable_attention_dp"), "enable_attention_dp True: a proposer of"),
        (("MODEL", "--spec", "suffix", "--speculative_config", "{}"), "--spec already says it here"),
        (("MODEL", "--spec", "suffix", "--kv_cache_config", "{"), "is not valid YAML"),
        (("MODEL", "--spec", "suffix", "--config", "/nowhere.yaml"), "cannot be read"),
        (("MODEL", "--spec", '{"proposer": "medusa", "options": {"model": "H"}}'), "eagle3 on tensorrt-llm"),
    ],
)
def test_the_launcher_refuses_before_anything_starts(
    words: tuple[str, ...], says: str, engine: SimpleNamespace
) -> None:
    assert re.search(re.escape(says), refusal(*words))
    assert engine.served == []


def test_a_file_that_says_what_drafts_is_refused(tmp_path: Path, model: str) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("speculative_config: {decoding_type: NGram}\n")
    assert "already says it here" in refusal(model, "--spec", "suffix", "--config", str(file))
    file.write_text("[1]\n")
    assert "must hold a mapping" in refusal(model, "--spec", "suffix", "--config", str(file))
