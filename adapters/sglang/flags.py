"""SGLang's flags, written from the project's configuration. Imports no engine.

On the plugin route a proposer of the registry runs inside SGLang; on the native route SGLang's own method
does. SGLang counts the last committed token as a draft token, this project does not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from spec_plugins.adapters.sglang.names import ALGORITHM, CONFIG_VARIABLE, algorithm_name
from spec_plugins.config import Config, Containment, check_native
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.launch import Flags, in_config_file
from spec_plugins.registry import registry

__all__ = ["EXAMPLES", "NATIVE", "command", "flags"]

SEEN = (0, 5, 23)
"""The version of SGLang that this was read in."""

_ALGORITHM, _STEPS, _WIDTH = (
    "--speculative-algorithm",
    "--speculative-num-steps",
    "--speculative-num-draft-tokens",
)
_DRAFT, _TOPK = "--speculative-draft-model-path", "--speculative-eagle-topk"
_SAMPLING = "--speculative-use-rejection-sampling"
"""The only one without a value."""
_MODEL = ("--model-path", "--model")
_BREADTH = (1, 10)
"""SGLang's defaults."""


class _Options(BaseModel):
    """Options of a native method; an alias is SGLang's own flag. ``None`` leaves SGLang's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NgramOptions(_Options):
    """SGLang's ``NGRAM``: a tree out of a trie of what was seen before, over all requests."""

    prefer: Annotated[
        Literal["most_recent", "most_frequent"] | None,
        Field(
            serialization_alias="--speculative-ngram-match-type",
            description="Which continuations come first. SGLang's default: most_recent.",
        ),
    ] = None
    min_breadth: Annotated[
        int | None,
        Field(
            ge=1,
            serialization_alias="--speculative-ngram-min-bfs-breadth",
            description="The same for the deepest nodes. SGLang's default: 1.",
        ),
    ] = None
    max_breadth: Annotated[
        int | None,
        Field(
            ge=1,
            serialization_alias="--speculative-ngram-max-bfs-breadth",
            description="Most branches that a match gives a node. SGLang's default: 10.",
        ),
    ] = None
    max_tree_depth: Annotated[
        int | None,
        Field(
            ge=2,
            serialization_alias="--speculative-ngram-max-trie-depth",
            description="Most tokens of match and draft together. SGLang's default: 18.",
        ),
    ] = None
    capacity: Annotated[
        int | None,
        Field(
            ge=1,
            serialization_alias="--speculative-ngram-capacity",
            description="Nodes of the trie. SGLang's default: 10,000,000.",
        ),
    ] = None
    corpus: Annotated[
        str | None,
        Field(
            min_length=1,
            serialization_alias="--speculative-ngram-external-corpus-path",
            description="A file of JSON strings, one a line, that is looked up too.",
        ),
    ] = None
    corpus_nodes: Annotated[
        int | None,
        Field(
            ge=0,
            serialization_alias="--speculative-ngram-external-sam-budget",
            description="Draft nodes kept for what the corpus gives. SGLang's default: 0.",
        ),
    ] = None
    corpus_max_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            serialization_alias="--speculative-ngram-external-corpus-max-tokens",
            description="A longer corpus is refused. SGLang's default: 10,000,000.",
        ),
    ] = None

    @field_serializer("prefer")
    def _match_type(self, value: str | None) -> str | None:
        return {"most_recent": "BFS", "most_frequent": "PROB"}.get(value or "")

    @model_validator(mode="after")
    def _fits_together(self) -> NgramOptions:
        low, high = self.min_breadth or _BREADTH[0], self.max_breadth or _BREADTH[1]
        if low > high:
            raise ValueError(f"min_breadth {low} is more than max_breadth {high}; lower it")
        if self.corpus is not None and not self.corpus_nodes:
            raise ValueError(
                f"corpus_nodes {self.corpus_nodes or 0} leaves the corpus {self.corpus!r} no room in the "
                "draft; set it to 1 or more"
            )
        return self


