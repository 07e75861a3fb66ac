"""What a compiled engine of TensorRT-LLM's is run with, and whether it was built for that.

The same numbers stand in two places: in the engine, which is built for them, and in what is given to it when
it runs. Both are written from one configuration here, and compared.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_plugins.adapters.tensorrt_llm.compiled import COMPILED, EXTERNAL, MODES, LookaheadOptions
from spec_plugins.adapters.tensorrt_llm.trees import (
    best_choices,
    chain,
    depth_of,
    lookahead_draft_len,
    non_leaves_of,
)
from spec_plugins.checkpoints import MedusaConfig
from spec_plugins.checkpoints.files import read_config, read_json
from spec_plugins.config import Config, check_native
from spec_plugins.errors import ConfigError, UnavailableError
from spec_plugins.trees import USUAL_NODES

__all__ = [
    "RUNTIME",
    "check_engine",
    "choices_in",
    "executor_config",
    "runtime_of",
]

RUNTIME = "runtime.json"
_NUMBERS = {
    "none": 1,
    EXTERNAL: 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
"""Its ``SpeculativeDecodingMode``, which an engine's ``config.json`` has as a number."""
_USUAL_EAGLE_DEPTH = 4
"""What its own converter takes where nothing is said."""


def runtime_of(config: Config, heads: MedusaConfig | None = None) -> dict[str, Any]:
    """What an engine for a configuration is run with, as :data:`RUNTIME` holds it.

    ``decoding_config`` are arguments of ``tensorrt_llm.bindings.executor.DecodingConfig``, ``run_arguments``
    those of TensorRT-LLM's ``examples/run.py``.

    Args:
        config: of a method that the builder has, its options checked.
        heads: Medusa's; where the configuration has no choices, the tree is chosen by their accuracies, or
            is a chain of all of them.

    Raises:
        ConfigError: an option cannot be used.
    """
    method = config.proposer
    if method == "draft_model":
        length = config.num_speculative_tokens
        return {
            "speculative_decoding_mode": EXTERNAL,
            "max_draft_len": length,
            "draft_engine": "draft-engine",
            "run_arguments": [
                "--draft_engine_dir=draft-engine", f"--draft_target_model_config=[{length},[0],[0],False]",
                "--kv_cache_enable_block_reuse",
            ],
        }  # fmt: skip
    options = check_native(method, config.options, COMPILED[method])
    mode = {"speculative_decoding_mode": MODES[method]}
    if isinstance(options, LookaheadOptions):
        window, ngram, verified = options.window, options.ngram, options.verification_set
        return {
            **mode,
            "max_draft_len": lookahead_draft_len(window, ngram, verified),
            "decoding_config": {"lookahead_decoding_config": options.model_dump(by_alias=True)},
            "run_arguments": [f"--lookahead_config=[{window},{ngram},{verified}]"],
        }
    said = options.model_dump()
    choices = said["choices"] or _usual_choices(config, heads)
    written = json.dumps(choices, separators=(",", ":"))
    sizes = {**mode, "max_draft_len": len(choices)}
    if method == "medusa":
        return {
            **sizes,
            "decoding_config": {"medusa_choices": choices},
            "run_arguments": [f"--medusa_choices={written}"],
        }
    threshold = said["posterior_threshold"]
    asked = [] if threshold is None else [f"--eagle_posterior_threshold={threshold}"]
    return {
        **sizes,
        "decoding_config": {
            "eagle_config": {
                "eagle_choices": choices,
                "greedy_sampling": threshold is None,
                "posterior_threshold": threshold,
            }
        },
        "run_arguments": [f"--eagle_choices={written}", *asked],
    }


def choices_in(runtime: Mapping[str, Any]) -> list[list[int]] | None:
    """The tree of :func:`runtime_of`; ``None`` for a method without one."""
    found = runtime.get("decoding_config", {})
    choices = found.get("medusa_choices") or found.get("eagle_config", {}).get("eagle_choices")
    assert choices is None or isinstance(choices, list)
    return choices


