"""Benchmark prompts from files, as chat messages with a tag."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spec_plugins.errors import ConfigError

__all__ = ["TaggedPrompt", "agent_replays", "humaneval", "interleaved", "mtbench", "write_traffic"]

_AGENT_LETTERS = 6000
"""Of an agent's conversation in a traffic file, at most: some 1,500 tokens, seconds on a CPU."""


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


def agent_replays(folder: Path) -> list[TaggedPrompt]:
    """Recorded conversations of coding agents, from ``agent_replays.json``, up to one of the agent's turns.

    A turn of each conversation in turn, so that any beginning is a fair mix; within one, in random order.
    Conversations of one session share turns, and each turn is given once.
    """
    path = folder / "agent_replays.json"
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"data: cannot read {path}: {error}; `make data` fetches it") from error
    shuffled = random.Random(0)
    turns: list[list[list[dict[str, str]]]] = []
    for conversation in cases:
        messages = [{"role": m["role"], "content": m["content"]} for m in conversation["messages"]]
        ends = [i for i, m in enumerate(messages) if i and m["role"] == "assistant"] + [len(messages)]
        shuffled.shuffle(ends)
        turns.append([messages[:end] for end in ends])
    seen = set()
    prompts = []
    for i in range(max(map(len, turns))):
        for conversation in turns:
            if i < len(conversation):
                messages = conversation[i]
                key = tuple(m["content"] for m in messages[-2:])
                if key not in seen:
                    seen.add(key)
                    prompts.append(TaggedPrompt("agent", tuple(messages)))
    return prompts


def interleaved(*sets: list[TaggedPrompt]) -> list[TaggedPrompt]:
    """One of each in turn, so that any beginning is a fair mix; as long as the shortest allows."""
    return [prompt for group in zip(*sets, strict=False) for prompt in group]


def write_traffic(folder: Path, out: Path, each: int = 24) -> Path:
    """Write HumanEval, MT-bench and short agent replays as a traffic file without responses, ``out``.

    Up to so many of each, in turn.

    Raises:
        ConfigError: a file of prompts cannot be read, or ``out`` not be written.
    """
    agents = [
        p for p in agent_replays(folder)
        if p.messages[-1]["role"] != "assistant"
        and sum(len(m["content"]) for m in p.messages) <= _AGENT_LETTERS
    ]  # fmt: skip
    sets = [humaneval(folder), mtbench(folder), agents]
    mixed = [prompts[i] for i in range(each) for prompts in sets if i < len(prompts)]
    lines = [json.dumps({"messages": list(p.messages), "tags": [p.tag]}) + "\n" for p in mixed]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out: {str(out)!r} cannot be written: {error}") from error
    return out
