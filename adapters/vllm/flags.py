"""vLLM's flags, written from the project's configuration. Imports no engine.

On the plugin route a proposer of the registry runs inside vLLM; on the native route vLLM's own method does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spec_plugins.config import Config, check_native
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.launch import Flags, in_config_file
from spec_plugins.support import METHODS, runs_as_plugin

__all__ = ["EXAMPLES", "NATIVE", "command", "flags"]

OLDEST, NEWEST = (0, 22), (0, 33)
"""Versions of vLLM that this was read in."""
_REMOVED = {"medusa": (0, 33)}
"""Native methods that a version of vLLM no longer has."""

_SPECULATIVE, _ADDITIONAL = "--speculative-config", "--additional-config"
_RESERVED = (_SPECULATIVE, "--spec-method", "--spec-model", "--spec-tokens")


class _Options(BaseModel):
    """Options of a native method; an alias is vLLM's own name. ``None`` leaves vLLM's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NgramOptions(_Options):
    """vLLM's ``ngram``. It has no choice between several places: it takes the earliest."""

    max_ngram: Annotated[
        int, Field(ge=1, serialization_alias="prompt_lookup_max", description="The longest n-gram looked up.")
    ] = 4
    min_ngram: Annotated[
        int,
        Field(ge=1, serialization_alias="prompt_lookup_min", description="The shortest n-gram looked up."),
    ] = 1

    @model_validator(mode="after")
    def _in_order(self) -> NgramOptions:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is more than max_ngram {self.max_ngram}; lower it")
        return self


class SuffixOptions(_Options):
    """vLLM's ``suffix``, which is Arctic Inference's."""

    min_probability: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            serialization_alias="suffix_decoding_min_token_prob",
            description="Least estimated probability of a drafted token. vLLM's default: 0.1.",
        ),
    ] = None
    length_factor: Annotated[
        float | None,
        Field(
            ge=0,
            serialization_alias="suffix_decoding_max_spec_factor",
            description="Most draft tokens in a row for each token of the match. vLLM's default: 1.",
        ),
    ] = None
    max_tree_depth: Annotated[
        int | None,
        Field(
            ge=1,
            serialization_alias="suffix_decoding_max_tree_depth",
            description="Most tokens of match and draft together. vLLM's default: 24.",
        ),
    ] = None
    max_cached_requests: Annotated[
        int | None,
        Field(
            ge=0,
            serialization_alias="suffix_decoding_max_cached_requests",
            description="Most earlier requests that are kept; 0: none. vLLM's default: 10,000.",
        ),
    ] = None


class _Weights(_Options):
    """How to load a draft's weights."""

    revision: Annotated[str | None, Field(description="Branch, tag or commit on the Hugging Face Hub.")] = (
        None
    )
    quantization: Annotated[str | None, Field(description="How the draft's weights are quantized.")] = None
    max_model_len: Annotated[int | None, Field(ge=1, description="The draft's longest sequence.")] = None
    draft_tensor_parallel_size: Annotated[
        int | None, Field(ge=1, description="1, or as many GPUs as the target has.")
    ] = None


_Sampling = Annotated[
    Literal["greedy", "probabilistic"] | None,
    Field(description="How draft tokens are chosen. vLLM's default: greedy."),
]


class MedusaOptions(_Weights):
    """vLLM's ``medusa``."""

    model: Annotated[str, Field(min_length=1, description="Folder, or Hugging Face name, of the heads.")]


class DraftOptions(_Weights):
    """vLLM's ``draft_model``, ``eagle`` and ``eagle3``."""

    model: Annotated[str, Field(min_length=1, description="Folder, or Hugging Face name, of the draft.")]
    draft_sample_method: _Sampling = None
    parallel_drafting: Annotated[
        bool | None, Field(description="All draft tokens in one forward pass, for drafts trained for that.")
    ] = None


class MtpOptions(_Weights):
    """vLLM's ``mtp``."""

    model: Annotated[
        str | None, Field(min_length=1, description="Where the layers are not in the target: their folder.")
    ] = None
    draft_sample_method: _Sampling = None


NATIVE: Mapping[str, type[_Options]] = {
    "ngram": NgramOptions,
    "suffix": SuffixOptions,
    "draft_model": DraftOptions,
    "eagle": DraftOptions,
    "eagle3": DraftOptions,
    "mtp": MtpOptions,
    "medusa": MedusaOptions,
}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"num_speculative_tokens": 5},
    "suffix": {"num_speculative_tokens": 8},
    "mtp": {"num_speculative_tokens": 1},
    **{method: METHODS[method].example for method in ("draft_model", "eagle", "eagle3", "medusa")},
}
_NOTES = {
    "ngram": "Of several places, vLLM's own ngram takes the earliest; the proposer ngram takes the newest.",
    "suffix": "vLLM's own suffix needs arctic-inference: pip install arctic-inference==0.1.1",
    "mtp": "mtp is for models that came with such layers.",
}