def _usual_choices(config: Config, heads: MedusaConfig | None) -> list[list[int]]:
    """The tree where none is given: a Medusa tree, as the heads were measured, or a chain."""
    said = "num_speculative_tokens" in config.model_fields_set
    most = config.num_speculative_tokens if said else None
    if heads is not None and heads.accuracies:
        measured = heads.accuracies[: min(most or heads.num_heads, heads.num_heads)]
        return best_choices(measured, config.max_draft_nodes or USUAL_NODES)
    return chain(most or (heads.num_heads if heads else _USUAL_EAGLE_DEPTH))


def check_engine(engine: str | Path, runtime: Mapping[str, Any]) -> None:
    """Compare an engine that is built with what it is to be run with.

    Args:
        engine: folder that ``trtllm-build`` wrote.
        runtime: of :func:`runtime_of`.

    Raises:
        ConfigError: they do not fit; names what is built in and what is asked for.
    """
    file = Path(engine) / "config.json"
    config = read_config(engine)
    built, model = config.get("build_config"), config.get("pretrained_config")
    if not isinstance(built, dict) or not isinstance(model, dict):
        raise ConfigError(
            f"{file}: has no build_config and pretrained_config; give a folder of trtllm-build's"
        )
    mode = runtime["speculative_decoding_mode"]
    found = built.get("speculative_decoding_mode")
    named = next((name for name, number in _NUMBERS.items() if found in (number, name, name.upper())), found)
    asked: list[tuple[str, object, object, bool]] = [
        ("speculative_decoding_mode", named, mode, named == mode),
    ]
    # A smaller tree fits into a larger engine; lookahead's windows have to be those that it was built for.
    exact = mode == "lookahead_decoding"
    asked.append(_size("max_draft_len", built, runtime["max_draft_len"], exact))
    choices = choices_in(runtime)
    if choices is not None and mode == "medusa":
        asked.append(_size("num_medusa_heads", model, depth_of(choices)))
    if choices is not None and mode == "eagle":
        asked.append(_size("num_eagle_layers", model, depth_of(choices), exact=True))
        asked.append(_size("max_non_leaves_per_layer", model, non_leaves_of(choices)))
    wrong = [
        f"{name} is {there!r}, and {what!r} is asked for" for name, there, what, fits in asked if not fits
    ]
    if wrong:
        raise ConfigError(
            f"{file}: {'; '.join(wrong)}. Build the engine for this configuration, or run it with the "
            "one that it was built for"
        )


def _size(
    name: str, built: Mapping[str, Any], asked: int, exact: bool = False
) -> tuple[str, object, object, bool]:
    there = built.get(name)
    fits = isinstance(there, int) and (there == asked if exact else there >= asked)
    return name, there, asked, fits


def executor_config(engine: str | Path, runtime: str | Path | Mapping[str, Any]) -> Any:
    """``DecodingConfig`` for TensorRT-LLM's executor, once the engine is known to be built for it.

    Args:
        engine: its folder.
        runtime: the file :data:`RUNTIME`, or what it holds.

    Raises:
        ConfigError: as :func:`check_engine`; a draft model of its own, which is asked for with each request.
        UnavailableError: there is no TensorRT-LLM here with such an executor.
    """
    held = runtime if isinstance(runtime, Mapping) else read_json(Path(runtime))
    check_engine(engine, held)
    mode, fields = held["speculative_decoding_mode"], held.get("decoding_config")
    if fields is None:
        raise ConfigError(
            f"{mode} has no decoding configuration: each request brings its draft tokens, in "
            "ExternalDraftTokensConfig"
        )
    try:
        executor = importlib.import_module("tensorrt_llm.bindings.executor")
    except ModuleNotFoundError as error:
        raise UnavailableError(f"TensorRT-LLM up to 1.2 is not installed here: {error}") from error
    made = {
        "medusa_choices": lambda value: value,
        "eagle_config": lambda value: executor.EagleConfig(**value),
        "lookahead_decoding_config": lambda value: executor.LookaheadDecodingConfig(**value),
    }
    kind = {"medusa": "Medusa", "eagle": "Eagle", "lookahead_decoding": "Lookahead"}[mode]
    return executor.DecodingConfig(
        decoding_mode=getattr(executor.DecodingMode, kind)(),
        **{name: made[name](value) for name, value in fields.items()},
    )
