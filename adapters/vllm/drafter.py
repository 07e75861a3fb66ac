"""The object that vLLM's ``custom_class`` method makes: one a worker, around one proposer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spec_plugins.adapters.vllm.engine_faults import mend
from spec_plugins.adapters.vllm.plugin import install, salts_are_carried
from spec_plugins.adapters.vllm.row_identity import RowIdentity
from spec_plugins.adapters.vllm.runner_state import RunnerState
from spec_plugins.adapters.vllm.snapshots import SnapshotWriter
from spec_plugins.adapters.vllm.target_model import describe
from spec_plugins.config import Config, load_config, read_config
from spec_plugins.driver import Driver
from spec_plugins.errors import ConfigError
from spec_plugins.proposer import Drafts, IntArray, Need
from spec_plugins.registry import registry

if TYPE_CHECKING:
    import torch

__all__ = ["ADDITIONAL_CONFIG", "Drafter", "configuration", "drafter_class"]

logger = logging.getLogger("spec_plugins")

ADDITIONAL_CONFIG = "spec_plugins"
"""Our key in vLLM's ``additional_config``."""


@functools.cache
def drafter_class(name: str) -> type[Drafter]:
    """The drafter of a registered proposer; raises :class:`UnknownProposerError`."""
    registry().find(name)
    return type(f"Drafter[{name}]", (Drafter,), {"proposer_name": name})


def configuration(vllm_config: Any, name: str) -> Config:
    """The project's configuration, out of vLLM's.

    Raises:
        ConfigError: something in it cannot be used, or it says something else than vLLM's own flags.
    """
    additional = vllm_config.additional_config
    given = additional.get(ADDITIONAL_CONFIG) if isinstance(additional, Mapping) else None
    if given is not None and not isinstance(given, (str, Mapping)):
        raise ConfigError(
            f"additional_config.{ADDITIONAL_CONFIG}: {given!r} cannot be used; give a mapping of fields or "
            "the path of a file"
        )
    said = {
        "proposer": name,
        "num_speculative_tokens": vllm_config.speculative_config.num_speculative_tokens,
    }
    data = read_config(given)
    for field, value in said.items():
        if data.get(field, value) != value:
            raise ConfigError(
                f"{field}: {data[field]!r} in additional_config.{ADDITIONAL_CONFIG}, but {value!r} in "
                "speculative_config; leave it out there, or make them equal"
            )
    config = load_config({**data, **said})
    if config.route == "native":
        raise ConfigError(
            "route: 'native' is vLLM's own implementation, yet its flags start this project's; set 'plugin' "
            "or 'auto', or take the flags that `spec-plugins args vllm` prints"
        )
    return config


