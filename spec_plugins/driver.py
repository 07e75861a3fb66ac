"""The one runtime that every adapter uses.

An adapter turns its engine's state into the arguments of :meth:`Driver.propose` and the drafts into
the engine's form, and reports what was accepted to :meth:`Driver.observe`. Everything else is here:
which requests began and ended, budgets, checking, containment and statistics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_plugins.config import Config
from spec_plugins.containment import CircuitBreaker, Guard, InlineGuard, LateError, ThreadGuard
from spec_plugins.errors import UnsupportedError
from spec_plugins.policy import FixedLength, Outcome, Policy
from spec_plugins.proposer import Draft, Drafts, IntArray, Need, Packed, Proposer, Sampling, Step, Target
from spec_plugins.statistics import SourceStatistics, Statistics
from spec_plugins.trees import node_depths
from spec_plugins.validation import Fault, check_drafts

if TYPE_CHECKING:
    import torch

__all__ = ["Driver"]

logger = logging.getLogger("spec_plugins")
# A warning of each kind at most this often; the counters have them all.
SECONDS_BETWEEN_WARNINGS = 30.0


class Driver:
    """Runs one proposer for one engine worker. Not thread-safe: call it from the engine's thread.

    Nothing that the proposer does reaches the engine: a fault costs the drafts it concerns, is counted
    and logged, and a proposer that keeps failing rests and is tried again (:class:`Containment`). After
    an exception or a late answer the proposer is told to forget every request, since its state may be
    wrong, and sees each as new. Overhead: about 20 µs a step and 1 µs a request.
    """

    def __init__(
        self,
        proposer: Proposer,
        target: Target,
        config: Config | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load the proposer.

        Raises:
            UnsupportedError: the host does not give what the proposer needs.
            Exception: whatever :meth:`Proposer.load` raises: a proposer that cannot start is the
                user's to hear of at start-up.
        """
        config = config or Config()
        missing = proposer.needs - target.provides
        if missing:
            raise UnsupportedError(
                f"proposer {proposer.name!r} needs {', '.join(sorted(n.value for n in missing))}, which this "
                "engine does not give it; `spec-plugins explain` names what works"
            )
        self.proposer, self.target, self.config, self.clock = proposer, target, config, clock
        self.policy = policy or FixedLength(config.num_speculative_tokens, config.max_draft_nodes)
        contained = config.containment
        self.breaker = CircuitBreaker(
            contained.max_faults, contained.rest_seconds, contained.longest_rest_seconds, clock
        )
        self._allowance = contained.time_allowance_ms / 1e3
        proposer.load(target)
        self._guard: Guard = (
            InlineGuard() if proposer.bounded else ThreadGuard(self._allowance, proposer.name or "proposer")
        )
        self.statistics = Statistics(target.num_speculative_tokens)
        self._sources = tuple(proposer.sources)
        self._seen: dict[str, int] = {}
        """How many tokens the proposer has seen of each request that it holds state for."""
        self._stale: set[str] = set()
        """Requests that it must forget at its next call: they ended, or a fault came between."""
        self._prompts: dict[str, int] = {}
        """Prompt lengths of running requests."""
        self._pending: dict[str, tuple[int, Drafts, IntArray]] = {}
        """Row, batch and depths of each draft whose verification was not reported yet."""
        self._verified: dict[str, Draft] = {}
        self._propose_seconds = 0.0
        self._warned: dict[str, tuple[float, int]] = {}

    def propose(
        self,
        request_ids: Sequence[str],
        token_ids: IntArray,
        rows: IntArray,
        lengths: IntArray,
        *,
        limits: IntArray | None = None,
        prompt_lengths: IntArray | None = None,
        tenants: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        predictions: Packed[IntArray] | None = None,
        hidden_states: Packed[torch.Tensor] | None = None,
        aux_hidden_states: Packed[torch.Tensor] | None = None,
    ) -> Drafts:
        """Drafts for the running requests; never raises over anything that the proposer does.

        Args:
            request_ids: every running request, ``n`` of them; one that is no longer named is over.
            token_ids: ``[rows, capacity]`` int32, read only, not copied.
            rows: ``[n]``: each request's row.
            lengths: ``[n]``: its committed tokens.
            limits: ``[n]``: the deepest position the engine can take now; 0 for none. ``None``: no limit.
            prompt_lengths: ``[n]``; ``None``: what a request had when it was first seen.
            tenants, sampling, predictions, hidden_states, aux_hidden_states: see :class:`Step`.

        Returns:
            Checked drafts within budgets, in the order of ``request_ids``.
        """
        n = len(request_ids)
        limit = np.full(n, self.target.num_speculative_tokens, np.int32) if limits is None else limits
        nodes, depths = self.policy.budgets(request_ids, limit)
        depths = np.clip(depths, 0, np.minimum(limit, self.target.num_speculative_tokens)).astype(np.int32)
        nodes = np.where(depths > 0, np.clip(nodes, 0, self.target.max_draft_nodes), 0).astype(np.int32)
        if Need.TREES not in self.target.provides:
            nodes = np.minimum(nodes, depths)
        prompts = self._begin(request_ids, lengths, prompt_lengths)

        if not self._guard.free or self.breaker.resting:
            self.statistics.skipped_steps += n > 0
            return self._hand_out(request_ids, Drafts.empty(n))
        seen, stale = self._seen, self._stale
        stale.update(r for r in seen if r not in self._prompts)
        stale.update(r for r, m in zip(request_ids, lengths.tolist(), strict=True) if seen.get(r, 0) > m)
        for r in stale:
            seen.pop(r, None)
        fresh = lengths - np.array([seen.get(r, 0) for r in request_ids], np.int32)
        verified = [self._verified.get(r) for r in request_ids] if predictions is not None else None
        step = Step(
            request_ids, _read_only(token_ids), rows, lengths, fresh.astype(np.int32), nodes, depths, prompts,
            tenants, sampling, verified, predictions, hidden_states, aux_hidden_states,
        )  # fmt: skip
        return self._hand_out(request_ids, self._ask(step))

    def observe(
        self,
        request_ids: Sequence[str],
        accepted: IntArray,
        paths: IntArray | None = None,
        *,
        step_seconds: float | None = None,
    ) -> None:
        """Report a verified step, before the next :meth:`propose`.

        Args:
            request_ids: the requests that were in the forward pass, finishing ones included.
            accepted: ``[n]`` int32: draft tokens accepted; -1 where nothing was decoded (prefill).
            paths: ``[n, depth]`` int32: the accepted nodes, needed for trees. ``None``: chains.
            step_seconds: how long the engine's whole step took.
        """
        depths, nodes = np.zeros(len(request_ids), np.int32), np.zeros(len(request_ids), np.int32)
        self._verified.clear()
        for i, request_id in enumerate(request_ids):
            pending = self._pending.pop(request_id, None)
            if pending is None or accepted[i] < 0:
                continue
            row, drafts, deepest = pending
            draft = self._verified[request_id] = drafts[row]
            nodes[i], depths[i] = len(draft), deepest[row]
            if len(draft):
                path = np.arange(accepted[i]) if paths is None else paths[i, : accepted[i]]
                self._count_sources(draft, path)
        self.statistics.count(request_ids, depths, nodes, accepted)
        self.policy.observe(
            Outcome(request_ids, depths, accepted, nodes, step_seconds, self._propose_seconds)
        )

    def _begin(
        self, request_ids: Sequence[str], lengths: IntArray, prompt_lengths: IntArray | None
    ) -> IntArray:
        """Bring the set of running requests up to date; returns their prompt lengths."""
        running = self._prompts
        if prompt_lengths is not None:
            self._prompts = dict(zip(request_ids, prompt_lengths.tolist(), strict=True))
        else:
            self._prompts = {
                r: min(running.get(r, length), length)
                for r, length in zip(request_ids, lengths.tolist(), strict=True)
            }
        for r in running.keys() - self._prompts.keys():
            self._pending.pop(r, None)
            self._verified.pop(r, None)
            self.statistics.finish(r)
            self.policy.finish(r)
        return np.fromiter(self._prompts.values(), np.int32, len(self._prompts))

    def _ask(self, step: Step) -> Drafts:
        """Call the proposer, contain what it does, check what it says."""
        if not len(step) and not self._stale:
            return Drafts.empty(0)
        started = self.clock()
        stale, self._stale = self._stale, set()
        try:
            answer = self._guard.call(lambda: self._finish_and_propose(step, stale))
        except LateError as error:
            self._forget(step, stale)
            self._fault(Fault.LATE, f"was late: {error}")
            return Drafts.empty(len(step))
        except Exception as error:
            self._forget(step, stale)
            self._fault(Fault.RAISED, f"raised {type(error).__name__}: {error}", error)
            return Drafts.empty(len(step))
        drafts, faults = check_drafts(
            answer,
            step,
            self.target.vocab_size,
            trees=Need.TREES in self.target.provides,
            probabilities=Need.PROBABILITIES in self.target.provides,
        )
        self._propose_seconds = seconds = self.clock() - started
        self.statistics.steps += 1
        self.statistics.propose_seconds += seconds
        self.statistics.recent_propose_seconds.append(seconds)
        self._seen = dict(zip(step.request_ids, step.lengths.tolist(), strict=True))
        for _, fault in faults:
            self.statistics.faults[fault] += 1
        bad = [f for f in faults if f[1] is not Fault.OVER_BUDGET]
        if bad:
            self._warn(bad[0][1].value, f"gave a bad draft ({bad[0][1].value}); it was not used")
        if seconds > self._allowance:
            # Inline, nothing could stop it; its drafts are paid for, so they are used.
            self._fault(Fault.LATE, f"took {seconds * 1e3:.0f} ms")
        elif bad and not drafts.counts.any():
            self._rest_if_due()
        else:
            self.breaker.succeed()
        return drafts

    def _finish_and_propose(self, step: Step, stale: set[str]) -> Sequence[Draft]:
        for request_id in stale:
            try:
                self.proposer.finish(request_id)
            except Exception as error:
                self.statistics.faults[Fault.FINISH_RAISED] += 1
                self._warn(Fault.FINISH_RAISED.value, f"raised {type(error).__name__} in finish: {error}")
        return self.proposer.propose(step) if len(step) else []

    def _forget(self, step: Step, stale: set[str]) -> None:
        """Have the proposer forget everything it may know: its state can be anything now."""
        self._stale = stale | self._seen.keys() | set(step.request_ids)
        self._seen = {}

    def _fault(self, fault: Fault, what: str, error: Exception | None = None) -> None:
        self.statistics.faults[fault] += 1
        self._warn(fault.value, what, error)
        self._rest_if_due()

    def _rest_if_due(self) -> None:
        rest = self.breaker.fail()
        if rest is not None:
            self.statistics.rests += 1
            self._warn("rest", f"failed {self.breaker.max_faults} times in a row and rests for {rest:g} s")

    def _hand_out(self, request_ids: Sequence[str], drafts: Drafts) -> Drafts:
        deepest = drafts.counts
        if drafts.parents is not None:
            deepest = node_depths(drafts.parents, drafts.counts).max(1, initial=0)
        for i, request_id in enumerate(request_ids):
            self._pending[request_id] = (i, drafts, deepest)
        return drafts

    def _count_sources(self, draft: Draft, path: Any) -> None:
        if draft.sources is None:
            drafted, accepted = [len(draft)], [len(path)]
        else:
            drafted = np.bincount(draft.sources).tolist()
            accepted = np.bincount(draft.sources[path], minlength=len(drafted)).tolist()
        for k, count in enumerate(drafted):
            if count:
                name = self._sources[k] if k < len(self._sources) else f"source {k}"
                figures = self.statistics.by_source.setdefault(name, SourceStatistics())
                figures.draft_tokens += count
                figures.accepted_tokens += accepted[k]

    def _warn(self, kind: str, what: str, error: Exception | None = None) -> None:
        """Log, at most one of a kind in a while."""
        now = self.clock()
        last, held_back = self._warned.get(kind, (-SECONDS_BETWEEN_WARNINGS, 0))
        if now - last < SECONDS_BETWEEN_WARNINGS:
            self._warned[kind] = (last, held_back + 1)
            return
        self._warned[kind] = (now, 0)
        more = f" ({held_back} more like this since the last warning)" if held_back else ""
        logger.warning("proposer %r %s%s", self.proposer.name, what, more, exc_info=error)


def _read_only(array: IntArray) -> IntArray:
    view: IntArray = array.view()
    view.flags.writeable = False
    return view
