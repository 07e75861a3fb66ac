"""Conversations as token ids: what the target was asked, and what it answered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import IntArray
from spec_plugins.traffic.reading import TrafficFile
from spec_plugins.traffic.record import Record

__all__ = ["Conversation", "Traffic", "asked_tokens", "conversations", "read_traffic"]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One sequence of tokens: a prompt, and an answer behind it."""

    tokens: IntArray
    """``[n]`` int32."""
    answered: npt.NDArray[np.bool_]
    """``[n]``: which of them the target model said."""
    record: Record = field(default_factory=lambda: Record(0))
    """What else is known of it; its texts are left out."""
    stopped: bool = False
    """Whether the target ended the answer, rather than a limit of length."""

    @property
    def prompt_length(self) -> int:
        """How many tokens stand before the answer."""
        return len(self.tokens) - int(np.count_nonzero(self.answered))


@dataclass(slots=True)
class Traffic:
    """What a file of conversations holds."""

    conversations: list[Conversation]
    file: TrafficFile
    """Where they were read; tells its digest, and the lines that were left out."""

    def sample(self, most: int | None) -> None:
        """Mix the conversations by chance, always the same, and keep so many of them; ``None``: all."""
        mixed = np.random.default_rng(0).permutation(len(self.conversations))[:most]
        self.conversations = [self.conversations[i] for i in mixed]

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(len(c.tokens) for c in self.conversations)

    @property
    def answered_tokens(self) -> int:
        """Those of the target."""
        return sum(int(c.answered.sum()) for c in self.conversations)


def read_traffic(path: Path, tokenizer: Any, max_length: int) -> Traffic:
    """Read a file of recorded answers, in any of the forms that :mod:`spec_plugins.traffic.formats` knows.

    Text goes through the model's chat template where it has one. Lines that cannot be used are counted and
    left out; what is longer than ``max_length`` tokens is cut there.

    Raises:
        ConfigError: the file cannot be read, or no line of it can be used.
    """
    file = TrafficFile(path)
    found = conversations(file, file, tokenizer, max_length)
    if not found:
        raise file.refuse()
    return Traffic(found, file)


def conversations(
    records: Iterable[Record], file: TrafficFile, tokenizer: Any, max_length: int
) -> list[Conversation]:
    """Records of a file as tokens; those that cannot be are counted with the lines that it left out."""
    found = []
    for record in records:
        try:
            found.append(_conversation(record, tokenizer, max_length, file.redact))
        except Exception as error:  # a chat template raises what it likes
            file.leave_out(record.line, str(error))
    return found


def asked_tokens(record: Record, tokenizer: Any, redact: Callable[[str], str] = str) -> list[int]:
    """Token ids of what was asked. Raises whatever the chat template raises."""
    if record.prompt_token_ids is not None:
        return _ids(record.prompt_token_ids, "prompt_token_ids", tokenizer, redact)
    if record.prompt is not None:
        return list(tokenizer.encode(record.prompt))
    return _template(record.messages, record, tokenizer)


def _conversation(
    record: Record, tokenizer: Any, max_length: int, redact: Callable[[str], str]
) -> Conversation:
    if not record.answered:
        raise ValueError(
            "its messages do not end with an answer of the assistant"
            if record.form in ("messages", "conversations")
            else "no 'response'"
        )
    asked = asked_tokens(record, tokenizer, redact)
    if len(asked) >= max_length:
        raise ValueError(f"a prompt of {len(asked)} tokens leaves no room")
    answer, eos = _answer(record, asked, tokenizer, redact), tokenizer.eos_token_id
    if not answer:
        raise ValueError("no answer")
    ended = record.ended or ("stop" if answer[-1] == eos else "length")
    tokens = np.array([*asked, *answer][:max_length], np.int32)
    about = {name: getattr(record, name) for name in _KEPT}
    return Conversation(
        tokens,
        np.arange(len(tokens)) >= len(asked),
        Record(**about),
        ended == "stop" and len(asked) + len(answer) <= max_length,
    )


_KEPT = ("line", "tags", "arrived", "seconds", "temperature", "max_tokens", "ended", "tenant", "form")


def _answer(record: Record, asked: list[int], tokenizer: Any, redact: Callable[[str], str]) -> list[int]:
    if record.token_ids is not None:
        return _ids(record.token_ids, "token_ids", tokenizer, redact)
    if record.message is not None:
        return _call(record, asked, tokenizer)
    answer = list(tokenizer.encode(record.response, add_special_tokens=False))
    # A log of messages holds whole answers; of a bare response it is not known.
    if answer and record.ended == "stop" and tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    return answer


def _call(record: Record, asked: list[int], tokenizer: Any) -> list[int]:
    """An answer that calls tools, as the chat template writes it."""
    assert record.message is not None
    whole = _template((*record.messages, record.message), record, tokenizer, ask=False)
    answer = whole[len(asked) :]
    if whole[: len(asked)] != asked or not tokenizer.chat_template:
        raise ValueError("the chat template does not write its call of a tool behind the prompt")
    if tokenizer.eos_token_id in answer:
        return answer[: answer.index(tokenizer.eos_token_id) + 1]
    return answer


def _ids(found: Sequence[int], name: str, tokenizer: Any, redact: Callable[[str], str]) -> list[int]:
    if found and not 0 <= min(found) <= max(found) < _vocabulary(tokenizer):
        raise ValueError(f"{name} that the tokenizer does not have: {min(found)} to {max(found)}")
    text = "" if redact is str else tokenizer.decode(found)
    if text and (shown := redact(text)) != text:
        return list(tokenizer.encode(shown, add_special_tokens=False))
    return list(found)


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Any) -> int:
    return len(tokenizer)  # slow enough to matter for every line


def _template(
    messages: Sequence[Mapping[str, Any]], record: Record, tokenizer: Any, ask: bool = True
) -> list[int]:
    if tokenizer.chat_template:
        tools = {"tools": list(record.tools)} if record.tools else {}
        return list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=ask, tokenize=True, return_dict=True, **tools
            )["input_ids"]
        )
    return list(tokenizer.encode("\n".join(str(m["content"]) for m in messages)))