class Drafter:
    """Drafts for one worker. vLLM makes it, loads it, and calls it once a step.

    Where the model runner's methods are as the hook table says, it sees all of a request; otherwise tokens
    alone, which is what ``custom_class`` gives by itself. Nothing here raises into a running engine.
    """

    proposer_name: ClassVar[str]

    def __init__(self, vllm_config: Any) -> None:
        """
        Args:
            vllm_config: a ``vllm.config.VllmConfig``.

        Raises:
            SpecPluginsError: the configuration or the proposer cannot be used; vLLM's start-up ends with it.
        """
        self.vllm_config = vllm_config
        self.config = configuration(vllm_config, self.proposer_name)
        self.proposer = self.config.create_proposer()
        self.hooks = install()
        self.driver: Driver | None = None
        self.state: RunnerState | None = None
        self._identity = RowIdentity()
        self._running: set[str] = set()
        self._snapshots: SnapshotWriter | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the proposer for a target model.

        Raises:
            SpecPluginsError: the proposer cannot serve this target, or this vLLM.
        """
        mend(str(self.vllm_config.device_config.device))
        parallel = self.vllm_config.parallel_config
        if parallel.tensor_parallel_size > 1 and _tensor_parallel_rank() != 0:
            return  # the first rank's drafts are the ones that are scheduled, on all ranks
        target = describe(self.vllm_config, self.config, self.proposer, target_model, self.hooks)
        self.driver = Driver(self.proposer, target, self.config)
        if self.hooks.propose:
            self.state = RunnerState(
                self.driver, share_tenants=self.hooks.update_states and salts_are_carried()
            )
        self._snapshots = SnapshotWriter(self.vllm_config, self.proposer_name)
        self._snapshots.write(self.driver, now=True)
        logger.info(
            "proposer %r drafts up to %d tokens; it sees %s",
            self.proposer_name,
            self.config.num_speculative_tokens,
            "requests" if self.state else "tokens only, since this vLLM's model runner is not as expected",
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states the proposer takes; empty where it takes none."""
        if self.driver is None:
            return ()
        takes = self.driver.proposer.needs | self.driver.proposer.uses
        wanted = takes & self.driver.target.provides
        if Need.AUX_HIDDEN_STATES not in wanted:
            return ()
        return self.driver.proposer.aux_layers(self.driver.target.num_layers or 0)

    def begin_step(self, scheduler_output: Any) -> None:
        """The engine's requests changed; called before each forward pass, and when the last is over."""
        if self.driver is None or self.state is None:
            return
        try:
            self.state.update(scheduler_output)
            if not scheduler_output.total_num_scheduled_tokens:
                self._when_idle(self.driver)
        except Exception:
            self._log_own_fault()

    def propose_for(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
    ) -> list[list[int]]:
        """Drafts for the batch of a ``GPUModelRunner``, ``[]`` for a request that gets none."""
        if self.driver is None or self.state is None:
            return [[] for _ in sampled_token_ids]
        try:
            drafts = self.state.propose(
                runner, scheduler_output, sampled_token_ids, hidden_states, aux_hidden_states
            )
            if self._snapshots is not None:
                self._snapshots.write(self.driver)
            return _as_lists(drafts)
        except Exception:
            self._log_own_fault()
            return [[] for _ in sampled_token_ids]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: IntArray,
        token_ids_cpu: IntArray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's ``custom_class`` hook by itself: used where the model runner is not as expected.

        Args:
            sampled_token_ids: by row; empty where its prompt is not finished.
            num_tokens_no_spec: ``[rows]``: tokens of each row.
            token_ids_cpu: ``[rows, max_model_len]``.
        """
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.driver is None:
            return none
        try:
            return self._propose_by_rows(
                self.driver, none, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
            )
        except Exception:
            self._log_own_fault()
            return none

    def statistics(self, request_id: str | None = None) -> dict[str, Any] | None:
        """The driver's figures, or one request's; ``None`` where this rank does not draft."""
        if self.driver is None:
            return None
        if request_id is None:
            return {
                **self.driver.statistics.snapshot(),
                "requests_held": self.driver.requests_held,
                "state": self.driver.gauges(),
            }
        # vLLM appends a suffix of its own to the id that a client gave.
        kept = {**self.driver.statistics.finished, **self.driver.statistics.running}
        found = [kept[key] for key in kept if key == request_id or key.startswith(f"{request_id}-")]
        return {
            "verify_steps": sum(f.verify_steps for f in found),
            "drafts": sum(f.drafts for f in found),
            "draft_tokens": sum(f.draft_tokens for f in found),
            "accepted_tokens": sum(f.accepted_tokens for f in found),
        }

    def _propose_by_rows(
        self,
        driver: Driver,
        none: list[list[int]],
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens: IntArray,
        token_ids: IntArray,
    ) -> list[list[int]]:
        rows = np.array([i for i, s in enumerate(sampled_token_ids) if len(s)], np.int32)
        lengths = num_tokens[rows].astype(np.int32)
        new = np.array([len(sampled_token_ids[i]) for i in rows], np.int32)
        ids = self._identity.names(rows, lengths - new, lengths, token_ids)
        # One that was not there before has had its prompt processed, and decoded nothing yet.
        running = np.array([name in self._running for name in ids], bool)
        self._running = set(ids)
        driver.observe(ids, np.where(running, new - 1, -1).astype(np.int32))
        room = np.maximum(self.vllm_config.model_config.max_model_len - 1 - lengths, 0)
        drafts = driver.propose(ids, token_ids, rows, lengths, limits=room.astype(np.int32), tenants=ids)
        for row, draft in zip(rows.tolist(), _as_lists(drafts), strict=True):
            none[row] = draft
        if self._snapshots is not None:
            self._snapshots.write(driver)
        return none

    def _when_idle(self, driver: Driver) -> None:
        """Let the proposer forget what is over now, since the next step may be far."""
        empty = np.empty(0, np.int32)
        driver.propose([], np.empty((0, 0), np.int32), empty, empty)
        if self._snapshots is not None:
            self._snapshots.write(driver, now=True)

    def _log_own_fault(self) -> None:
        if not getattr(self, "_logged", False):
            self._logged = True
            logger.exception("the vLLM adapter failed; vLLM goes on without drafts (logged once)")


def _as_lists(drafts: Drafts) -> list[list[int]]:
    return [row[:count] for row, count in zip(drafts.tokens.tolist(), drafts.counts.tolist(), strict=True)]


def _tensor_parallel_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
