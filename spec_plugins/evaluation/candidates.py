"""What replays offer to choose from: each method with each draft length, counted request by request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.effort import Effort, effort_of
from spec_plugins.evaluation.recommended import Interval
from spec_plugins.evaluation.replay_examples import Example
from spec_plugins.support import ENGINES

__all__ = ["Candidate", "Replays", "as_replayed", "gather", "read_replays"]

Floats = npt.NDArray[np.float64]

_COUNTS = ("steps", "drafts", "drafted_tokens", "accepted_tokens")
# What must be equal, for requests of several replays to be the same ones.
_SAME = ("traffic_sha256", "conversations", "response_tokens", "seed")
_SIZE_FIELDS = ("num_speculative_tokens", "max_draft_nodes", "containment", "policy", "route")


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A method with one draft length, or size of a tree."""

    method: str
    config: Mapping[str, Any]
    """Fields of a configuration, with this draft length."""
    draft_tokens: int
    trees: bool
    counts: Floats
    """``[requests, 4]``: steps, those with a draft, draft tokens, accepted ones."""
    concurrency: int
    """That of its replay."""
    drafting: tuple[float, float] | None
    """Seconds that drafting took a step of its replay, and a request of one; ``None``: not known."""
    notes: tuple[str, ...] = ()

    @property
    def effort(self) -> Effort:
        """What it takes to have it."""
        return effort_of(self.config)

    def draft_seconds(self, concurrency: int) -> float:
        """Seconds a step with so many requests; 0 where not known.

        One forward for all of them is taken to last as long as in the replay, or longer in proportion where
        there are more requests than there; everything else grows with the requests.
        """
        if self.drafting is None:
            return 0.0
        a_step, a_request = self.drafting
        grown = a_request * concurrency
        return max(a_step, grown) if self.effort.runs_a_model else grown


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """Replays of the same requests."""

    about: Mapping[str, Any]
    requests: int
    mean_context: float
    deciles: tuple[int, ...]
    """How many requests run at once in each tenth of the time; empty: the traffic does not say."""
    candidates: tuple[Candidate, ...]
    by_tag: Mapping[str, Mapping[str, float]]
    """Tokens a step by method and tag, with its longest draft."""
    by_position: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    """By method, with its longest draft: the share of steps whose draft was accepted up to each position."""
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    """By method; text of the traffic."""

    def at(self, concurrency: int) -> list[int]:
        """Candidates, by place: of those that were replayed several times, from the replay whose concurrency
        is the nearest."""
        nearest: dict[tuple[str, int], int] = {}
        for i, c in enumerate(self.candidates):
            key = c.method, c.draft_tokens
            away = abs(math.log(c.concurrency / concurrency))
            other = nearest.get(key)
            if other is None or away < abs(math.log(self.candidates[other].concurrency / concurrency)):
                nearest[key] = i
        return sorted(nearest.values())


