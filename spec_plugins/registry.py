"""Names to proposers: gathered from the built-ins and from installed packages, imported when used.

A package that fails to load, or claims a name that is taken, is set aside with its reason (see
:attr:`Registry.faults`) and disturbs nothing else.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pluggy

from spec_plugins import hookspecs
from spec_plugins.errors import UnavailableError, UnknownProposerError
from spec_plugins.proposer import Proposer

__all__ = ["Registration", "Registry", "registry", "suggest"]

ENTRY_POINT_GROUP = "spec_plugins"
BUILTIN = "spec-plugins"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Which extra brings a module that a built-in proposer imports.
_EXTRAS = {"torch": "transformers", "transformers": "transformers", "safetensors": "transformers"}


def _provider(point: importlib.metadata.EntryPoint) -> str:
    try:
        name = point.dist.name if point.dist else None
    except Exception:  # a distribution without metadata
        name = None
    return name or point.value


def suggest(word: str, known: Mapping[str, object] | list[str]) -> str:
    """``"; did you mean 'x'?"`` for a near miss, else ``"."``."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered proposer, not imported yet."""

    name: str
    path: str
    """``package.module:Class``."""
    provider: str
    """The distribution that registered it."""

    def load(self) -> type[Proposer]:
        """Import the class.

        Raises:
            UnavailableError: with what is missing and how to install it.
        """
        who = f"proposer {self.name!r} (from {self.provider})"
        module_name, _, class_name = self.path.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"{who} needs the module {error.name!r}, which is not installed: "
                f"{self._how_to_install(error.name or '')}"
            ) from error
        except (Exception, SystemExit) as error:  # a third party's import may raise anything
            raise UnavailableError(
                f"{who} cannot be imported from {self.path!r}: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(cls, type) and issubclass(cls, Proposer)):
            raise UnavailableError(f"{who}: {self.path!r} is not a subclass of spec_plugins.Proposer")
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise UnavailableError(f"{who}: {self.path!r} does not define {', '.join(missing)}")
        return cls

    def _how_to_install(self, module_name: str) -> str:
        if self.path.startswith((f"{module_name}:", f"{module_name}.")):
            return f"pip install --force-reinstall {self.provider}"  # its own: the package is broken
        top = module_name.partition(".")[0]
        extra = _EXTRAS.get(top) if self.provider == BUILTIN else None
        return f"pip install 'spec-plugins[{extra}]'" if extra else f"pip install {top}"


@dataclass
class Registry:
    """Every registered proposer by name."""

    proposers: dict[str, Registration] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Packages and names set aside, one sentence each."""
    redactors: list[Callable[[str], str]] = field(default_factory=list)
    """What packages take out of recorded texts with, in the order of their use."""

    @property
    def redact(self) -> Callable[[str], str]:
        """All of :attr:`redactors` in turn; ``str``, which changes nothing, where there are none."""
        if not self.redactors:
            return str

        def redact(text: str) -> str:
            return functools.reduce(lambda so_far, redactor: redactor(so_far), self.redactors, text)

        return redact

    @classmethod
    def discover(cls) -> Registry:
        """Read the entry points of every installed package. About 10 ms; imports no proposer."""
        found = cls()
        manager = pluggy.PluginManager("spec_plugins")
        manager.add_hookspecs(hookspecs)
        providers: dict[str, str] = {}
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        # Built-ins first, so that their names cannot be taken.
        for point in sorted(points, key=lambda p: (p.value != "spec_plugins.proposers", p.name)):
            provider = _provider(point)
            # Two distributions may give their entry points the same name.
            plugin_name = f"{provider}: entry point {point.name!r}"
            if plugin_name in providers:
                continue  # the same distribution seen twice on sys.path
            try:
                manager.register(point.load(), name=plugin_name)
                providers[plugin_name] = provider
            except (Exception, SystemExit) as error:  # a third party's module may raise anything
                found.faults.append(f"{plugin_name} failed: {type(error).__name__}: {error}")
        for plugin_name, provider in providers.items():
            found._ask(manager, plugin_name, provider)
        found.redactors = [
            cast("Callable[[str], str]", hook.function)
            for hook in manager.hook.spec_plugins_redact.get_hookimpls()
        ]
        return found

    def _ask(self, manager: pluggy.PluginManager, plugin_name: str, provider: str) -> None:
        plugin = manager.get_plugin(plugin_name)
        others = [p for p in manager.get_plugins() if p is not plugin]
        try:
            answers = manager.subset_hook_caller("spec_plugins_proposers", others)()
            for mapping in answers:
                for name, path in dict(mapping).items():
                    self.add(Registration(name, path, provider))
            hooks = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
            if not answers and hooks != {"spec_plugins_redact"}:
                self.faults.append(
                    f"{plugin_name} names no proposers: it needs a function spec_plugins_proposers, marked "
                    "@spec_plugins.hookimpl, that returns them"
                )
        except (Exception, SystemExit) as error:  # as above
            self.faults.append(
                f"{provider}: hook spec_plugins_proposers failed: {type(error).__name__}: {error}"
            )

    def add(self, registration: Registration) -> None:
        """Register, unless the name is malformed or taken."""
        name, taken = registration.name, self.proposers.get(registration.name)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.faults.append(f"{registration.provider}: {name!r} is no proposer name (a-z, 0-9, _ and -)")
        elif not isinstance(registration.path, str) or registration.path.count(":") != 1:
            self.faults.append(f"{registration.provider}: {name!r} must name 'package.module:Class'")
        elif taken is not None:
            self.faults.append(f"{registration.provider}: the name {name!r} is already {taken.provider}'s")
        else:
            self.proposers[name] = registration

    def find(self, name: str) -> Registration:
        """The registration under ``name``.

        Raises:
            UnknownProposerError: no such name; lists the known ones and the nearest.
        """
        try:
            return self.proposers[name]
        except KeyError:
            raise UnknownProposerError(
                f"no proposer is registered as {name!r}{suggest(name, self.proposers)} "
                f"Registered: {', '.join(sorted(self.proposers))}"
            ) from None

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> Proposer:
        """Make a proposer with its options checked.

        Raises:
            UnknownProposerError, UnavailableError: as above.
            ConfigError: an option is unknown, out of range, or does not go with another.
        """
        from spec_plugins.config import check_options

        cls = self.find(name).load()
        proposer = check_options(cls, options or {}, name)
        proposer.name = name
        return proposer


@functools.cache
def registry() -> Registry:
    """This process's registry, discovered at first use."""
    return Registry.discover()
