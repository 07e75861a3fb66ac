"""The drafter and the resource manager that TensorRT-LLM's PyTorch backend takes: one pair a worker.

Both are made as subclasses of the installed engine's classes when they are asked for. Only their settings
travel to the worker; proposer, driver and state are made there, at the first step.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from spec_plugins.adapters.tensorrt_llm.hooks import BASE_DRAFTER, BASE_RESOURCE_MANAGER
from spec_plugins.adapters.tensorrt_llm.ranks import Ranks
from spec_plugins.adapters.tensorrt_llm.request_state import RequestState
from spec_plugins.adapters.tensorrt_llm.settings import Settings
from spec_plugins.driver import Driver
from spec_plugins.errors import UnavailableError, UnsupportedError
from spec_plugins.hooks import Hook, place

__all__ = ["Worker", "engine_part", "make_drafter", "make_resource_manager"]

logger = logging.getLogger("spec_plugins")
_NOTHING = "nothing can be drafted; TensorRT-LLM goes on without drafts"


def engine_part(hook: Hook) -> Any:
    """What a hook names in the installed engine.

    Raises:
        UnavailableError: there is no TensorRT-LLM here, or it has no such thing.
    """
    try:
        owner, name = place(hook)
        return getattr(owner, name)
    except Exception as error:  # its import may raise anything
        raise UnavailableError(
            f"{hook.path}, which {hook.purpose}, cannot be had ({type(error).__name__}: {error}): install "
            f"TensorRT-LLM {hook.versions.partition(',')[0]} beside spec-plugins; `spec-plugins doctor` "
            "says more"
        ) from error


class Worker:
    """What a drafter does in the engine's process. Nothing raises out of here, but a broken MPI."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state: RequestState | None = None
        self._ranks: Ranks | None = None
        self._misplaced = self._off = False
        self._logged = False

    def begin_step(self) -> None:
        """A step begins; who says so will also say which requests end."""
        state = self._ready()
        if state is not None:
            state.told_of_ends = True

    def draft(self, requests: Sequence[Any], most: int | None) -> list[list[int]]:
        """Drafts of a step, the same on all ranks; none where the adapter itself fails.

        Args:
            requests: those that decode.
            most: the longest draft that the engine takes now; ``None``: it does not say.
        """
        ranks = self._placed()
        if ranks is None:
            return [[] for _ in requests]
        own = self._own_drafts(requests, most) if ranks.drafts else None
        return ranks.share([r.py_request_id for r in requests], own)

    def _own_drafts(self, requests: Sequence[Any], most: int | None) -> list[list[int]]:
        """As :meth:`RequestState.propose`."""
        state = self._ready()
        if state is None:
            return [[] for _ in requests]
        try:
            longest = self.settings.config.num_speculative_tokens
            return state.propose(requests, longest if most is None else min(most, longest))
        except Exception:
            self._fail(state)
            return [[] for _ in requests]

    def end(self, request: Any) -> None:
        """A request is over, or was preempted."""
        if self.state is None:
            return
        try:
            self.state.end(request)
        except Exception:
            self._fail(self.state)

    def shut_down(self) -> None:
        """The executor ends; another may follow, with the same drafter."""
        if self.state is not None:
            try:
                self.state.forget()
            except Exception:
                self._fail(self.state)

    def _placed(self) -> Ranks | None:
        """This process among the ranks; ``None`` where they could not draft the same, on all of them."""
        if self._ranks is None and not self._misplaced:
            try:
                self._ranks = Ranks(self.settings.tensor_parallel_size, engine_part)
            except Exception:
                self._misplaced = True
                logger.exception(_NOTHING)
        return self._ranks

    def _ready(self) -> RequestState | None:
        """The state, made at the first call; ``None`` where nothing can be drafted in this process."""
        ranks = self._placed()
        if self.state is None and not self._off and ranks is not None and ranks.drafts:
            try:
                self.state = self._make()
            except Exception:
                self._off = True
                logger.exception(_NOTHING)
        return self.state

    def _make(self) -> RequestState:
        config = self.settings.config
        proposer = config.create_proposer()
        return RequestState(Driver(proposer, self.settings.target(proposer), config))

    def _fail(self, state: RequestState) -> None:
        if not self._logged:
            self._logged = True
            logger.exception(
                "the TensorRT-LLM adapter failed; TensorRT-LLM goes on without these drafts (logged once)"
            )
        try:
            state.forget()
        except Exception:
            self.state, self._off = None, True


