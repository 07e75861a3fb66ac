"""The project's figures beside vLLM's, on ``/metrics`` and in its log: ``vllm.stat_logger_plugins``."""

from __future__ import annotations

import logging
import time
import weakref
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from spec_plugins.adapters.vllm.plugin import log_as_vllm_does
from spec_plugins.adapters.vllm.snapshots import SECONDS_BETWEEN, find_snapshot, read_snapshot
from spec_plugins.metrics import Metrics, figures

__all__ = ["StatLogger"]

logger = logging.getLogger("spec_plugins")


class StatLogger(StatLoggerBase):  # type: ignore[misc]
    """Copies the newest snapshot into Prometheus metrics; idle where the drafter is not ours."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.active = False
        try:
            self._start(vllm_config, engine_index)
        except Exception:
            self._give_up()

    def _start(self, vllm_config: Any, engine_index: int) -> None:
        spec = vllm_config.speculative_config
        ours = spec is not None and str(spec.model).startswith("spec_plugins.adapters.vllm.")
        first = getattr(vllm_config.parallel_config, "_api_process_rank", 0) <= 0
        self.active = ours and first
        self._instance, self._rank = vllm_config.instance_id, engine_index
        self._next, self._path = 0.0, Path()
        self._last: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        if self.active:
            log_as_vllm_does()  # the plug-in's own call came before vLLM set its log up
            self._proposer = str(spec.model).rpartition(".")[2]
            names = vllm_config.model_config.served_model_name
            model = names[0] if isinstance(names, list) else names or vllm_config.model_config.model
            self._metrics = Metrics(model, str(engine_index), self._proposer)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called for each engine step; reads at most once a second."""
        if self.active and time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN
            try:
                self.refresh()
            except Exception:
                self._give_up()

    def _give_up(self) -> None:
        """What fails here must not reach the loop that hands out vLLM's answers."""
        self.active = False
        logger.exception("the project's metrics failed; vLLM goes on without them")

    def refresh(self) -> None:
        """Bring the metrics up to the newest snapshot."""
        path = find_snapshot(self._instance, self._rank)
        new = read_snapshot(path)
        if path is None or new is None:
            return
        if path != self._path:
            self._path = path
            # vLLM ends its workers in a way that leaves them no time to.
            weakref.finalize(self, path.unlink, missing_ok=True)
        self._metrics.update(new)
        self._last = new

    def log(self) -> None:
        """One line every so often, where something was drafted since the last."""
        if self.active:
            try:
                self.refresh()
                self._log_line()
            except Exception:
                self._give_up()

    def _log_line(self) -> None:
        new, old = self._last, self._logged
        steps = new.get("verify_steps", 0) - old.get("verify_steps", 0)
        drafted = new.get("draft_tokens", 0) - old.get("draft_tokens", 0)
        if steps <= 0 or not drafted:
            return
        accepted = new["accepted_tokens"] - old.get("accepted_tokens", 0)
        before, after = figures(old, "drafted_at_position"), figures(new, "drafted_at_position")
        kept_before, kept = figures(old, "accepted_at_position"), figures(new, "accepted_at_position")
        rates = [
            (kept[p] - kept_before.get(p, 0)) / d for p in after if (d := after[p] - before.get(p, 0)) > 0
        ]
        logger.info(
            "proposer %s: acceptance length %.2f, %d of %d draft tokens accepted; of those drafted at each "
            "position %s; faults %d",
            self._proposer,
            1 + accepted / steps,
            accepted,
            drafted,
            " ".join(f"{rate:.2f}" for rate in rates),
            sum(new["faults"].values()),
        )
        self._logged = new

    def log_engine_initialized(self) -> None:
        """Nothing to say: the worker has."""
