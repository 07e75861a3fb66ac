"""The project's figures beside SGLang's: Prometheus metrics, and a part of ``/server_info``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt import runtime_context as context

from spec_plugins.adapters.sglang.hooks import INTERNAL_STATE
from spec_plugins.driver import Driver
from spec_plugins.hooks import wrap
from spec_plugins.metrics import Metrics

__all__ = ["ServerFigures"]

logger = logging.getLogger("spec_plugins")

SECONDS_BETWEEN = 1.0


class ServerFigures:
    """Shows one driver's figures. SGLang's own metrics come from this very process, and so do these."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._next = 0.0
        self._metrics: Metrics | None = None
        try:
            wrap(INTERNAL_STATE, _add_figures)
            if context.get_observability().enable_metrics:
                model, rank = context.get_serving().served_model_name, context.get_parallel().dp_rank or 0
                self._metrics = Metrics(model, str(rank), driver.config.proposer)
        except Exception:
            self._give_up()

    def refresh(self, *, now: bool = False) -> None:
        """Bring the metrics up to date, at most once a second unless ``now``. Never raises."""
        if self._metrics is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + SECONDS_BETWEEN
        try:
            self._metrics.update(_figures(self.driver))
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        self._metrics = None
        logger.exception("the project's metrics failed; SGLang goes on without them")


def _figures(driver: Driver) -> dict[str, Any]:
    return {
        **driver.statistics.snapshot(),
        "requests_held": driver.requests_held,
        "state": driver.gauges(),
    }


def _add_figures(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_internal_state(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, recv_req, *args, **kwargs)
        driver = getattr(self.draft_worker, "driver", None)
        if isinstance(driver, Driver):
            answer.internal_state["spec_plugins"] = {
                **_figures(driver),
                "kv_tokens_used": _kv_tokens_used(self),
            }
        return answer

    return get_internal_state


def _kv_tokens_used(scheduler: Any) -> int:
    """KV slots that hold something now, what the radix cache keeps included."""
    return int(scheduler.max_total_num_tokens - scheduler.token_to_kv_pool_allocator.available_size())