def make_drafter(settings: str) -> Any:
    """A drafter, of a class that derives from the installed engine's ``Drafter``.

    Args:
        settings: :class:`Settings` as JSON. This is all that a pickle holds.

    Raises:
        UnavailableError: no such engine here.
        UnsupportedError: its ``Drafter`` cannot do what the settings ask for.
    """
    return _drafter_class(engine_part(BASE_DRAFTER))(settings)


def make_resource_manager(drafter: Any) -> Any:
    """A resource manager that tells a drafter of ours which requests are over."""
    return _manager_class(engine_part(BASE_RESOURCE_MANAGER))(drafter)


@functools.cache
def _drafter_class(base: Any) -> type[Any]:
    takes = inspect.signature(base.__init__).parameters

    class SpecPluginsDrafter(base):  # type: ignore[misc]
        """Drafts with a proposer of this project."""

        # Padding counts in what the engine takes back, so it must be reserved for.
        _needs_padding_kv_extension = True

        def __init__(self, settings: str) -> None:
            self.worker = Worker(Settings.from_json(settings))
            self._settings = settings
            most = self.worker.settings.config.num_speculative_tokens
            schedule = self.worker.settings.draft_len_schedule
            if schedule is not None and "draft_len_schedule" not in takes:
                raise UnsupportedError(
                    "draft_len_schedule: this TensorRT-LLM's drafters have none; leave it out, or use 1.1 or "
                    "newer"
                )
            sizes = dict.fromkeys(("max_draft_len", "max_total_draft_tokens", "max_draft_tokens"), most)
            asked = {"max_concurrency": self.worker.settings.max_concurrency, "draft_len_schedule": schedule}
            super().__init__(**{name: value for name, value in {**sizes, **asked}.items() if name in takes})
            # Where the constructor does not take them, the engine reads them all the same.
            self.max_draft_len = self.max_total_draft_tokens = most
            self._needs_padding_kv_extension = True

        def __reduce__(self) -> tuple[Any, ...]:
            return make_drafter, (self._settings,)

        def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
            requests = list(scheduled_requests.generation_requests)
            most = self.max_total_draft_tokens  # which the engine lowers, as its schedule says
            for request, draft in zip(requests, self.worker.draft(requests, most), strict=True):
                request.py_draft_tokens = draft

    return SpecPluginsDrafter


@functools.cache
def _manager_class(base: Any) -> type[Any]:
    class SpecPluginsRequests(base):  # type: ignore[misc]
        """Hears which requests are over. Holds nothing that a request would have to wait for."""

        def __init__(self, drafter: Any) -> None:
            self.drafter = drafter

        def __reduce__(self) -> tuple[Any, ...]:
            return make_resource_manager, (self.drafter,)

        def get_max_resource_count(self) -> int:
            return int(self.drafter.worker.settings.max_num_seqs)

        def get_needed_resource_to_completion(self, request: Any) -> int:
            return 0

        def prepare_resources(self, scheduled_batch: Any) -> None:
            self.drafter.worker.begin_step()

        def update_resources(self, scheduled_batch: Any) -> None:
            pass

        def free_resources(self, request: Any) -> None:
            self.drafter.worker.end(request)

        def shutdown(self) -> None:
            self.drafter.worker.shut_down()

    return SpecPluginsRequests
