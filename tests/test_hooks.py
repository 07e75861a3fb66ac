"""Wrapping what an engine has, where it is as the hook table says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from spec_plugins.hooks import Hook, is_wrapped, wrap


class Engine:
    """Stands for a class of an engine."""

    def step(self, batch: int) -> int:
        """Twice as much."""
        return 2 * batch

    @classmethod
    def made(cls, batch: int) -> str:
        return f"{cls.__name__} {batch}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("toy_engine")
    made.Engine = type("Engine", (Engine,), dict(vars(Engine)))  # type: ignore[attr-defined]
    made.run = lambda batch: batch + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_engine", made)
    return made


def hook(path: str, *parameters: str) -> Hook:
    return Hook(f"toy_engine:{path}", parameters or ("batch",), "1.0", "is a test's")


def more(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        return original(*arguments) + 100

    return wrapper


def test_a_method_is_wrapped_once(module: Any) -> None:
    assert not is_wrapped(hook("Engine.step"))
    assert wrap(hook("Engine.step"), more)
    assert wrap(hook("Engine.step"), more)
    assert is_wrapped(hook("Engine.step"))
    assert module.Engine().step(3) == 106
    assert module.Engine.step.__doc__ == "Twice as much."


def test_a_function_of_a_module_is_wrapped(module: Any) -> None:
    assert wrap(hook("run"), more)
    assert module.run(3) == 104


def test_a_class_method_keeps_its_class(module: Any) -> None:
    def named(original: Any) -> Callable[..., Any]:
        def made(cls: Any, batch: int) -> str:
            return f"<{original.__get__(None, cls)(batch)}>"

        return made

    assert wrap(hook("Engine.made"), named)
    assert module.Engine.made(3) == "<Engine 3>"
    assert type("Child", (module.Engine,), {}).made(4) == "<Child 4>"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["Engine.gone", "gone", "Engine.step"])
def test_what_is_not_as_expected_is_left_alone(
    module: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spec_plugins"):
        assert not wrap(hook(path, "batch", "settings"), more)
    assert f"toy_engine:{path} is not as expected" in caplog.text
    assert "is a test's is off" in caplog.text
    assert module.Engine().step(3) == 6
