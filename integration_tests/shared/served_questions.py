"""What servers are asked by the openai client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MODEL = "tiny"
"""What a served model is called."""
Prompts = Sequence[Sequence[int]]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["apple", "pear"]},
        "numbers": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 6, "maxItems": 6},
    },
    "required": ["kind", "numbers"],
    "additionalProperties": False,
}
REGEX = "(ab|cd){12}-[0-9]{3}-(ab|cd){12}"
RESPONSE = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "say it again, say it again, say it"}]


def complete(client: Any, prompt: Sequence[int], max_tokens: int = 48, **settings: Any) -> Any:
    """A greedy completion."""
    body = {"ignore_eos": True, **settings.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=list(prompt), max_tokens=max_tokens, extra_body=body,
        **{"temperature": 0, **settings},
    )  # fmt: skip


def chat(client: Any, **settings: Any) -> Any:
    """A greedy chat answer."""
    body = {"ignore_eos": True, **settings.pop("extra_body", {})}
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=settings.pop("max_tokens", 48), temperature=0,
        extra_body=body, **settings,
    )  # fmt: skip


def text(completion: Any) -> tuple[str, str, int]:
    """What was said, why it ended, and in how many tokens."""
    choice = completion.choices[0]
    said = choice.text if hasattr(choice, "text") else choice.message.content
    return said, choice.finish_reason, completion.usage.completion_tokens


def joined(stream: Any) -> str:
    """What a stream says."""
    pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    return "".join((p.text if hasattr(p, "text") else p.delta.content) or "" for p in pieces)


COMMON: dict[str, Callable[[Any, Prompts], Any]] = {
    "completions": lambda c, prompts: [text(complete(c, p)) for p in prompts],
    "completions, streamed": lambda c, prompts: [joined(complete(c, p, stream=True)) for p in prompts[::4]],
    "chat": lambda c, _: text(chat(c)),
    "chat, streamed": lambda c, _: joined(chat(c, stream=True)),
}
"""Questions that every server takes alike."""
