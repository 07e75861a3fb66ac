"""Benchmark prompts from files, as chat messages with a tag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spec_plugins.errors import ConfigError

__all__ = ["TaggedPrompt", "humaneval", "interleaved", "mtbench"]


@dataclass(frozen=True, slots=True)
class TaggedPrompt:
    """A conversation so far, and what kind of traffic it stands for."""

    tag: str
    messages: tuple[dict[str, str], ...]


def _lines(path: Path) -> Iterator[dict[str, object]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: cannot read {path}: {error}; `make data` fetches it") from error


def _user(tag: str, text: str) -> TaggedPrompt:
    return TaggedPrompt(tag, ({"role": "user", "content": text},))


def humaneval(folder: Path) -> list[TaggedPrompt]:
    """The 164 problems of HumanEval, from ``humaneval.jsonl``."""
    return [
        _user("humaneval", f"Complete this function:\n{line['prompt']}")
        for line in _lines(folder / "humaneval.jsonl")
    ]


def mtbench(folder: Path) -> list[TaggedPrompt]:
    """The first turns of MT-bench's 80 conversations, from ``mtbench.jsonl``; its 8 categories in turn."""
    categories: dict[str, list[TaggedPrompt]] = {}
    for line in _lines(folder / "mtbench.jsonl"):
        turns = line["turns"]
        assert isinstance(turns, list)
        categories.setdefault(str(line["category"]), []).append(_user("mtbench", turns[0]))
    return interleaved(*categories.values())


def interleaved(*sets: list[TaggedPrompt]) -> list[TaggedPrompt]:
    """One of each in turn, so that any beginning is a fair mix; as long as the shortest allows."""
    return [prompt for group in zip(*sets, strict=False) for prompt in group]
