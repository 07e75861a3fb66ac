"""The one runtime that every adapter uses.

An adapter turns its engine's state into the arguments of :meth:`Driver.propose` and the drafts into
the engine's form, and reports what was accepted to :meth:`Driver.observe`. Everything else is here:
which requests began and ended, budgets, checking, containment and statistics.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.config import Config
from spec_plugins.containment import CircuitBreaker, Guard, InlineGuard, LateError, RaisedError, ThreadGuard
from spec_plugins.errors import UnsupportedError
from spec_plugins.policy import FixedLength, Outcome, Policy
from spec_plugins.proposer import Draft, Drafts, IntArray, Need, Packed, Proposer, Sampling, Step, Target
from spec_plugins.statistics import Statistics
from spec_plugins.trees import node_depths
from spec_plugins.validation import Fault, check_drafts

if TYPE_CHECKING:
    import torch

__all__ = ["Driver"]

ArrayT = TypeVar("ArrayT", bound=npt.NDArray[Any])

logger = logging.getLogger("spec_plugins")
# A warning of each kind at most this often; the counters have them all.
SECONDS_BETWEEN_WARNINGS = 30.0


class Driver:
    """Runs one proposer for one engine worker. Not thread-safe: call it from the engine's thread.

    Nothing that the proposer does reaches the engine: a fault costs the drafts it concerns, is counted
    and logged, and a proposer that keeps failing rests and is tried again (:class:`Containment`). After
    an exception or a late answer the proposer is told to forget every request, since its state may be
    wrong, and sees each as new. Overhead: about 35 µs a step and 0.1 µs a request, or 0.4 µs where the
    requests are not those of the step before.
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
        self._trees, self._probabilities, self._predictions = (
            need in target.provides for need in (Need.TREES, Need.PROBABILITIES, Need.PREDICTIONS)
        )
        self.policy = policy or FixedLength(config.num_speculative_tokens, config.draft_nodes(proposer))
        self._policy_learns = type(self.policy).observe is not Policy.observe
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
        self._sources = (*proposer.sources, "unknown")
        self._ids: tuple[str, ...] = ()
        """The last step's requests, until one of them ends."""
        self._places: dict[str, int] = {}
        """Where running requests stand in the arrays below: the last step's in its order, then others that
        are alive."""
        self._prompts = np.array([_LONGEST], np.int32)
        """Prompt length of each, and at the end what stands for a new one: all that it has."""
        self._seen = np.array([-1], np.int32)
        """How many tokens of each the proposer has seen, -1 where it holds no state; and a -1 at the end."""
        self._stale: set[str] = set()
        """Requests that it must forget at its next call: they ended, or a fault came between."""
        self._strangers: set[str] = set()
        """Requests observed that never were proposed for; they run next or are over."""
        self._handed = Drafts.empty(0)
        """What was last handed out, by place."""
        self._nodes = self._depths = np.zeros(1, np.int32)
        """Nodes and depth of each row of it, and a 0 at the end, for index -1."""
        self._pending = np.zeros(1, np.bool_)
        """Whether its verification was not reported yet, by place, and a False at the end."""
        self._verified: dict[str, int] = {}
        """Rows of drafts that the last report was about; kept for hosts that give predictions."""
        self._propose_seconds = 0.0
        self._warned: dict[str, tuple[float, int]] = {}
        _compile()

    def propose(
        self,
        request_ids: Sequence[str],
        token_ids: IntArray,
        rows: IntArray,
        lengths: IntArray,
        *,
        alive: Collection[str] = (),
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
            request_ids: the requests of this step, ``n`` of them; one that is no longer named is over,
                unless it is ``alive``.
            token_ids: ``[rows, capacity]`` int32, read only, not copied.
            rows: ``[n]``: each request's row.
            lengths: ``[n]``: its committed tokens.
            alive: requests that are not over though they may be in no step: those waiting or preempted.
                Their state is kept until :meth:`finish`.
            limits: ``[n]``: the deepest position the engine can take now; 0 for none. ``None``: no limit.
            prompt_lengths: ``[n]``; ``None``: what a request had when it was first seen.
            tenants, sampling, predictions, hidden_states, aux_hidden_states: see :class:`Step`.

        Returns:
            Checked drafts within budgets, in the order of ``request_ids``.
        """
        ids, n, target = tuple(request_ids), len(request_ids), self.target
        self._begin(ids, alive)
        self._prompts[:n] = (
            np.minimum(self._prompts[:n], lengths) if prompt_lengths is None else prompt_lengths
        )
        plan = np.empty((7, n), np.int32)
        plan[_ROWS], plan[_LENGTHS], plan[_PROMPTS] = rows, lengths, self._prompts[:n]
        plan[_SEEN] = np.maximum(self._seen[:n], 0)
        plan[_LIMITS] = target.num_speculative_tokens if limits is None else limits
        plan[_BUDGETS], plan[_DEPTHS] = self.policy.budgets(ids, plan[_LIMITS])
        shorter, asked = _clamp(plan, target.num_speculative_tokens, target.max_draft_nodes, self._trees)
        if shorter:  # tokens were taken back: what the proposer saw may be wrong
            for i in np.flatnonzero(plan[_FRESH] < 0).tolist():
                self._seen[i] = -1
                self._stale.add(ids[i])
                plan[_FRESH, i] = plan[_LENGTHS, i]

        if n:
            self.statistics.budget = asked / n
        self._propose_seconds = 0.0
        if not self._guard.free or self.breaker.resting:
            self.statistics.skipped_steps += n > 0
            return self._hand_out(Drafts.empty(n))
        if not n and not self._stale:
            return self._hand_out(Drafts.empty(0))
        plan.setflags(write=False)
        step = Step(
            ids, _read_only(token_ids), plan[_ROWS], plan[_LENGTHS], plan[_FRESH],
            plan[_BUDGETS], plan[_DEPTHS], plan[_PROMPTS], None if tenants is None else tuple(tenants),
            None if sampling is None else _read_only_sampling(sampling),
            None if predictions is None else [self._verified_draft(r) for r in ids],
            None if predictions is None else Packed(
                _read_only(predictions.values), _read_only(predictions.offsets)
            ),
            hidden_states, aux_hidden_states,
        )  # fmt: skip
        return self._hand_out(self._ask(step, asked))

    def observe(
        self,
        request_ids: Sequence[str],
        accepted: IntArray,
        paths: IntArray | None = None,
        *,
        verified: IntArray | None = None,
        step_seconds: float | None = None,
    ) -> None:
        """Report a verified step, before the next :meth:`propose`.

        Args:
            request_ids: the requests that were in the forward pass, finishing ones included.
            accepted: ``[n]`` int32: draft tokens accepted; -1 where nothing was decoded (prefill).
            paths: ``[n, depth]`` int32: the accepted nodes, needed for trees. ``None``: chains.
            verified: ``[n]`` int32, where the engine may have cut chains (a grammar, a full batch): how many
                draft tokens of each were verified. ``None``: all that were handed out.
            step_seconds: how long the engine's whole step took.
        """
        rows = self._reported(request_ids)
        rows[accepted < 0] = -1
        drafted = self._nodes[rows]
        if verified is not None:
            drafted = np.minimum(drafted, verified, dtype=np.int32)
        deepest = np.minimum(self._depths[rows], drafted)
        if self._predictions:
            self._verified = {r: row for r, row in zip(request_ids, rows.tolist(), strict=True) if row >= 0}
        sums = self.statistics.count(request_ids, deepest, drafted, accepted)
        if self._handed.sources is None:
            self.statistics.count_source(self._sources[0], *sums)
        else:
            self._count_sources(self._handed.sources, rows, drafted, accepted, paths)
        if self._policy_learns:
            self.policy.observe(
                Outcome(request_ids, deepest, accepted, drafted, step_seconds, self._propose_seconds)
            )

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests are over, though a new one may bear the name: for engines that say so."""
        for r in request_ids:
            self._strangers.discard(r)
            self._end(r)

    @property
    def requests_held(self) -> int:
        """How many requests the proposer holds state for, those that it is yet to forget included."""
        return len(self._held() | self._stale)

    def gauges(self) -> dict[str, float]:
        """What the proposer says of the state that it holds (:meth:`Proposer.gauges`); empty where it
        cannot say. Takes a call of the proposer: not for every step."""
        if not self._guard.free or self.breaker.resting:
            return {}
        try:
            found = self._guard.call(self._gauges)
        except (LateError, RaisedError):
            return {}
        return found

    def _gauges(self) -> dict[str, float]:
        return {str(name): float(value) for name, value in self.proposer.gauges().items()}

    def _begin(self, ids: tuple[str, ...], alive: Collection[str]) -> None:
        """Bring the running requests up to date; most steps have those of the step before."""
        before = self._places
        if ids == self._ids and len(ids) == len(before) and not self._strangers:
            return
        now = dict(zip(ids, range(len(ids)), strict=True))
        gone = (before.keys() | self._strangers) - now.keys()
        self._strangers.clear()
        for r in gone:
            if r not in alive:
                self._end(r)
            elif r in before:
                now[r] = len(now)
        kept = np.array([*(before.get(r, -1) for r in now), -1])
        self._prompts, self._seen = self._prompts[kept], self._seen[kept]
        self._ids, self._places = ids, now

    def _end(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._ids = ()
            if self._seen[place] >= 0:
                self._stale.add(request_id)
        self.statistics.finish(request_id)
        self.policy.finish(request_id)

    def _held(self) -> set[str]:
        """The running requests that the proposer holds state for."""
        return {r for r, place in self._places.items() if self._seen[place] >= 0}

    def _reported(self, request_ids: Sequence[str]) -> npt.NDArray[np.intp]:
        """Rows of the drafts that requests report of, each once; -1 for none."""
        if tuple(request_ids) == self._ids:
            rows = np.arange(len(request_ids))
        else:
            rows = np.array([self._places.get(r, -1) for r in request_ids], np.intp)
            self._strangers.update(compress(request_ids, rows < 0))
        pending = self._pending[rows]
        self._pending[rows] = False
        rows[~pending] = -1
        return rows

    def _count_sources(
        self,
        sources: IntArray,
        rows: npt.NDArray[np.intp],
        drafted: IntArray,
        accepted: IntArray,
        paths: IntArray | None,
    ) -> None:
        if paths is None:
            paths = np.tile(np.arange(sources.shape[1]), (len(rows), 1))
        offered, kept = _count_sources(
            sources,
            np.array(drafted, np.int32),
            np.array(rows, np.int32),
            np.array(accepted, np.int32),
            np.array(paths, np.int32, order="C"),  # a copy, since numba compiles anew for other layouts
            len(self._sources),
        ).tolist()
        for name, d, k in zip(self._sources, offered, kept, strict=True):
            self.statistics.count_source(name, d, k)

    def _verified_draft(self, request_id: str) -> Draft | None:
        row = self._verified.get(request_id)
        if row is None:
            return None
        d = self._handed[row]
        return Draft(
            _read_only(d.tokens),
            None if d.parents is None else _read_only(d.parents),
            d.probs,
            None if d.sources is None else _read_only(d.sources),
        )

    def _ask(self, step: Step, asked: int) -> Drafts:
        """Call the proposer, contain what it does, check what it says."""
        n = len(step)
        stale, self._stale = self._stale, set()
        troubles: list[BaseException] = []
        failure: tuple[Fault, str, BaseException | None] | None = None
        started = self.clock()
        try:
            drafts, faults = self._guard.call(functools.partial(self._call, step, stale, troubles))
        except LateError as late:
            failure = Fault.LATE, f"was late: {late}", None
        except RaisedError as raised:
            failure = Fault.RAISED, f"raised {_words(raised.__cause__)}", raised.__cause__
        except BaseException:  # a signal, meant for the engine
            self._forget(step, stale)
            raise
        seconds = self.clock() - started
        if n:
            self._propose_seconds = seconds
            self.statistics.steps += 1
            self.statistics.propose_seconds += seconds
            self.statistics.recent_propose_seconds.append(seconds)
        for trouble in troubles:
            self.statistics.faults[Fault.FINISH_RAISED] += 1
            self._warn(Fault.FINISH_RAISED.value, f"raised {_words(trouble)} in finish", trouble)
        if failure is not None:
            self._forget(step, stale)
            self._fault(*failure)
            return Drafts.empty(n)

        self._seen[:n] = step.lengths
        for _, fault in faults:
            self.statistics.faults[fault] += 1
        bad = [fault for _, fault in faults if fault is not Fault.OVER_BUDGET]
        if bad:
            self._warn(bad[0].value, f"gave a bad draft ({bad[0].value}); it was not used")
        if seconds > self._allowance:
            # Inline, nothing could stop it; its drafts are paid for, so they are used.
            self._fault(Fault.LATE, f"took {seconds * 1e3:.0f} ms")
        elif bad and not drafts.counts.any():
            self._rest_if_due()
        elif asked:  # where nothing was, nothing is learned
            self.breaker.succeed()
        return drafts

    def _call(
        self, step: Step, stale: set[str], troubles: list[BaseException]
    ) -> tuple[Drafts, list[tuple[int, Fault]]]:
        """All that runs the proposer's code, which an answer may hold too."""
        for request_id in stale:
            try:
                self.proposer.finish(request_id)
            except BaseException as error:
                if not self._guard.contains(error):
                    raise
                troubles.append(error)
        if not len(step):
            return Drafts.empty(0), []
        return check_drafts(
            self.proposer.propose(step),
            step,
            self.target.vocab_size,
            trees=self._trees,
            probabilities=self._probabilities,
        )

    def _forget(self, step: Step, stale: set[str]) -> None:
        """Have the proposer forget every request: its state can be anything now."""
        self._stale = stale | set(step.request_ids) | self._held()
        self._seen[:] = -1

    def _fault(self, fault: Fault, what: str, error: BaseException | None = None) -> None:
        self.statistics.faults[fault] += 1
        self._warn(fault.value, what, error)
        self._rest_if_due()

    def _rest_if_due(self) -> None:
        rest = self.breaker.fail()
        if rest is not None:
            self.statistics.rests += 1
            self._warn("rest", f"keeps failing and rests for {rest:g} s")

    def _hand_out(self, drafts: Drafts) -> Drafts:
        n = len(drafts)
        self._handed, self._verified = drafts, {}
        self._pending = np.zeros(len(self._places) + 1, np.bool_)
        self._pending[:n] = True
        self._nodes = self._depths = np.zeros(n + 1, np.int32)
        self._nodes[:n] = drafts.counts
        if drafts.parents is not None:
            self._depths = np.zeros(n + 1, np.int32)
            self._depths[:n] = node_depths(drafts.parents, drafts.counts).max(1, initial=0)
        return drafts

    def _warn(self, kind: str, what: str, error: BaseException | None = None) -> None:
        """Log, at most one of a kind in a while."""
        now = self.clock()
        last, held_back = self._warned.get(kind, (-math.inf, 0))
        if now - last < SECONDS_BETWEEN_WARNINGS:
            self._warned[kind] = (last, held_back + 1)
            return
        self._warned[kind] = (now, 0)
        more = f" ({held_back} more like this since the last warning)" if held_back else ""
        logger.warning("proposer %r %s%s", self.proposer.name, what, more, exc_info=error)


def _read_only(array: ArrayT) -> ArrayT:
    view: ArrayT = array.view()
    view.setflags(write=False)
    return view


def _read_only_sampling(s: Sampling) -> Sampling:
    return Sampling(_read_only(s.temperature), _read_only(s.top_k), _read_only(s.top_p), _read_only(s.min_p))


_LONGEST = 2**31 - 1
# A step in numbers: what each row of the plan holds of every request.
_BUDGETS, _DEPTHS, _FRESH, _PROMPTS, _LENGTHS, _ROWS, _LIMITS = range(7)
_SEEN = _FRESH  # before it is clamped


@numba.njit(cache=True)
def _clamp(plan: IntArray, most_depth: int, most_nodes: int, trees: bool) -> tuple[bool, int]:
    """Bring budgets within limits, and turn tokens seen into fresh ones, in place.

    Returns whether any request has fewer tokens than were seen, and how many draft tokens are asked for.
    """
    shorter, asked = False, 0
    for i in range(plan.shape[1]):
        depth = max(0, min(plan[_DEPTHS, i], plan[_LIMITS, i], most_depth))
        nodes = max(0, min(plan[_BUDGETS, i], most_nodes if trees else depth)) if depth else 0
        fresh = plan[_LENGTHS, i] - plan[_SEEN, i]
        plan[_DEPTHS, i], plan[_BUDGETS, i], plan[_FRESH, i] = depth, nodes, fresh
        shorter |= fresh < 0
        asked += nodes
    return shorter, asked


def _words(error: BaseException | None) -> str:
    """What went wrong, also where the exception cannot say it itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


@numba.njit(cache=True)
def _count_sources(
    sources: IntArray, counts: IntArray, rows: IntArray, accepted: IntArray, paths: IntArray, known: int
) -> npt.NDArray[np.int64]:
    """``[2, known]``: draft tokens and accepted ones by source, the last for those out of range.

    ``counts`` and ``rows`` hold one entry a request: how many of its nodes were verified, and its row.
    """
    figures = np.zeros((2, known), np.int64)
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            continue
        for j in range(counts[i]):
            k = sources[row, j]
            figures[0, k if 0 <= k < known else known - 1] += 1
        for a in range(min(accepted[i], paths.shape[1])):
            j = paths[i, a]
            if 0 <= j < counts[i]:
                k = sources[row, j]
                figures[1, k if 0 <= k < known else known - 1] += 1
    return figures


@functools.cache
def _compile() -> None:
    """Compile what steps run, or load it, so that no step pays for it and looks late."""
    one, tokens, parents = np.ones(1, np.int32), np.zeros((1, 1), np.int32), np.full((1, 1), -1, np.int32)
    plan = np.ones((7, 1), np.int32)
    _clamp(plan, 1, 1, True)
    Statistics(1).count(("",), one, one, one)
    _read = _read_only(plan)
    step = Step(("",), tokens, _read[0], _read[0], _read[0], _read[0], _read[0], _read[0])
    tree = Drafts(tokens, one, parents, None, tokens)
    for trees in (False, True):
        check_drafts(tree, step, 1, trees=trees, probabilities=False)
    _count_sources(tokens, one, one - 1, one, tokens, 1)
    node_depths(parents, one)
