"""Lets code that defines Triton kernels be imported where there is no Triton. Launching one raises.

Any name can be imported from this package or from below it: with a capital letter it is a class, else a
module that can be called too, so that it passes for a function or a decorator. Only the few things that are
used while modules are imported, or outside of kernels, are what they are in Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "3.0.0"


class Kernel:
    """What decorating a kernel gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> NoReturn:
        self()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"Triton kernel {self.__name__} was launched; there is a stand-in for Triton only"
        )


class Config:
    """A choice for a kernel's tuning."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class _Constexpr:
    """A value that is known when a kernel is compiled."""

    def __init__(self, value: object) -> None:
        self.value = value


class _Anything(ModuleType):
    """A module with any attribute."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Decorate a kernel, or say how to decorate one."""
        bare = len(arguments) == 1 and callable(arguments[0]) and not settings
        return _decorated(arguments[0]) if bare else _decorated


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("triton.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _decorated(function: Callable[..., Any]) -> Kernel:
    return function if isinstance(function, Kernel) else Kernel(function)


def _attribute(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    full = f"{module.__name__}.{name}"
    found: Any
    if name[0].isupper():
        found = type(name, (), {"__module__": module.__name__, "__init__": Config.__init__})
    else:
        __import__(full)
        found = sys.modules[full]
    setattr(module, name, found)
    return found


def __getattr__(name: str) -> Any:
    return _attribute(sys.modules[__name__], name)


def jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
    return _decorated if function is None else _decorated(function)


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


sys.meta_path.insert(0, _Finder())

from triton import language  # noqa: E402

language.constexpr = _Constexpr
