"""What drafting achieved: by proposer, source, request and draft position."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.proposer import IntArray
from spec_plugins.validation import Fault

__all__ = ["RequestStatistics", "SourceStatistics", "Statistics"]

# Finished requests whose figures are kept for whoever asks next.
KEEP_FINISHED = 1024


@dataclass(slots=True)
class RequestStatistics:
    """One request's figures."""

    verify_steps: int = 0
    """Target forwards that decoded for this request, drafted or not."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a target forward, the target's own included; 1 without speculation."""
        return 1 + self.accepted_tokens / self.verify_steps if self.verify_steps else 1.0


@dataclass(slots=True)
class SourceStatistics:
    """One source's figures, in draft tokens."""

    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass
class Statistics:
    """Counters of one driver; positions count from 0, the first draft token's."""

    positions: int
    steps: int = 0
    """Engine steps in which drafts were asked for."""
    verify_steps: int = 0
    """Request-steps that decoded, drafted or not."""
    drafts: int = 0
    """Request-steps with a draft."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    propose_seconds: float = 0.0
    faults: Counter[Fault] = field(default_factory=Counter)
    rests: int = 0
    """How often the proposer was put to rest."""
    skipped_steps: int = 0
    """Steps without drafting because the proposer rested or was late."""
    budget: float = 0.0
    """Draft tokens allowed a request, the mean of the newest step."""
    by_source: dict[str, SourceStatistics] = field(default_factory=dict)
    recent_propose_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    finished: OrderedDict[str, RequestStatistics] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        # How many drafts ended after so many positions, as drafted and as accepted.
        self._depths = np.zeros((2, self.positions + 1), np.int64)
        # Running requests' figures, in the order of RequestStatistics, and their rows.
        self._figures = np.zeros((0, 4), np.int64)
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        # The last step's requests, and their rows.
        self._ids: tuple[str, ...] = ()
        self._ids_rows: IntArray = np.empty(0, np.int32)

    @property
    def drafted_by_position(self) -> npt.NDArray[np.int64]:
        """How many drafts reached each position."""
        return np.cumsum(self._depths[0, ::-1])[-2::-1]

    @property
    def accepted_by_position(self) -> npt.NDArray[np.int64]:
        """How many drafts were accepted up to and with each position."""
        return np.cumsum(self._depths[1, ::-1])[-2::-1]

    @property
    def acceptance_length(self) -> float:
        """Tokens a target forward and request, the target's own included."""
        return 1 + self.accepted_tokens / self.verify_steps if self.verify_steps else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted over drafted at each position that was ever drafted."""
        drafted = self.drafted_by_position
        last = int(np.flatnonzero(drafted)[-1]) + 1 if drafted.any() else 0
        return [
            float(a / d) if d else 0.0
            for a, d in zip(self.accepted_by_position[:last], drafted[:last], strict=True)
        ]

    @property
    def running(self) -> dict[str, RequestStatistics]:
        """Figures of the running requests that decoded."""
        return {r: figures for r in self._rows if (figures := self._running(r)) is not None}

    def request(self, request_id: str) -> RequestStatistics | None:
        """A running or recently finished request's figures."""
        return self._running(request_id) or self.finished.get(request_id)

    def _running(self, request_id: str) -> RequestStatistics | None:
        row = self._rows.get(request_id)
        figures = None if row is None else RequestStatistics(*self._figures[row].tolist())
        return figures if figures is not None and figures.verify_steps else None

    def finish(self, request_id: str) -> None:
        """Move a request from running to recently finished; one that comes back starts anew."""
        figures, row = self._running(request_id), self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._ids, self._ids_rows = (), self._ids_rows[:0]
        if figures is not None:
            self.finished.pop(request_id, None)  # of an earlier life, so that the newest stands last
            self.finished[request_id] = figures
            while len(self.finished) > KEEP_FINISHED:
                self.finished.popitem(last=False)

    def count(
        self,
        request_ids: Sequence[str],
        depths: Sequence[int] | IntArray,
        nodes: Sequence[int] | IntArray,
        accepted: Sequence[int] | IntArray,
    ) -> tuple[int, int]:
        """Count one verified step; one entry a request, ``accepted`` -1 where nothing was decoded.

        Returns the step's draft tokens and how many of them were accepted.
        """
        step = np.array([self._rows_of(tuple(request_ids)), depths, nodes, accepted], np.int32)
        verify_steps, drafts, draft_tokens, accepted_tokens = _count(step, self._figures, self._depths)
        self.verify_steps += verify_steps
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens
        return draft_tokens, accepted_tokens

    def _rows_of(self, ids: tuple[str, ...]) -> IntArray:
        """Rows of figures, new ones included; most steps have the requests of the step before."""
        if ids != self._ids:
            for r in ids:
                if r not in self._rows:
                    self._rows[r] = self._row()
            self._ids, self._ids_rows = ids, np.array([self._rows[r] for r in ids], np.int32)
        return self._ids_rows

    def _row(self) -> int:
        if not self._free:
            n = len(self._figures)
            self._figures = np.pad(self._figures, ((0, n + 8), (0, 0)))
            self._free = list(range(n, 2 * n + 8))[::-1]
        row = self._free.pop()
        self._figures[row] = 0
        return row

    def count_source(self, name: str, draft_tokens: int, accepted_tokens: int) -> None:
        """Credit one source."""
        if draft_tokens:
            figures = self.by_source.get(name)
            if figures is None:
                figures = self.by_source[name] = SourceStatistics()
            figures.draft_tokens += draft_tokens
            figures.accepted_tokens += accepted_tokens

    def snapshot(self) -> Mapping[str, Any]:
        """Everything as plain numbers, for JSON and metrics."""
        recent = sorted(self.recent_propose_seconds)
        return {
            "steps": self.steps,
            "verify_steps": self.verify_steps,
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0,
            "drafted_by_position": self.drafted_by_position.tolist(),
            "accepted_by_position": self.accepted_by_position.tolist(),
            "acceptance_by_position": self.acceptance_by_position,
            "propose_seconds": self.propose_seconds,
            "propose_seconds_median": recent[len(recent) // 2] if recent else 0.0,
            "faults": {fault.value: n for fault, n in self.faults.items()},
            "rests": self.rests,
            "skipped_steps": self.skipped_steps,
            "budget": self.budget,
            "sources": {
                name: {"draft_tokens": s.draft_tokens, "accepted_tokens": s.accepted_tokens}
                for name, s in self.by_source.items()
            },
        }


@numba.njit(cache=True)
def _count(
    step: IntArray, figures: npt.NDArray[np.int64], depths: npt.NDArray[np.int64]
) -> tuple[int, int, int, int]:
    """Add ``[4, n]`` rows, depths, nodes and accepted tokens to figures; returns the sums of those."""
    verify_steps = drafts = draft_tokens = accepted_tokens = 0
    deepest = depths.shape[1] - 1
    for i in range(step.shape[1]):
        row, depth, nodes, accepted = step[0, i], step[1, i], step[2, i], step[3, i]
        if accepted < 0:
            continue
        verify_steps += 1
        figures[row, 0] += 1
        if nodes > 0:
            drafts += 1
            draft_tokens += nodes
            accepted_tokens += accepted
            figures[row, 1] += 1
            figures[row, 2] += nodes
            figures[row, 3] += accepted
            depths[0, min(depth, deepest)] += 1
            depths[1, min(accepted, deepest)] += 1
    return verify_steps, drafts, draft_tokens, accepted_tokens