class _Drafting(_Options):
    """How to load a draft's weights, and what shape its drafts have."""

    revision: Annotated[
        str | None,
        Field(
            serialization_alias="--speculative-draft-model-revision",
            description="Branch, tag or commit on the Hugging Face Hub.",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        Field(
            serialization_alias="--speculative-draft-model-quantization",
            description="How the draft's weights are quantized. SGLang's default: as the target's.",
        ),
    ] = None
    load_format: Annotated[
        str | None,
        Field(
            serialization_alias="--speculative-draft-load-format",
            description="Format of the draft's weights. SGLang's default: the target's.",
        ),
    ] = None
    topk: Annotated[
        int,
        Field(
            ge=1,
            serialization_alias=_TOPK,
            description="Branches of a node; 1: chains. With more, set `max_draft_nodes` too.",
        ),
    ] = 1


class _Heads(_Drafting):
    draft_sample_method: Annotated[
        Literal["greedy", "probabilistic"] | None,
        Field(
            serialization_alias=_SAMPLING,
            description="How draft tokens are chosen; `probabilistic` needs `topk` 1 and a draft with the "
            "target's whole vocabulary. SGLang's default: greedy.",
        ),
    ] = None
    token_map: Annotated[
        str | None,
        Field(
            min_length=1,
            serialization_alias="--speculative-token-map",
            description="File with the tokens that the draft is limited to; not for EAGLE3.",
        ),
    ] = None

    @field_serializer("draft_sample_method")
    def _switch(self, value: str | None) -> bool | None:
        return True if value == "probabilistic" else None

    @model_validator(mode="after")
    def _sampled_drafts_are_chains(self) -> _Heads:
        if self.draft_sample_method == "probabilistic" and self.topk > 1:
            raise ValueError(
                f"draft_sample_method 'probabilistic' needs chains, and topk is {self.topk}; set topk to 1, "
                "or draft_sample_method to 'greedy'"
            )
        return self


_Model = Annotated[
    str,
    Field(
        min_length=1, serialization_alias=_DRAFT, description="Folder, or Hugging Face name, of the draft."
    ),
]


class DraftOptions(_Drafting):
    """SGLang's ``STANDALONE``."""

    model: _Model


class EagleOptions(_Heads):
    """SGLang's ``EAGLE`` and ``EAGLE3``."""

    model: _Model


class MtpOptions(_Heads):
    """SGLang's ``NEXTN``."""

    model: Annotated[
        str | None,
        Field(
            min_length=1,
            serialization_alias=_DRAFT,
            description="Where SGLang does not find the layers by itself: the folder that has them.",
        ),
    ] = None

    @model_validator(mode="after")
    def _a_revision_is_some_models(self) -> MtpOptions:
        if self.revision is not None and self.model is None:
            raise ValueError(f"revision {self.revision!r} is of no model; set model, or leave it out")
        return self


_METHODS: Mapping[str, tuple[str, type[_Options]]] = {
    "ngram": ("NGRAM", NgramOptions),
    "draft_model": ("STANDALONE", DraftOptions),
    "eagle": ("EAGLE", EagleOptions),
    "eagle3": ("EAGLE3", EagleOptions),
    "mtp": ("NEXTN", MtpOptions),
}
NATIVE: Mapping[str, type[_Options]] = {method: options for method, (_, options) in _METHODS.items()}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"num_speculative_tokens": 11},
    "draft_model": {"num_speculative_tokens": 3, "options": {"model": "DRAFT"}},
    "eagle": {"num_speculative_tokens": 3, "options": {"model": "HEAD"}},
    "eagle3": {"num_speculative_tokens": 3, "options": {"model": "HEAD"}},
    "mtp": {"num_speculative_tokens": 3},
}


def flags(config: Config, version: str | None) -> Flags:
    """SGLang's flags for a configuration that was loaded with :data:`NATIVE`, and whose route is settled.

    Args:
        config: ``route`` says which; ``auto`` is taken for ``plugin``.
        version: SGLang's; ``None`` is taken for the one that was read.

    Raises:
        ConfigError: the version or an option cannot be used.
        UnsupportedError: not in this version.
    """
    release = SEEN if version is None else _release(version)
    native = config.route == "native"
    if release < SEEN and not native:
        raise UnsupportedError(
            f"proposers run in SGLang {_text(SEEN)} or newer, and this is {version}; install a newer one"
        )
    notes = []
    if release != SEEN:
        age = "newer" if release > SEEN else "older"
        notes.append(f"SGLang {version} is {age} than what these flags were checked against: {_text(SEEN)}.")
    return _native(config, notes) if native else _plugin(config, notes)


def _plugin(config: Config, notes: Sequence[str]) -> Flags:
    name = algorithm_name(config.proposer)
    # What a flag says already would be said twice.
    said = {"proposer", "num_speculative_tokens", "max_draft_nodes", "route"}
    if sum(algorithm_name(proposer) == name for proposer in registry().proposers) > 1:
        name, said = ALGORITHM, said - {"proposer"}
    written = [_ALGORITHM, name]
    if "num_speculative_tokens" in config.model_fields_set:
        written += [_STEPS, str(config.num_speculative_tokens)]
    if config.max_draft_nodes is not None:
        written += [_WIDTH, str(config.max_draft_nodes + 1)]
    rest = config.model_dump(mode="json", exclude_defaults=True, exclude=said)
    return Flags("plugin", written, tuple(notes), {CONFIG_VARIABLE: json.dumps(rest)} if rest else {})


