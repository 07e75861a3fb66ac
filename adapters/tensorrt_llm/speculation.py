"""From the project's configuration to the object that ``LLM(..., speculative_config=...)`` takes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_plugins.adapters.tensorrt_llm.drafter import engine_part, make_drafter, make_resource_manager
from spec_plugins.adapters.tensorrt_llm.flags import flags, native_fields
from spec_plugins.adapters.tensorrt_llm.hooks import USER_PROVIDED
from spec_plugins.adapters.tensorrt_llm.settings import MAX_BATCH_SIZE, Settings, model_sizes
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError, UnavailableError
from spec_plugins.launch import installed_version, resolve

__all__ = ["speculative_config"]

_CLASSES = {
    "NGram": "NGramDecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
    "Eagle": "EagleDecodingConfig",
    "Eagle3": "Eagle3DecodingConfig",
    "MTP": "MTPDecodingConfig",
}
"""The engine's class for each value of ``decoding_type``."""


def speculative_config(
    source: Config | Mapping[str, Any] | str | Path | None,
    model: str,
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    max_concurrency: int | None = None,
    draft_len_schedule: Mapping[int, int] | None = None,
    tensor_parallel_size: int = 1,
) -> Any:
    """What TensorRT-LLM's ``LLM`` takes for its ``speculative_config``; needs TensorRT-LLM.

    Args:
        source: as :func:`spec_plugins.config.load_config` takes it.
        model: the target's folder or name, as the engine gets it.
        vocab_size, max_seq_len: default: read from the model's ``config.json``.
        max_batch_size: the engine's; default: 2048, which is the engine's.
        max_concurrency, draft_len_schedule: the engine's own settings of a drafter, passed on.
        tensor_parallel_size: the engine's; with a proposer of this project, the first rank drafts for all.

    Returns:
        A ``UserProvidedDecodingConfig`` on the plugin route; the engine's own on the native route.

    Raises:
        ConfigError, UnknownProposerError: something cannot be used.
        UnsupportedError: it cannot run in TensorRT-LLM; says why, and what can.
        UnavailableError: there is no TensorRT-LLM here.
    """
    config, version = resolve("tensorrt-llm", source), installed_version("tensorrt-llm")
    flags(config, version)  # refuses what this version cannot
    asked = {"max_concurrency": max_concurrency, "draft_len_schedule": draft_len_schedule}
    more = {name: value for name, value in asked.items() if value is not None}
    if config.route == "native":
        fields = native_fields(config, version)
        return _make(_class(_CLASSES[fields.pop("decoding_type")]), {**fields, **more})
    if vocab_size is None or max_seq_len is None:
        known = model_sizes(model)
        vocab_size, max_seq_len = vocab_size or known[0], max_seq_len or known[1]
    settings = Settings(
        config, vocab_size, max_seq_len, max_batch_size or MAX_BATCH_SIZE, model, max_concurrency,
        draft_len_schedule, tensor_parallel_size,
    )  # fmt: skip
    _approve()
    drafter = make_drafter(settings.to_json())
    fields = {
        "max_draft_len": config.num_speculative_tokens,
        "drafter": drafter,
        "resource_manager": make_resource_manager(drafter),
    }
    return _make(engine_part(USER_PROVIDED), {**fields, **more})


def _make(cls: Any, fields: Mapping[str, Any]) -> Any:
    try:
        return cls(**fields)
    except (TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise ConfigError(
            f"the installed TensorRT-LLM's {cls.__name__} does not take {', '.join(fields)} as given: {error}"
        ) from error


def _class(name: str) -> Any:
    try:
        return getattr(importlib.import_module("tensorrt_llm.llmapi"), name)
    except Exception as error:  # its import may raise anything
        raise UnavailableError(
            f"tensorrt_llm.llmapi has no {name} here ({type(error).__name__}: {error}): install TensorRT-LLM "
            "beside spec-plugins, in a version that has this method"
        ) from error


def _approve() -> None:
    """Let the engine's own unpickler, where it is used, make what our pickles name: two functions of ours."""
    with contextlib.suppress(Exception):  # where there is none, plain pickles are used
        approve = importlib.import_module("tensorrt_llm.serialization").register_approved_class
        for function in (make_drafter, make_resource_manager):
            approve(function)
