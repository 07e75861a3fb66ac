"""What kind of traffic a request is, guessed where its log does not say.

A heuristic, for a first split of a log without tags: it reads no language and knows no client. Tag your
traffic yourself where a decision depends on it.
"""

from __future__ import annotations

import re

from spec_plugins.traffic.record import Record

__all__ = ["tag_of"]

_FENCE = re.compile(r"^```", re.M)
# Lines as they begin or end in programs, hardly ever in prose.
_CODE_LINE = re.compile(
    r"^\s*(?:def |class |import |from \S+ import |return\b|#include|public |private |static |fn |func |let |"
    r"const |var |if \(|for \(|while \(|SELECT |CREATE TABLE|</?\w+[^>]*>\s*$|@@ |diff --git|[+-]{3} [ab]/)"
    r"|[;{}]\s*$",
    re.M,
)
# As agents without an interface for tools write calls and results.
_CALL = re.compile(
    r"<tool_call>|<function|</?tool_response>|\bObservation:|^Action(?: Input)?:|<invoke ", re.M
)
_CODE_SHARE = 0.2
_SHOWN = 20_000


def tag_of(record: Record) -> str:
    """``agent``: tools are offered, called or answered, or called in the text. ``code``: a fenced block in
    the answer or the last message, or more than a fifth of their lines look like a program's. Else ``chat``.

    Looks at no more than 20,000 characters of a text. ``chat`` too for a line of nothing but token ids.
    """
    messages = [*record.messages, *filter(None, [record.message])]
    if record.tools or record.message is not None:
        return "agent"
    if any(m["role"] in ("tool", "function") or m.get("tool_calls") for m in messages):
        return "agent"
    last = str(messages[-1].get("content") or "") if messages else record.prompt or ""
    seen = [last[-_SHOWN:], (record.response or "")[:_SHOWN]]
    system = str(messages[0].get("content") or "")[:_SHOWN] if messages else ""
    if any(_CALL.search(text) for text in (*seen, system)):
        return "agent"
    if any(_FENCE.search(text) for text in seen) or any(map(_looks_like_code, seen)):
        return "code"
    return "chat"


def _looks_like_code(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and sum(bool(_CODE_LINE.search(x)) for x in lines) > _CODE_SHARE * len(lines)
