"""How TensorRT-LLM is started, written from the project's configuration. Imports no engine.

On the plugin route a drafter runs a proposer of the registry: an object, which no flag and no file of the
engine's can hold, so a launcher of this project's makes it. On the native route the engine's own method does,
which the file of ``--extra_llm_api_options`` switches on.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from spec_plugins.config import Config, check_native
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.launch import Flags
from spec_plugins.support import METHODS, runs_as_plugin

__all__ = [
    "EXAMPLES", "LAST_COMPILED", "MODES", "NATIVE", "RESERVED", "command", "compiled_only", "flags",
    "native_fields", "option", "release_of", "text_of",
]  # fmt: skip

OLDEST, NEWEST = (1, 0), (1, 3)
"""Versions of TensorRT-LLM whose PyTorch backend this was written from."""
LAST_COMPILED = (1, 2)
"""The last version with the compiled engine builder."""

SPEC = "--spec"
RESERVED = {"spec": SPEC, "model": "the model", "speculative_config": SPEC, "backend": "this backend"}
"""Arguments of ``LLM`` that the launcher sets, and what says them here."""


class _Options(BaseModel):
    """Options of a native method; an alias is TensorRT-LLM's own name. ``None`` leaves its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NgramOptions(_Options):
    """TensorRT-LLM's ``NGram``."""

    max_ngram: Annotated[
        int,
        Field(
            ge=1, serialization_alias="max_matching_ngram_size", description="The longest n-gram looked up."
        ),
    ] = 4
    shared: Annotated[
        bool,
        Field(
            serialization_alias="is_public_pool",
            description="Whether requests draft out of each other's text. Its default: true.",
        ),
    ] = False
    keep_all: Annotated[
        bool | None,
        Field(
            serialization_alias="is_keep_all",
            description="Whether an n-gram keeps all its continuations. Its default: true.",
        ),
    ] = None
    oldest: Annotated[
        bool | None,
        Field(
            serialization_alias="is_use_oldest",
            description="Whether the oldest continuation is taken, not the newest. Its default: true.",
        ),
    ] = None


class DraftOptions(_Options):
    """TensorRT-LLM's draft and target."""

    model: Annotated[str, Field(min_length=1, description="Folder, or Hugging Face name, of the draft.")]


class EagleOptions(DraftOptions):
    """TensorRT-LLM's EAGLE-3."""

    one_model: Annotated[
        bool | None,
        Field(
            serialization_alias="eagle3_one_model",
            description="Whether the head is part of the target's forward pass. Its default: true.",
        ),
    ] = None


class MtpOptions(_Options):
    """TensorRT-LLM's ``MTP``: layers that the target came with."""


class CompiledOptions(_Options):
    """A method of the compiled engine builder alone; its options are checked where an engine is built."""

    model_config = ConfigDict(extra="allow", frozen=True)


NATIVE: Mapping[str, type[_Options]] = {
    "ngram": NgramOptions,
    "draft_model": DraftOptions,
    "eagle3": EagleOptions,
    "mtp": MtpOptions,
    "medusa": CompiledOptions,
    "eagle": CompiledOptions,
    "lookahead": CompiledOptions,
}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4},
    "draft_model": METHODS["draft_model"].example,
    "eagle3": METHODS["eagle3"].example,
    "mtp": {"num_speculative_tokens": 1},
    "medusa": METHODS["medusa"].example,
    "eagle": METHODS["eagle"].example,
    "lookahead": {},
}
MODES = {"medusa": "medusa", "eagle": "eagle", "lookahead": "lookahead_decoding"}
"""Methods of the compiled engine builder, and its names for them."""
_TYPES = {
    "ngram": ("NGram", "NGram"),
    "draft_model": ("DraftTarget", "Draft_Target"),
    "eagle3": ("Eagle", "Eagle3"),
    "mtp": ("MTP", "MTP"),
}
"""Values of ``decoding_type``: up to 1.1, and since."""
_NOTES = {
    "ngram": "TensorRT-LLM's own ngram keeps a request's n-grams to itself here; options.shared lets "
    "requests draft out of each other's text, whoever's it is.",
    "mtp": "mtp is for models that came with such layers.",
}
FILE = "speculative.yaml"


