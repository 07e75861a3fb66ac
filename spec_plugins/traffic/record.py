"""One request of a log, before it is tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Record"]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """What was asked, what was answered, and what else the log says of it; ``None``: it does not say.

    What was asked is one of ``messages``, ``prompt`` and ``prompt_token_ids``, what was answered one of
    ``response``, ``message`` and ``token_ids``, or none where nothing was recorded.
    """

    line: int
    """Its number in the file, from 1."""
    messages: tuple[Message, ...] = ()
    """For the model's chat template."""
    prompt: str | None = None
    """Text that was given as it is, to a completions API."""
    prompt_token_ids: tuple[int, ...] | None = None
    response: str | None = None
    message: Message | None = None
    """An answer that is more than text: with calls of tools."""
    token_ids: tuple[int, ...] | None = None
    tools: tuple[Any, ...] = ()
    """What the model was told that it may call."""
    tags: tuple[str, ...] = ()
    """What kind of traffic it is; where the log does not say, as :func:`spec_plugins.traffic.tags.tag_of`
    guesses."""
    arrived: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    """From its arrival to the end of its answer."""
    temperature: float | None = None
    max_tokens: int | None = None
    """The most tokens that the answer could have had."""
    ended: Literal["stop", "length"] | None = None
    """Whether the model ended the answer, or its length did."""
    tenant: str = ""
    """Whose it is: proposers share nothing between tenants."""
    form: str = ""
    """Which form the line has, for messages."""

    @property
    def answered(self) -> bool:
        """Whether an answer was recorded."""
        return any(a is not None for a in (self.response, self.message, self.token_ids))

    @property
    def size(self) -> int:
        """About how many tokens it has: of text, a quarter of its characters."""
        text = len(self.prompt or "") + len(self.response or "") + sum(len(t) for t in self.texts())
        return text // 4 + len(self.prompt_token_ids or ()) + len(self.token_ids or ())

    def texts(self) -> Sequence[str]:
        """The text of every message."""
        return [str(m.get("content") or "") for m in (*self.messages, *filter(None, [self.message]))]
