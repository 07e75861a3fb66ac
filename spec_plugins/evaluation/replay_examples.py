"""A few recorded responses, with what was drafted in them: accepted, rejected, or the target's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from spec_plugins.evaluation.recorded import Recorded

if TYPE_CHECKING:
    from spec_plugins.evaluation.replay import Replayed
    from spec_plugins.evaluation.trace import Trace

__all__ = ["Decode", "Example", "Piece", "examples", "shown_requests"]

Kind = Literal["accepted", "rejected", "target"]
Decode = Callable[[Sequence[int]], str]

REQUESTS = 3
_BEFORE = 4
"""Tokens of the prompt that are decoded along: a token may look otherwise at the beginning of a text."""
_CUT = "\ufffd"
"""What a decoder writes for a character of which there are not all bytes yet."""


class Piece(BaseModel):
    """A few tokens in a row with the same fate."""

    kind: Kind
    text: str
    tokens: int


class Example(BaseModel):
    """The beginning of a response. Without what was rejected, its pieces are what was said."""

    request: int
    """Its place among the replayed ones."""
    tags: list[str]
    draft_tokens: int
    """The most that were drafted a step."""
    steps: int
    tokens: int
    """Of the response, as far as it is shown."""
    pieces: list[Piece]


def shown_requests(recorded: Recorded, most: int = REQUESTS) -> list[int]:
    """Requests to show: of each tag one, then others; from the middle of the log, for a proposer that learns
    from requests knows nothing at its beginning."""
    long = [i for i, n in enumerate(recorded.lengths - recorded.prompt_lengths) if n > 1]
    order = sorted(long, key=lambda i: abs(i - len(recorded) // 2))
    first = dict.fromkeys(recorded.tags[i] for i in order)
    of_each = [next(i for i in order if recorded.tags[i] == tags) for tags in first]
    return list(dict.fromkeys([*of_each, *order]))[:most]


def examples(result: Replayed, decode: Decode) -> list[Example]:
    """Those of one replay whose drafts were kept, stepped through as an engine does.

    Args:
        result: of :func:`spec_plugins.evaluation.replay.replay` with ``keep``.
        decode: text of tokens, special ones included.
    """
    from spec_plugins.evaluation.replay import KEPT_TOKENS

    trace, recorded = result.trace, result.recorded
    found = []
    for c in sorted({trace.conversation(at) for at in trace.kept}):
        prompt, tokens = int(recorded.prompt_lengths[c]), recorded.conversation(c).tolist()
        steps = list(_steps(trace, c, min(len(tokens) - prompt, KEPT_TOKENS)))
        text = _Text(tokens[max(0, prompt - _BEFORE) :], min(prompt, _BEFORE), decode)
        pieces = list(_pieces(text, steps))
        shown = sum(p.tokens for p in pieces if p.kind != "rejected")
        found.append(
            Example(
                request=c, tags=list(recorded.tags[c]), draft_tokens=result.sizes[-1], steps=len(steps),
                tokens=shown, pieces=pieces,
            )
        )  # fmt: skip
    return found


def _steps(trace: Trace, c: int, length: int) -> Iterator[tuple[int, int, list[int]]]:
    """Where each step's first token is in the response, how many draft tokens were accepted, and the rest."""
    first, end = int(trace.offsets[c]), int(trace.offsets[c + 1])
    at = first
    while at < min(end, first + length - 1):
        accepted = int(trace.accepted[at])
        # Past the end of the record nobody knows.
        rest = trace.rejected(at) if accepted < end - at else []
        yield at - first + 1, accepted, rest
        at += accepted + 1


class _Text:
    """Where each token's text is; a character that several tokens make belongs to the last of them."""

    def __init__(self, tokens: Sequence[int], before: int, decode: Decode) -> None:
        self._tokens, self._before, self._decode = tokens, before, decode

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self._tokens) - self._before

    def of(self, start: int, end: int) -> str:
        """Of tokens of the response."""
        return self._upto(end)[len(self._upto(start)) :]

    def instead(self, start: int, others: Sequence[int]) -> str:
        """Of other tokens in the place of those from there on."""
        whole = self._decode([*self._tokens[: self._before + start], *others])
        return whole[len(self._upto(start)) :]

    def _upto(self, end: int) -> str:
        return self._decode(self._tokens[: self._before + end]).rstrip(_CUT)


def _pieces(text: _Text, steps: Sequence[tuple[int, int, list[int]]]) -> Iterator[Piece]:
    """The first token is the prefill's, and so the target's; tokens of it in a row are one piece."""
    own, end = 0, 1
    for start, accepted, rest in steps:
        if (accepted or rest) and own < start:
            yield Piece(kind="target", text=text.of(own, start), tokens=start - own)
            own = start
        if accepted:
            own = start + accepted
            yield Piece(kind="accepted", text=text.of(start, own), tokens=accepted)
        if rest:
            yield Piece(kind="rejected", text=text.instead(start + accepted, rest), tokens=len(rest))
        end = min(start + accepted + 1, text.length)  # the record may end with what was accepted
    if own < end:
        yield Piece(kind="target", text=text.of(own, end), tokens=end - own)