def flags(config: Config, version: str | None) -> Flags:
    """vLLM's flags for a configuration that was loaded with :data:`NATIVE`, and whose route is settled.

    Args:
        config: ``route`` says which; ``auto`` is taken for ``plugin``.
        version: vLLM's; ``None`` is taken for the newest known.

    Raises:
        ConfigError: the version or an option cannot be used.
        UnsupportedError: not in this version.
    """
    release = NEWEST if version is None else _release(version)
    notes = []
    if release > NEWEST:
        notes.append(f"vLLM {version} is newer than what these flags were checked against: {_text(NEWEST)}.")
    if config.route == "native":
        return _native(config, release, notes)
    if release < OLDEST:
        raise UnsupportedError(
            f"proposers run in vLLM {_text(OLDEST)} or newer, and this is {version}; install a newer one"
        )
    speculative = {
        "method": "custom_class",
        "model": f"spec_plugins.adapters.vllm.{config.proposer}",
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    written = [_SPECULATIVE, json.dumps(speculative)]
    # What vLLM's own flag already says would be said twice.
    rest = config.model_dump(
        mode="json", exclude_defaults=True, exclude={"proposer", "num_speculative_tokens", "route"}
    )
    if rest:
        written += [_ADDITIONAL, json.dumps({"spec_plugins": rest})]
    return Flags("plugin", written, tuple(notes))


def _native(config: Config, release: tuple[int, int], notes: list[str]) -> Flags:
    method = config.proposer
    removed = _REMOVED.get(method)
    if removed and release >= removed:
        if runs_as_plugin("vllm", method):
            nearest = f"{method} on vllm (plugin)"
        else:
            other = next(m for m in METHODS[method].nearest if m in NATIVE and m not in _REMOVED)
            nearest = f"{other} on vllm (native)"
        raise UnsupportedError(
            f"vLLM {_text(release)} has no {method} of its own: {_text(removed)} removed it. Nearest: "
            f"{nearest}, or {method} in vLLM {removed[0]}.{removed[1] - 1}"
        )
    options = check_native(method, config.options, NATIVE[method])
    speculative = {
        "method": method,
        **options.model_dump(by_alias=True, exclude_none=True),
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    if method in _NOTES:
        notes.append(_NOTES[method])
    # These are about this project's driver, which does not run here.
    unused = [
        f for f in ("max_draft_nodes", "containment") if config.model_dump(exclude_defaults=True).get(f)
    ]
    if unused:
        notes.append(f"{' and '.join(unused)}: no effect on the native route, where vLLM alone drafts.")
    return Flags("native", [_SPECULATIVE, json.dumps(speculative)], tuple(notes))


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"engine version: {version!r} is no version of vLLM; give one such as 0.32.0")
    return int(found[1]), int(found[2])


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def command(model: str, written: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """``vllm serve`` with flags from :func:`flags` and the user's own arguments.

    Raises:
        ConfigError: an argument would replace one of the flags.
    """
    ours = dict(zip(written[::2], written[1::2], strict=True))
    rest: list[str] = []
    additional: dict[str, Any] | None = None
    words = iter(arguments)
    for word in words:
        name, joined, value = word.partition("=")
        option = _option(name)
        if option in _RESERVED:
            raise ConfigError(f"{name}: --spec already says what drafts; leave one of the two out")
        if option != _ADDITIONAL:
            rest.append(word)
            continue
        # vLLM gathers dotted ones into a second flag, which would replace the first.
        if "." in name:
            raise ConfigError(f"{name}: write it as JSON, {_ADDITIONAL} '{{...}}', so that it can be merged")
        additional = _additional(value if joined else next(words, ""))
    _check_file(arguments, ours)
    if additional is not None:
        own = json.loads(ours.get(_ADDITIONAL, "{}"))
        ours[_ADDITIONAL] = json.dumps({**additional, **own})
    return ["vllm", "serve", model, *(part for flag in ours.items() for part in flag), *rest]


def _option(name: str) -> str:
    """The flag that vLLM takes a name for: with underscores, dotted, short, or only begun."""
    key = name.partition(".")[0].replace("_", "-")
    if key == "-sc":
        return _SPECULATIVE
    begun = key.startswith("--") and len(key) > 3
    return next((o for o in (*_RESERVED, _ADDITIONAL) if begun and o.startswith(key)), key)


def _additional(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_ADDITIONAL}: {text!r} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_ADDITIONAL}: {text!r} must be a JSON object")
    if "spec_plugins" in given:
        raise ConfigError(
            f"{_ADDITIONAL}: 'spec_plugins' comes from --spec here; leave it out of one of them"
        )
    return given


def _check_file(arguments: Sequence[str], ours: Mapping[str, str]) -> None:
    for name, file in in_config_file(arguments):
        option = f"--{name}".replace("_", "-")
        if option in _RESERVED or (option == _ADDITIONAL and option in ours):
            raise ConfigError(
                f"{name} in {file!r} would be replaced by what --spec gives; move it out of there"
            )
