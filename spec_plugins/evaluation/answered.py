"""From a traffic file to conversations with responses: recorded ones, or made once by the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_plugins.errors import ConfigError
from spec_plugins.traffic.conversations import Conversation, asked_tokens, conversations
from spec_plugins.traffic.reading import TrafficFile
from spec_plugins.traffic.record import Record
from spec_plugins.traffic.sampling import sample

__all__ = ["Answer", "answer", "answer_records", "recorded_conversations", "write_answered"]

Answer = Callable[[Sequence[list[int]]], Sequence[tuple[list[int], str]]]
"""Prompts of token ids to what the model says to each: its token ids, and ``stop`` or ``length``."""


def recorded_conversations(
    file: TrafficFile, tokenizer: Any, max_length: int, most: int | None = None, seed: int = 0
) -> list[Conversation]:
    """Those of a file that have a response; a sample of ``most``, that keeps the mix.

    Raises:
        ConfigError: none has, or no line can be used; says what to do.
    """
    prompts = 0

    def answered() -> Iterator[Record]:
        nonlocal prompts
        for record in file:
            if record.answered:
                yield record
            else:
                prompts += 1

    chosen = answered() if most is None else sample(answered(), most, seed)
    found = conversations(chosen, file, tokenizer, max_length)
    if not found and prompts:
        raise ConfigError(
            f"traffic: {prompts} lines of {str(file.path)!r} have a prompt and no response, and replay needs "
            "what the target said: give --generate N to have N of them answered once on this machine, or a "
            "file with responses, such as `spec-plugins generate MODEL --prompt-file PROMPTS --json` writes"
        )
    if not found:
        raise file.refuse()
    return found


def answer(
    file: TrafficFile, tokenizer: Any, ask: Answer, most: int, max_length: int, max_tokens: int, seed: int = 0
) -> list[Conversation]:
    """Have a sample of a file's prompts answered, recorded responses or not, greedily.

    Args:
        file: what to ask.
        tokenizer: the model's.
        ask: the model, which answers with up to ``max_tokens``.
        most: how many.
        max_length: the model's longest context.
        max_tokens: of an answer.
        seed: of the sample.

    Raises:
        ConfigError: no line can be used.
    """
    return answer_records(sample(file, most, seed), file, tokenizer, ask, max_length, max_tokens)


def answer_records(
    records: Iterable[Record],
    file: TrafficFile,
    tokenizer: Any,
    ask: Answer,
    max_length: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> list[Conversation]:
    """Have these records of a file answered; those that cannot be are counted with the lines it left out.

    ``temperature`` is only noted, as what ``ask`` samples with. Otherwise as :func:`answer`.
    """
    asked: list[tuple[Record, list[int]]] = []
    for record in records:
        try:
            tokens = asked_tokens(record, tokenizer, file.redact)
        except Exception as error:  # a chat template raises what it likes
            file.leave_out(record.line, str(error))
            continue
        if 0 < len(tokens) < max_length - 1:
            asked.append((record, tokens))
        else:
            file.leave_out(record.line, f"a prompt of {len(tokens)} tokens leaves no room")
    if not asked:
        raise file.refuse()
    found = []
    for (record, prompt), (said, ended) in zip(asked, ask([t for _, t in asked]), strict=True):
        text = np.array([*prompt, *said], np.int32)
        kept = Record(
            record.line,
            tags=record.tags,
            temperature=temperature,
            max_tokens=max_tokens,
            tenant=record.tenant,
        )
        found.append(Conversation(text, np.arange(len(text)) >= len(prompt), kept, ended == "stop"))
    return found


def write_answered(found: Sequence[Conversation], path: Path) -> None:
    """Keep conversations as a traffic file of token ids, to be replayed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for c in found:
            line = {
                "prompt_token_ids": c.tokens[: c.prompt_length].tolist(),
                "token_ids": c.tokens[c.prompt_length :].tolist(),
                "finish_reason": "stop" if c.stopped else "length",
                "temperature": c.record.temperature,
                "max_tokens": c.record.max_tokens,
                "tags": list(c.record.tags),
            }
            file.write(json.dumps(line) + "\n")
