"""What drafting achieved: by proposer, source, request and draft position."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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
    by_source: dict[str, SourceStatistics] = field(default_factory=dict)
    drafted_by_position: npt.NDArray[np.int64] = field(init=False)
    accepted_by_position: npt.NDArray[np.int64] = field(init=False)
    recent_propose_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    running: dict[str, RequestStatistics] = field(default_factory=dict)
    finished: OrderedDict[str, RequestStatistics] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.drafted_by_position = np.zeros(self.positions, np.int64)
        self.accepted_by_position = np.zeros(self.positions, np.int64)

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

    def request(self, request_id: str) -> RequestStatistics | None:
        """A running or recently finished request's figures."""
        return self.running.get(request_id) or self.finished.get(request_id)

    def finish(self, request_id: str) -> None:
        """Move a request from running to recently finished."""
        figures = self.running.pop(request_id, None)
        if figures is not None:
            self.finished[request_id] = figures
            while len(self.finished) > KEEP_FINISHED:
                self.finished.popitem(last=False)

    def count(
        self,
        request_ids: Sequence[str],
        depths: npt.NDArray[np.int32],
        nodes: npt.NDArray[np.int32],
        accepted: npt.NDArray[np.int32],
    ) -> None:
        """Count one verified step; arrays are ``[n]``, ``accepted`` -1 where nothing was decoded."""
        decoded = accepted >= 0
        self.verify_steps += int(decoded.sum())
        self.drafts += int((nodes > 0).sum())
        self.draft_tokens += int(nodes.sum())
        self.accepted_tokens += int(accepted[decoded].sum())
        _add_up_to(self.drafted_by_position, depths[decoded])
        _add_up_to(self.accepted_by_position, accepted[decoded])
        for request_id, m, a in zip(request_ids, nodes.tolist(), accepted.tolist(), strict=True):
            if a < 0:
                continue
            figures = self.running.get(request_id)
            if figures is None:
                figures = self.running[request_id] = RequestStatistics()
            figures.verify_steps += 1
            figures.drafts += m > 0
            figures.draft_tokens += m
            figures.accepted_tokens += a

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
            "sources": {
                name: {"draft_tokens": s.draft_tokens, "accepted_tokens": s.accepted_tokens}
                for name, s in self.by_source.items()
            },
        }


def _add_up_to(counters: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> None:
    """Add one to the first ``length`` counters, for every length."""
    if len(lengths):
        at_least = np.bincount(np.minimum(lengths, len(counters)), minlength=len(counters) + 1)[
            ::-1
        ].cumsum()[::-1]
        counters += at_least[1:]
