"""Names for requests that are known by their tokens alone.

vLLM's ``custom_class`` hook tells no request ids, and rows move between steps. A request is recognised by
its length and its last tokens before the step; where two are alike, by its row. A mistake costs good
drafts, never output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from spec_plugins.proposer import IntArray

__all__ = ["RowIdentity"]

TAIL = 16


class RowIdentity:
    """Remembers how each request ended, to know it again. O(1) a request and step."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._ended: dict[tuple[int, bytes], list[tuple[int, str]]] = {}

    def names(self, rows: IntArray, before: IntArray, lengths: IntArray, token_ids: IntArray) -> list[str]:
        """A name for each row: the one it had when it held ``before`` tokens, or a new one.

        Args:
            rows: ``[n]``.
            before: ``[n]``: tokens before this step.
            lengths: ``[n]``: tokens now.
            token_ids: ``[rows, capacity]``.
        """
        found: list[str | None] = []
        places = list(zip(rows.tolist(), before.tolist(), lengths.tolist(), strict=True))
        for row, old, _ in places:
            alike = self._ended.get(_ending(token_ids[row], old), [])
            k = next((k for k, (at, _) in enumerate(alike) if at == row), 0)
            found.append(alike.pop(k)[1] if alike else None)
        names = [f"row-request-{next(self._serial)}" if name is None else name for name in found]
        self._ended = {}
        for (row, _, length), name in zip(places, names, strict=True):
            self._ended.setdefault(_ending(token_ids[row], length), []).append((row, name))
        return names


def _ending(tokens: Sequence[int] | IntArray, length: int) -> tuple[int, bytes]:
    return length, tokens[max(0, length - TAIL) : length].tobytes()  # type: ignore[union-attr]