def _native(config: Config, notes: list[str]) -> Flags:
    method = config.proposer
    algorithm, model = _METHODS[method]
    options = check_native(method, config.options, model)
    dumped = options.model_dump(by_alias=True, exclude={"topk"})
    written = {_ALGORITHM: algorithm, **{flag: value for flag, value in dumped.items() if value is not None}}
    if isinstance(options, NgramOptions):
        nodes = config.max_draft_nodes or config.num_speculative_tokens
        if (options.corpus_nodes or 0) > nodes:
            raise ConfigError(
                f"options.corpus_nodes: {options.corpus_nodes} is more than the {nodes} nodes of a draft; "
                "lower it, or raise max_draft_nodes"
            )
        # --speculative-num-steps is no limit here: SGLang only reserves memory by it, and knows how much.
        if nodes > config.num_speculative_tokens:
            notes.append(
                f"SGLang's own ngram has no limit of depth: one chain may take all {nodes} of "
                f"max_draft_nodes, more than num_speculative_tokens {config.num_speculative_tokens}."
            )
    else:
        assert isinstance(options, _Drafting)
        nodes = _nodes(config, options.topk)
        # SGLang wants all three, or none.
        written |= {_STEPS: config.num_speculative_tokens, _TOPK: options.topk}
    written[_WIDTH] = nodes + 1
    if method == "mtp":
        notes.append(
            "mtp is for models that came with such layers. Of some (DeepSeek V3, GLM-4 MoE and their kin) "
            "SGLang finds them itself; for others set options.model to the folder that has them."
        )
    if config.containment != Containment():
        notes.append("containment: no effect on the native route, where SGLang alone drafts.")
    parts = [[flag] if flag == _SAMPLING else [flag, str(value)] for flag, value in written.items()]
    return Flags("native", [part for words in parts for part in words], tuple(notes))


def _nodes(config: Config, topk: int) -> int:
    """How many draft tokens a step of the EAGLE family has, over all branches."""
    depth, nodes = config.num_speculative_tokens, config.max_draft_nodes
    if topk == 1:
        if nodes not in (None, depth):
            raise ConfigError(
                f"max_draft_nodes: {nodes} does not go with options.topk 1, which drafts chains of "
                f"num_speculative_tokens {depth}; leave it out, or raise topk"
            )
        return depth
    if nodes is None:
        raise ConfigError(
            f"max_draft_nodes: missing, and options.topk {topk} drafts a tree; set it, to "
            f"{min(1024, 2 * depth)} say, or topk to 1"
        )
    most = topk + (depth - 1) * topk * topk
    if nodes > most:
        raise ConfigError(
            f"max_draft_nodes: {nodes} is more than the {most} draft tokens that options.topk {topk} gives "
            f"over num_speculative_tokens {depth}; lower it to {most}"
        )
    return nodes


def _release(version: str) -> tuple[int, int, int]:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise ConfigError(
            f"engine version: {version!r} is no version of SGLang; give one such as {_text(SEEN)}"
        )
    return int(found[1]), int(found[2]), int(found[3] or 0)


def _text(release: tuple[int, int, int]) -> str:
    return ".".join(map(str, release))


def command(model: str, written: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """SGLang's server with flags from :func:`flags` and the user's own arguments.

    Raises:
        ConfigError: an argument would replace one of the flags, or be replaced.
    """
    ours = [_ALGORITHM, *(word for word in written if word.startswith("--speculative-"))]
    for word in arguments:
        name = word.partition("=")[0]
        if _means(name, _MODEL):
            raise ConfigError(f"{name}: the model is an argument of its own here, {model!r}; leave it out")
        if _means(name, ours):
            raise ConfigError(f"{name}: --spec already says what drafts; leave one of the two out")
    _check_file(arguments, ours)
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *written, *arguments]


def _means(name: str, options: Sequence[str]) -> bool:
    """Whether SGLang may take a name for one of some options: argparse also takes one that is only begun."""
    key = name.replace("_", "-")
    return len(key) > 3 and any(option.startswith(key) for option in options)


def _check_file(arguments: Sequence[str], ours: Sequence[str]) -> None:
    for name, file in in_config_file(arguments):
        for options, what in ((_MODEL, "the model that is given here"), (ours, "what --spec gives")):
            if _means(f"--{name}", options):
                raise ConfigError(f"{name} in {file!r} would be replaced by {what}; move it out of there")
