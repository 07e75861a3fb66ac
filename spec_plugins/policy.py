"""How many tokens to draft, for whom, and when not to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_plugins.proposer import IntArray

__all__ = ["FixedLength", "Outcome", "Policy"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verified step taught, one entry a request."""

    request_ids: Sequence[str]
    drafted: IntArray
    """Deepest position that was verified; 0 where nothing was."""
    accepted: IntArray
    """How many of them the target accepted."""
    nodes: IntArray
    """Draft tokens verified, over all branches."""
    step_seconds: float | None
    """The engine's whole step, where the adapter knows it."""
    propose_seconds: float
    """What drafting cost."""


class Policy(ABC):
    """Sets each request's budget before a step and learns from what came of it."""

    @abstractmethod
    def budgets(self, request_ids: Sequence[str], limits: IntArray) -> tuple[IntArray, IntArray]:
        """Draft tokens and deepest position for every request, ``[n]`` int32 each.

        Args:
            request_ids: the running requests.
            limits: ``[n]``: the deepest position that the engine can take now, 0 included.

        The driver clamps both to the limits. Called every step, also while the proposer rests.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn from a verified step."""

    def finish(self, request_id: str) -> None:  # noqa: B027
        """Forget a request."""


class FixedLength(Policy):
    """The same budget for every request in every step."""

    def __init__(self, num_speculative_tokens: int, max_draft_nodes: int | None = None) -> None:
        self.depth = num_speculative_tokens
        self.nodes = max_draft_nodes or num_speculative_tokens
        self._budgets = np.empty(0, np.int32), np.empty(0, np.int32)

    def budgets(self, request_ids: Sequence[str], limits: IntArray) -> tuple[IntArray, IntArray]:
        n = len(request_ids)
        if n != len(self._budgets[0]):
            self._budgets = np.full(n, self.nodes, np.int32), np.full(n, self.depth, np.int32)
        return self._budgets
