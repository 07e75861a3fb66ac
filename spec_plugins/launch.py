"""From a configuration to the flags that an engine is started with, by whichever route.

An adapter whose engine is started with flags has a module ``flags`` as :class:`EngineFlags` says. It imports
no engine: flags can be written on a machine that the engine is not installed on.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel

from spec_plugins.config import Config, load_config, read_config
from spec_plugins.errors import UnsupportedError
from spec_plugins.support import (
    ENGINES,
    METHODS,
    Explanation,
    explain,
    find_engine,
    has_flags,
    runs_as_plugin,
)

__all__ = [
    "EngineFlags", "Flags", "Route", "example", "flags_of", "in_config_file", "installed_version", "prepare",
    "resolve",
]  # fmt: skip

Route = Literal["plugin", "native"]


@dataclass(frozen=True, slots=True)
class Flags:
    """What to start an engine with."""

    route: Route
    flags: list[str]
    """Arguments as a program takes them, not quoted."""
    notes: tuple[str, ...] = ()
    """What the user should know, one sentence each."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the engine needs beside its flags."""
    file: str = ""
    """Text of the file that says the same, for an engine whose own server reads one."""


class EngineFlags(Protocol):
    """The module ``flags`` of an adapter."""

    NATIVE: Mapping[str, type[BaseModel]]
    """Methods that the engine implements itself, with the schemas of their options."""
    EXAMPLES: Mapping[str, Mapping[str, Any]]
    """Fields of a configuration that show each of them."""

    def flags(self, config: Config, version: str | None, /) -> Flags:
        """The flags for a configuration whose route is settled, and a version of the engine."""

    def command(self, model: str, flags: Sequence[str], arguments: Sequence[str], /) -> list[str]:
        """The command that serves a model with these flags and the user's own arguments."""


def flags_of(engine: str) -> EngineFlags:
    """The module ``flags`` of an engine's adapter.

    Raises:
        ConfigError: no such engine.
        UnsupportedError: it has none; names those that have.
    """
    key = find_engine(engine)
    about = ENGINES[key]
    if not has_flags(key):
        able = ", ".join(other for other in ENGINES if has_flags(other))
        raise UnsupportedError(
            f"this version writes no flags for {about.title}, only for: {able or 'no engine'}. {about.hook}"
        )
    return cast(EngineFlags, importlib.import_module(f"spec_plugins.adapters.{about.package}.flags"))


def in_config_file(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the file of an engine's ``--config`` sets, which flags replace without a word: name, and file.

    Nothing where there is none, or none that can be read: the engine says so itself.
    """
    if "--config" not in arguments[:-1]:
        return
    file = arguments[list(arguments).index("--config") + 1]
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for name in re.findall(r"^['\"]?([A-Za-z_-]+)['\"]?\s*:", text, re.MULTILINE):
        yield name, file


def installed_version(engine: str) -> str | None:
    """The engine's version here, from its metadata alone."""
    about = ENGINES[find_engine(engine)]
    for distribution in (d for p in about.parts if p.module == about.package for d in p.distributions):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def prepare(
    engine: str, source: Config | Mapping[str, Any] | str | Path | None, version: str | None = None
) -> Flags:
    """Check a configuration for an engine, settle its route, and write the flags.

    Args:
        engine: its name.
        source: as :func:`spec_plugins.config.load_config` takes it.
        version: the engine's; default: the installed one's, else the newest known.

    Raises:
        ConfigError, UnknownProposerError, UnavailableError: as :func:`spec_plugins.config.load_config`.
        UnsupportedError: it cannot run; says why, and names the nearest thing that works.
    """
    key = find_engine(engine)
    config = resolve(key, source)
    return flags_of(key).flags(config, version or installed_version(key))


def resolve(engine: str, source: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """A configuration, checked for an engine, whose route is settled; raises as :func:`prepare`."""
    key = find_engine(engine)
    adapter = flags_of(key)
    fields = read_config(source, adapter.NATIVE)
    # The route says whose options are meant, so it is settled before they are checked.
    if fields.get("route", "auto") == "auto" and fields.get("proposer") in [*ENGINES[key].own_first]:
        fields["route"] = "native"
    config = load_config(fields, native=adapter.NATIVE)
    return config.model_copy(update={"route": _route(key, config, adapter.NATIVE)})


def example(found: Explanation, route: Route | None = None) -> Flags | None:
    """Flags that show how a method is started, by ``found.route`` or the one that is given; ``None`` where it
    is not started with flags.

    Raises:
        ConfigError: there are none without options, which it names.
        UnsupportedError: the installed version of the engine has no such method.
    """
    route = route or found.route
    if route is None or not has_flags(found.engine):
        return None
    adapter = flags_of(found.engine)
    if route == "native":
        fields = adapter.EXAMPLES[found.method]
    else:
        fields = METHODS[found.method].example if found.method in METHODS else {}
    given = {"proposer": found.method, "route": route, **fields}
    config = load_config(given, native=adapter.NATIVE)
    return adapter.flags(config, installed_version(found.engine))


def _route(engine: str, config: Config, native: Mapping[str, type[BaseModel]]) -> Route:
    """The route that a configuration asks for, if it can be had; else the best that can."""
    name, about = config.proposer, ENGINES[engine]
    found = explain(engine, name)
    reason, runs = found.plugin, runs_as_plugin(engine, name)
    if runs and config.route != "native":
        # Needs may depend on options, which `explain` does not know.
        missing = config.create_proposer().needs - (about.provides or frozenset())
        if not missing:
            return "plugin"
        needs = ", ".join(sorted(need.value for need in missing))
        runs, reason = False, f"with these options it needs {needs}, which {about.title} does not give"
    if config.route == "native":
        reason = f"{about.title} has no {name!r} of its own"
    if config.route != "plugin" and name in native:
        return "native"
    here = [f"{name} on {engine} ({r})" for r, can in (("plugin", runs), ("native", name in native)) if can]
    nearest = here[0] if here else found.nearest or "other options, or another proposer"
    raise UnsupportedError(
        f"{name!r} cannot run in {about.title} by route {config.route!r}: {reason.rstrip('.')}. "
        f"Nearest: {nearest}"
    )
