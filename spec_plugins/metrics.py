"""The project's Prometheus metrics, one set for all engines whose servers show such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["COUNTERS", "GAUGES", "PREFIX", "Metrics", "figures"]

COUNTERS = {
    "drafted_at_position": ("position", "Drafts that reached this position, from 0."),
    "accepted_at_position": ("position", "Drafts accepted up to and with this position."),
    "draft_tokens": ("source", "Draft tokens verified, by who guessed them."),
    "accepted_tokens": ("source", "Draft tokens accepted, by who guessed them."),
    "faults": ("fault", "Contained faults of the proposer."),
    "verify_steps": ("", "Target forward passes that decoded, summed over requests."),
    "steps": ("", "Engine steps in which the proposer was asked."),
    "skipped_steps": ("", "Engine steps without drafts because it rested or was late."),
    "rests": ("", "How often it was put to rest."),
    "propose_seconds": ("", "Seconds spent in the proposer and in checking its drafts."),
}
GAUGES = {
    "budget": ("", "Draft tokens allowed a request, the mean of the newest step."),
    "requests_held": ("", "Requests that the proposer holds state for."),
    "state": ("figure", "What the proposer says of the state it holds."),
}
PREFIX = "spec_plugins:"
_LABELS = ("model_name", "engine", "proposer")
_made: dict[str, Any] = {}


class Metrics:
    """Copies one driver's figures into this process's Prometheus metrics."""

    def __init__(self, model_name: str, engine: str, proposer: str) -> None:
        """
        Args:
            model_name: the served model's.
            engine: its number, among those that share the work.
            proposer: registered name.
        """
        # Whether the client counts for several processes it asks the environment when it is imported.
        from prometheus_client import Counter, Gauge

        self._values = (model_name, engine, proposer)
        self._last: Mapping[str, Any] = {}
        for kind, table in ((Counter, COUNTERS), (Gauge, GAUGES)):
            for name, (label, text) in table.items():
                if name not in _made:  # one metric a process, however many engines it makes
                    labels = [*_LABELS, *([label] if label else [])]
                    # One process at a time shows the figures of one engine.
                    more = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
                    _made[name] = kind(PREFIX + name, text, labels, **more)

    def update(self, snapshot: Mapping[str, Any]) -> None:
        """Bring the metrics up to a snapshot.

        Args:
            snapshot: :meth:`Statistics.snapshot`, with ``requests_held`` and ``state`` of the driver. Where
                it comes from another process, with that one's ``pid``: its figures begin at nothing.
        """
        old = self._last if self._last.get("pid") == snapshot.get("pid") else {}
        for name, (label, _) in COUNTERS.items():
            before, after = figures(old, name), figures(snapshot, name)
            for key, value in after.items():
                self._metric(name, label, key).inc(max(0, value - before.get(key, 0)))
        for name, (label, _) in GAUGES.items():
            for key, value in figures(snapshot, name).items():
                self._metric(name, label, key).set(value)
        self._last = snapshot

    def _metric(self, name: str, label: str, key: str) -> Any:
        return _made[name].labels(*self._values, *([key] if label else []))


def figures(snapshot: Mapping[str, Any], name: str) -> dict[str, float]:
    """A metric's values in a snapshot, by its label's; under an empty label where it has none."""
    if name in ("drafted_at_position", "accepted_at_position"):
        found = snapshot.get(name.replace("_at_", "_by_"), [])
        return {str(position): value for position, value in enumerate(found)}
    if name in ("draft_tokens", "accepted_tokens"):
        return {source: s[name] for source, s in snapshot.get("sources", {}).items()}
    found = snapshot.get(name, {})
    return dict(found) if isinstance(found, dict) else {"": found}