def as_replayed(config: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Fields that start an engine with what was replayed: this project's proposer, also where the engine's
    own would go first."""
    own = engine in ENGINES and config["proposer"] in ENGINES[engine].own_first
    return {**config, "route": "plugin"} if own else dict(config)


def read_replays(paths: Sequence[Path]) -> Replays:
    """Read files that ``spec-plugins replay --out`` wrote, or folders with them.

    Raises:
        ConfigError: one cannot be read, is none, or is of other requests or another model than the first.
    """
    return gather([_read(path) for path in paths], [str(path) for path in paths])


def _read(path: Path) -> Any:
    file = path / "replay.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"replay: {str(file)!r} cannot be read: {error}; give what `spec-plugins replay --out` wrote"
        ) from error


def gather(found: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Replays:
    """Bring replays of the same requests together, as :func:`spec_plugins.evaluation.replay_report.as_json`
    makes them; raises as :func:`read_replays`."""
    if not found:
        raise ConfigError("replay: none is given; give what `spec-plugins replay --out` wrote")
    names = names or [f"replay {i + 1}" for i in range(len(found))]
    candidates: list[Candidate] = []
    methods: dict[str, str] = {}
    by_tag: dict[str, dict[str, float]] = {}
    by_position: dict[str, list[Interval]] = {}
    examples: dict[str, list[Example]] = {}
    for data, name in zip(found, names, strict=True):
        try:
            _compare(found[0], names[0], data, name)
            for shown, proposer in data["proposers"].items():
                method = _name(shown, proposer, methods)
                candidates += _candidates(method, proposer)
                by_tag[method] = {
                    tag: of_one["by_size"][-1]["acceptance_length"]
                    for tag, of_one in proposer["by_tag"].items()
                }
                positions = _by_position(proposer)
                if len(positions) > len(by_position.get(method, ())):
                    by_position[method] = positions
                if kept := [Example.model_validate(e) for e in proposer.get("examples", ())]:
                    examples[method] = kept
            traffic = data["traffic"]
            context, requests = float(traffic["mean_context"]), int(traffic["requests"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"replay: {name!r} is not what this version's `spec-plugins replay` writes ({error!r}); "
                "replay again"
            ) from error
    if not candidates:
        raise ConfigError(f"replay: {', '.join(names)}: no proposer in it; replay with --spec")
    if any(len(c.counts) != requests for c in candidates):
        raise ConfigError(f"replay: {', '.join(names)}: by_request is not of {requests} requests")
    deciles = tuple(int(n) for n in found[0]["traffic"].get("concurrency_deciles", ()))
    return Replays(
        found[0]["about"], requests, context, deciles, tuple(candidates), by_tag, by_position, examples
    )


def _compare(first: Mapping[str, Any], first_name: str, other: Mapping[str, Any], other_name: str) -> None:
    for name in ("model_sha256", *_SAME):
        a, b = (of["about"].get(name) for of in (first, other))
        if a != b and not (name == "model_sha256" and None in (a, b)):
            raise ConfigError(
                f"about.{name}: {b!r} in {other_name!r}, {a!r} in {first_name!r}; methods are compared on "
                "the same requests of the same model, so replay them together"
            )


def _name(shown: str, proposer: Mapping[str, Any], methods: dict[str, str]) -> str:
    """What a method is called: configurations that differ in their draft length alone are one."""
    fields = {k: v for k, v in proposer["config"].items() if k not in _SIZE_FIELDS}
    if proposer["trees"]:
        fields["num_speculative_tokens"] = proposer["config"]["num_speculative_tokens"]
    key = json.dumps([fields, proposer["trees"]], sort_keys=True)
    if key not in methods:
        name = shown.rstrip("'")
        while name in methods.values():
            name += "'"
        methods[key] = name
    return methods[key]


def _by_position(proposer: Mapping[str, Any]) -> list[Interval]:
    found = []
    for position in proposer.get("all", {}).get("by_position", ()):
        low, high = position["survival_interval"] or (math.nan, math.nan)
        found.append(Interval.of(position["survival"], low, high))
    return found


def _candidates(method: str, proposer: Mapping[str, Any]) -> Iterator[Candidate]:
    config, trees = proposer["config"], bool(proposer["trees"])
    drafting = proposer.get("drafting") or {}
    steps, requests = drafting.get("steps", 0), drafting.get("requests", 0)
    known = bool(steps and requests and drafting.get("seconds"))
    longest = proposer["by_request"][-1]["draft_tokens"]
    for found in proposer["by_request"]:
        size = int(found["draft_tokens"])
        if size > 8 and size % (1 << (size.bit_length() - 3)) and size != longest:
            continue  # 10, 12, 14, 16, 20, 24, … differ enough
        fields = {"proposer": config["proposer"], "num_speculative_tokens": size}
        if trees:
            fields |= {
                "num_speculative_tokens": min(size, config["num_speculative_tokens"]),
                "max_draft_nodes": size,
            }
        if config.get("options"):
            fields["options"] = config["options"]
        a_step: tuple[float, float] | None = None
        if known:
            share = size / longest if effort_of(config).forward_a_token and not trees else 1.0
            a_step = share * drafting["seconds"] / steps, share * drafting["seconds"] / requests
        yield Candidate(
            method,
            fields,
            size,
            trees,
            np.array([found[name] for name in _COUNTS], np.float64).T,
            int(proposer["concurrency"]),
            a_step,
            tuple(proposer.get("notes", ())),
        )