def flags(config: Config, version: str | None) -> Flags:
    """What the launcher is started with, and on the native route the file for ``trtllm-serve`` too.

    Args:
        config: loaded with :data:`NATIVE`; ``route`` says which; ``auto`` is taken for ``plugin``.
        version: TensorRT-LLM's; ``None`` is taken for the newest known.

    Raises:
        ConfigError: the version or an option cannot be used.
        UnsupportedError: not in this version.
    """
    release, notes = release_of(version), []
    if release > NEWEST:
        notes.append(f"TensorRT-LLM {version} is newer than what this was written from: {text_of(NEWEST)}.")
    written = [SPEC, json.dumps(config.model_dump(mode="json", exclude_unset=True))]
    if config.route == "native":
        fields = native_fields(config, version)
        lines = ["speculative_config:", *(f"  {name}: {json.dumps(value)}" for name, value in fields.items())]
        notes += [_NOTES[config.proposer]] if config.proposer in _NOTES else []
        # These are about this project's driver, which does not run here.
        said = config.model_dump(exclude_defaults=True)
        unused = [f for f in ("max_draft_nodes", "containment") if said.get(f)]
        if unused:
            notes.append(
                f"{' and '.join(unused)}: no effect on the native route, where TensorRT-LLM alone drafts."
            )
        notes.append(
            f"Write this to {FILE}, and start `trtllm-serve MODEL --extra_llm_api_options {FILE}`; or start "
            "`spec-plugins serve tensorrt-llm MODEL --spec CONFIG`."
        )
        return Flags("native", written, tuple(notes), file="\n".join(lines))
    if release < OLDEST:
        raise UnsupportedError(
            f"proposers run on the PyTorch backend of TensorRT-LLM {text_of(OLDEST)} or newer, and this is "
            f"{version}; install a newer one"
        )
    notes.append(
        "No flag or file of TensorRT-LLM's can hold a drafter. These are arguments of `spec-plugins serve "
        "tensorrt-llm MODEL`; from Python, spec_plugins.adapters.tensorrt_llm.speculative_config makes one."
    )
    return Flags("plugin", written, tuple(notes))


def native_fields(config: Config, version: str | None) -> dict[str, Any]:
    """``speculative_config`` of the engine's own method, ``decoding_type`` first, by a version's names.

    Raises:
        ConfigError: the version or an option cannot be used.
        UnsupportedError: not in this version, or only in the compiled engine builder.
    """
    release, method = release_of(version), config.proposer
    if method in MODES:
        raise UnsupportedError(compiled_only(method, release))
    if release < OLDEST:
        raise UnsupportedError(
            f"TensorRT-LLM's own {method} is written for its PyTorch backend, {text_of(OLDEST)} or newer, "
            f"and this is {version}; install a newer one"
        )
    options = check_native(method, config.options, NATIVE[method])
    old = release < (1, 2)
    fields: dict[str, Any] = {"decoding_type": _TYPES[method][0 if old else 1]}
    layers = method == "mtp" and release < (1, 3)
    fields["num_nextn_predict_layers" if layers else "max_draft_len"] = config.num_speculative_tokens
    for name, value in options.model_dump(by_alias=True, exclude_none=True).items():
        key = {"model": "speculative_model_dir" if old else "speculative_model"}.get(name, name)
        fields[key] = value
    return fields


def compiled_only(method: str, release: tuple[int, int]) -> str:
    """Why the PyTorch backend does not have a method of the builder's, and what it has instead."""
    mode = f"trtllm-build --speculative_decoding_mode {MODES[method]}"
    where = f"TensorRT-LLM has {method} in its compiled engine builder alone"
    what = (
        f"{where}, and {text_of(release)} has no builder: {text_of(LAST_COMPILED)} was the last"
        if release > LAST_COMPILED
        else f"{where} ({mode}), which `spec-plugins build tensorrt-llm` runs"
    )
    if runs_as_plugin("tensorrt-llm", method):
        return f"{what}. Nearest: {method} on tensorrt-llm (plugin)"
    other = next(m for m in METHODS[method].nearest if m in NATIVE and m not in MODES)
    shown = {"proposer": other, **EXAMPLES[other]}
    return f"{what}. Nearest: {other} on tensorrt-llm (native), {json.dumps(shown)}"


def release_of(version: str | None) -> tuple[int, int]:
    """The first two numbers of a version, of the newest known for ``None``; raises :class:`ConfigError`."""
    if version is None:
        return NEWEST
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(
            f"engine version: {version!r} is no version of TensorRT-LLM; give one such as {text_of(NEWEST)}.0"
        )
    return int(found[1]), int(found[2])


def text_of(release: tuple[int, int]) -> str:
    """As people write it."""
    return f"{release[0]}.{release[1]}"


def option(word: str) -> str:
    """The argument of ``LLM`` that a command-line option means; empty for what is no option."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return ""
    key = name[2:].replace("-", "_")
    return {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}.get(key, key)


def command(model: str, written: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The launcher with flags from :func:`flags` and the user's own arguments.

    Raises:
        ConfigError: an argument would replace one of the flags.
    """
    for word in arguments:
        if option(word) in RESERVED:
            raise ConfigError(
                f"{word.partition('=')[0]}: {RESERVED[option(word)]} already says it here; leave it out"
            )
    return [sys.executable, "-m", "spec_plugins.adapters.tensorrt_llm.server", model, *written, *arguments]
