"""Where the adapter meets vLLM: the entry point of its plug-ins, and the methods that it wraps.

Nothing is wrapped before a drafter of ours is made, but for the one that carries cache salts; each wrapper
passes everything through where the runner's drafter is not ours. A method that is not as the hook table
says is left alone, and said so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_plugins.adapters.vllm.hooks import AUX_HIDDEN_STATES, NEW_REQUEST, PROPOSE, UPDATE_STATES
from spec_plugins.adapters.vllm.snapshots import SERVER
from spec_plugins.hooks import fits, is_wrapped, wrap

__all__ = [
    "CACHE_SALT",
    "WRAPPERS",
    "Installed",
    "drafter_of",
    "install",
    "installed",
    "log_as_vllm_does",
    "register",
    "salts_are_carried",
]

logger = logging.getLogger("spec_plugins")

CACHE_SALT = "spec_plugins_cache_salt"
"""Attribute of vLLM's ``NewRequestData`` in which a request's cache salt travels to the worker."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Which methods are wrapped in this process."""

    propose: bool = False
    update_states: bool = False
    aux_hidden_states: bool = False


_installed: Installed | None = None
patching = True
"""False where the runner is a subclass of the worker's own (:mod:`spec_plugins.adapters.vllm.worker`)."""


def register() -> None:
    """The entry point in ``vllm.general_plugins``: called in every process, any number of times.

    Never raises.
    """
    try:
        log_as_vllm_does()
        os.environ.setdefault(SERVER, f"{os.getpid()}-{time.time_ns():x}")
        wrap(NEW_REQUEST, _carry_salt)
    except Exception:
        logger.exception("the vLLM plug-in could not register; vLLM starts without it")


def salts_are_carried() -> bool:
    """Whether :func:`register` was let run here, and so in the scheduler's process too."""
    return is_wrapped(NEW_REQUEST)


def install() -> Installed:
    """Wrap the model runner's methods, once a process; returns which fit."""
    global _installed  # noqa: PLW0603
    if _installed is None:
        if patching:
            _installed = Installed(
                wrap(PROPOSE, _propose), wrap(UPDATE_STATES, _update_states), wrap(AUX_HIDDEN_STATES, _aux)
            )
        else:
            _installed = Installed(*(fits(hook) for hook in (PROPOSE, UPDATE_STATES, AUX_HIDDEN_STATES)))
        try:
            _add_statistics()
        except Exception:
            logger.exception("collective_rpc('spec_plugins_statistics') is off")
    return _installed


def installed() -> Installed:
    """What :func:`install` did."""
    return _installed or Installed()


def drafter_of(runner: Any) -> Any:
    """A model runner's drafter where it is ours, else ``None``."""
    from spec_plugins.adapters.vllm.drafter import Drafter

    found = getattr(runner, "drafter", None)
    return found if isinstance(found, Drafter) else None


def _propose(original: Callable[..., Any]) -> Callable[..., Any]:
    def propose_draft_token_ids(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        drafter = drafter_of(self)
        if drafter is None or not isinstance(sampled_token_ids, list):
            return original(
                self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states,
                sample_hidden_states, aux_hidden_states, *args, **kwargs,
            )  # fmt: skip
        self._draft_probs = self._draft_prob_req_ids = None
        return drafter.propose_for(
            self, scheduler_output, sampled_token_ids, hidden_states, aux_hidden_states
        )

    return propose_draft_token_ids


def _update_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = drafter_of(self)
        if drafter is not None:
            drafter.begin_step(scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return _update_states


def _aux(original: Callable[..., Any]) -> Callable[..., Any]:
    def _setup_eagle3_aux_hidden_state_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = drafter_of(self)
        if drafter is None or not drafter.aux_layers:
            return original(self, *args, **kwargs)
        self.model.set_aux_hidden_state_layers(tuple(drafter.aux_layers))
        self.use_aux_hidden_state_outputs = True
        return None

    return _setup_eagle3_aux_hidden_state_outputs


WRAPPERS = {PROPOSE: _propose, UPDATE_STATES: _update_states, AUX_HIDDEN_STATES: _aux}


def _carry_salt(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        made = original.__get__(None, cls)(request, *args, **kwargs)
        salt = getattr(request, "cache_salt", None)
        if salt is not None:
            setattr(made, CACHE_SALT, salt)
        return made

    return from_request


def _add_statistics() -> None:
    """``llm.collective_rpc("spec_plugins_statistics")``: each worker's figures."""
    from vllm.v1.worker.worker_base import WorkerBase

    def spec_plugins_statistics(self: Any, request_id: str | None = None) -> dict[str, Any] | None:
        drafter = drafter_of(getattr(self, "model_runner", None))
        return None if drafter is None else drafter.statistics(request_id)

    WorkerBase.spec_plugins_statistics = spec_plugins_statistics


def log_as_vllm_does() -> None:
    """Show our log lines as vLLM shows its own, unless the user set them up; any number of times."""
    theirs = logging.getLogger("vllm")
    if logger.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        logger.addHandler(handler)
    logger.setLevel(theirs.level)
    logger.propagate = False
