"""What an adapter relies on inside its engine, written down so that it can be checked without running it.

Each adapter lists its own in ``adapters/<engine>/hooks.py``, as ``HOOKS``. That module imports nothing but
this one, so that it can be read where the engine, and so the adapter, cannot be imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Hook", "HookStatus", "check", "fits", "hooks_of", "is_wrapped", "place", "wrap"]

logger = logging.getLogger("spec_plugins")
_OURS = "_spec_plugins_wraps"


@dataclass(frozen=True, slots=True)
class Hook:
    """One function, class or attribute of an engine."""

    path: str
    """``module:attribute.path``; where its name differs between versions, ``module:A.new|A.old``."""
    parameters: tuple[str, ...] | None
    """Parameters that must be there, in this order, ``new|old`` where the name differs; others must have a
    default. ``None``: the attribute need only exist."""
    versions: str
    """Which versions of the engine it was seen in."""
    purpose: str
    """What the adapter does with it."""
    passes_on: bool = False
    """Whether the adapter wraps it and passes on what else it takes: further parameters do not matter."""


@dataclass(frozen=True, slots=True)
class HookStatus:
    """What became of a hook in the installed engine."""

    hook: Hook
    status: Literal["ok", "missing", "changed"]
    detail: str = ""
    """What is wrong, empty where nothing is."""


def check(hook: Hook) -> HookStatus:
    """Compare a hook with the installed engine; imports the engine's module. Never raises."""
    module_name, _, attributes = hook.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an engine's import may raise anything
        return HookStatus(hook, "missing", f"cannot import {module_name}: {type(error).__name__}: {error}")
    found = _first(module, attributes.split("|"))
    if found is None:
        return HookStatus(hook, "missing", f"{module_name} has no {attributes.replace('|', ' or ')}")
    if hook.parameters is None:
        return HookStatus(hook, "ok")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return HookStatus(hook, "changed", f"has no signature: {error}")
    detail = _differs(list(signature.parameters.values()), hook.parameters, hook.passes_on)
    return HookStatus(hook, "changed" if detail else "ok", detail)


def fits(hook: Hook) -> bool:
    """Whether the installed engine is as the hook says; warns where it is not."""
    found = check(hook)
    if found.status != "ok":
        logger.warning("%s is not as expected (%s): %s is off", hook.path, found.detail, hook.purpose)
    return found.status == "ok"


def is_wrapped(hook: Hook) -> bool:
    """Whether :func:`wrap` did its work in this process."""
    owner, name = place(hook)
    found = vars(owner).get(name)
    return hasattr(getattr(found, "__func__", found), _OURS)


def wrap(hook: Hook, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap a function of a module or a method of a class, once; whether it is wrapped then.

    One that is not as the hook says is left alone, and said so. A class method comes to ``wrapper`` as the
    descriptor, and what is made of it takes the class first.
    """
    if not fits(hook):
        return False
    if not is_wrapped(hook):
        owner, name = place(hook)
        found = vars(owner)[name]
        is_class_method = isinstance(found, classmethod)
        inner = found.__func__ if is_class_method else found
        made = functools.wraps(inner)(wrapper(found if is_class_method else inner))
        setattr(made, _OURS, True)
        setattr(owner, name, classmethod(made) if is_class_method else made)
    return True


def place(hook: Hook) -> tuple[Any, str]:
    """The module or class that holds it, and its name there."""
    module, _, path = hook.path.partition(":")
    owners, _, name = path.rpartition(".")
    return functools.reduce(getattr, filter(None, owners.split(".")), importlib.import_module(module)), name


def hooks_of(engine_package: str) -> tuple[Hook, ...]:
    """The hooks of the adapter in ``adapters/<engine_package>``, without importing the adapter."""
    from spec_plugins import adapters

    for folder in adapters.__path__:
        file = Path(folder) / engine_package / "hooks.py"
        spec = importlib.util.spec_from_file_location(f"{adapters.__name__}._{engine_package}_hooks", file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return tuple(module.HOOKS)
    return ()


def _first(module: Any, paths: list[str]) -> Any:
    for path in paths:
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def _differs(parameters: list[inspect.Parameter], wanted: tuple[str, ...], passes_on: bool) -> str:
    """How a signature differs from what is wanted; empty where it does not."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variable and p.name not in ("self", "cls")]
    names = [p.name for p in named]
    places = []
    for choice in wanted:
        place = next((names.index(name) for name in choice.split("|") if name in names), None)
        if place is None:
            return f"no longer takes {choice.replace('|', ' or ')}; takes {', '.join(names) or 'nothing'}"
        places.append(place)
    if places != sorted(places):
        return f"takes its parameters in another order: {', '.join(names)}"
    if passes_on:
        return ""
    required = [p.name for i, p in enumerate(named) if i not in places and p.default is p.empty]
    return f"now requires {', '.join(required)}" if required else ""
