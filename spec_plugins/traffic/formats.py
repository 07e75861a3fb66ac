"""From a line of a log to a :class:`~spec_plugins.traffic.record.Record`, whichever form the line has.

Nothing is configured: every line is recognised by its fields, so that one file may mix forms.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from spec_plugins.traffic.record import Message, Record

__all__ = ["parse", "redacted"]

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""ShareGPT's names for who speaks."""
# What redaction leaves alone, since it is not what somebody wrote and is read by machines.
_NOT_TEXT = frozenset(
    {"role", "from", "type", "finish_reason", "finish", "object"}
    | {"timestamp", "created", "created_at", "arrived", "temperature"}
)
_ARRIVED = ("arrived", "timestamp", "created", "created_at")
_MILLISECONDS_FROM = 1e11  # as seconds, the year 5138


def redacted(value: Any, redact: Callable[[str], str], key: str = "") -> Any:
    """A parsed line with every text in it replaced by what ``redact`` makes of it."""
    if isinstance(value, str):
        return value if key in _NOT_TEXT else redact(value)
    if isinstance(value, Mapping):
        return {k: redacted(v, redact, str(k)) for k, v in value.items()}
    return [redacted(v, redact, key) for v in value] if isinstance(value, list) else value


def parse(row: Any, line: int) -> Record:
    """Read a line that JSON could be read from.

    Raises:
        TypeError, ValueError, KeyError: it has none of the known forms; says what is missing.
    """
    if isinstance(row, str):
        return Record(line, messages=_user(row), form="text")
    if not isinstance(row, Mapping):
        raise TypeError(f"{type(row).__name__} instead of an object")
    asked = _body(row.get("request")) or _body(row.get("body")) or row
    said = _body(row.get("response")) or row
    record = _asked(asked, line, raw=_is_completion(row, asked, said))
    fields = {**_answered(record, row, asked, said), **_about(row, asked, said)}
    return Record(**{name: getattr(record, name) for name in Record.__slots__} | fields)


def _body(part: Any) -> Mapping[str, Any] | None:
    """A request or response, out of what loggers and the batch API wrap it in."""
    if not isinstance(part, Mapping):
        return None
    inner = part.get("body")
    return inner if isinstance(inner, Mapping) else part


def _is_completion(row: Mapping[str, Any], asked: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether it is of a completions API, which takes text as it is; elsewhere a prompt is a user's."""
    if "token_ids" in row or isinstance(row.get("response"), str):
        return False
    return asked is not row or "model" in asked or "choices" in said


def _asked(asked: Mapping[str, Any], line: int, raw: bool) -> Record:
    if "prompt_token_ids" in asked:
        return Record(line, prompt_token_ids=_ids(asked["prompt_token_ids"]), form="token ids")
    if "messages" in asked:
        messages = _some(_message(m) for m in asked["messages"])
        return Record(line, messages=messages, tools=tuple(asked.get("tools") or ()), form="messages")
    if "conversations" in asked:
        return Record(line, messages=_some(_turn(t) for t in asked["conversations"]), form="conversations")
    prompt = asked["prompt"]
    if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
        return Record(line, prompt_token_ids=_ids(prompt), form="completions")
    if not isinstance(prompt, str):
        return Record(line, messages=_some(_message(m) for m in prompt), form="prompt")
    if raw:
        return Record(line, prompt=prompt, form="completions")
    return Record(line, messages=_user(prompt), form="prompt")


def _answered(
    record: Record, row: Mapping[str, Any], asked: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of the answer, and of ``messages`` where it was the last of them."""
    choices = said.get("choices")
    if isinstance(choices, Sequence) and choices:
        choice = choices[0]
        ended = _ended(choice.get("finish_reason"))
        if choice.get("token_ids"):
            # As vLLM gives them for return_token_ids.
            asked_ids = choice.get("prompt_token_ids") or said.get("prompt_token_ids")
            prompt = {"prompt_token_ids": _ids(asked_ids)} if asked_ids else {}
            return {**prompt, "token_ids": _ids(choice["token_ids"]), "ended": ended}
        if "message" in choice:
            return {**_said(_message(choice["message"])), "ended": ended}
        return {"response": str(choice["text"]), "ended": ended}
    for source in (said, row, asked):
        if "token_ids" in source:
            return {"token_ids": _ids(source["token_ids"]), "ended": _ended(_reason(source))}
    if isinstance(row.get("response"), str):
        return {"response": row["response"], "ended": _ended(_reason(row))}
    if len(record.messages) > 1 and record.messages[-1]["role"] == "assistant":
        ended = _ended(_reason(row)) or "stop"
        return {**_said(record.messages[-1]), "messages": record.messages[:-1], "ended": ended}
    return {}


def _said(message: Message) -> dict[str, Any]:
    if message.get("tool_calls") or message.get("function_call"):
        return {"message": message}
    return {"response": message.get("content") or ""}


def _about(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """What else the log says, from wherever in the line it says it."""

    def find(*names: str) -> Any:
        found = (part.get(name) for part in parts for name in names)
        return next((value for value in found if value is not None), None)

    tag, tags = find("tag"), find("tags")
    arrived, temperature = find(*_ARRIVED), find("temperature")
    most = find("max_completion_tokens", "max_tokens", "max_new_tokens")
    seconds, milliseconds = find("seconds", "duration", "latency"), find("duration_ms", "latency_ms")
    if seconds is None and milliseconds is not None:
        seconds = float(milliseconds) / 1e3
    return {
        "tags": tuple(
            map(str, [tag] if tag is not None else [tags] if isinstance(tags, str) else tags or ())
        ),
        "arrived": None if arrived is None else _time(arrived),
        "seconds": None if seconds is None else float(seconds),
        "temperature": None if temperature is None else float(temperature),
        "max_tokens": None if most is None else int(most),
        "tenant": str(find("cache_salt") or ""),
    }


def _time(value: Any) -> float:
    """Seconds since 1970 of a number, in seconds or milliseconds, or of a date in ISO 8601."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            # Python 3.10 does not read the Z.
            moment = datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=datetime.timezone.utc)
            return moment.timestamp()
    return float(value) / 1e3 if float(value) > _MILLISECONDS_FROM else float(value)


def _reason(row: Mapping[str, Any]) -> Any:
    return row.get("finish_reason", row.get("finish"))


def _ended(reason: Any) -> Literal["stop", "length"] | None:
    return None if reason is None else "length" if reason == "length" else "stop"


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(t) for t in values)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _some(messages: Iterable[Message]) -> tuple[Message, ...]:
    found = tuple(messages)
    if not found:
        raise ValueError("it has no messages")
    return found


def _turn(turn: Any) -> Message:
    speaker = turn["from"]
    return {"role": ROLES.get(speaker, speaker), "content": str(turn["value"])}


def _message(message: Any) -> Message:
    """With its content as text."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message that is {type(message).__name__} instead of an object")
    content = message.get("content")
    if isinstance(content, list):
        other = [p.get("type") for p in content if isinstance(p, Mapping) and "text" not in p]
        if other:
            raise ValueError(f"a message with {other[0]!r}, which is not text")
        content = "".join(p if isinstance(p, str) else str(p["text"]) for p in content)
    if content is None and not (message.get("tool_calls") or message.get("function_call")):
        raise KeyError("content")
    return {**message, "role": str(message["role"]), "content": content or ""}
