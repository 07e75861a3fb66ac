"""Replay: run a proposer over recorded responses, and see how much of what it drafts was said.

The recorded text stands for the target: at every position the proposer sees what an engine would show it
there, drafts, and is compared with what came next. Nothing is served. It runs through the
:class:`~spec_plugins.driver.Driver`, as in an engine, many conversations to a step.

Greedy, or drafts that are not drawn: a draft token is accepted where it equals the recorded one. For a
response that was sampled from the target that is exact too, in distribution: verification accepts a
deterministic draft token with the probability that the target gives it, which is how often a sample is it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt

from spec_plugins.config import Config, Containment
from spec_plugins.driver import Driver
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.evaluation.recorded import Recorded
from spec_plugins.evaluation.replay_target import ReplayTarget, StatesInRows
from spec_plugins.evaluation.trace import Counts, Trace
from spec_plugins.proposer import Drafts, IntArray, Need, Sampling

__all__ = ["CONCURRENCY", "EVERYTHING", "KEPT_TOKENS", "Replayed", "replay"]

Longs = npt.NDArray[np.int64]

CONCURRENCY = 32
WIDE = 128
"""Conversations side by side where that matters to nothing but speed."""
EVERYTHING = frozenset(Need)
"""What the embedded engine provides, and with it the most that a replay can give."""
KEPT_TOKENS = 160
"""How far into a response drafts are kept, where they are to be shown."""
# Nobody waits: neither a slow step nor a fault may stop the proposer.
_PATIENT = Containment(time_allowance_ms=600_000, max_faults=1000)


@dataclass(slots=True, eq=False)
class Replayed:
    """What a replay found; :mod:`spec_plugins.evaluation.replay_report` puts it into words."""

    config: Config
    recorded: Recorded
    trace: Trace
    mode: Literal["positions", "steps"]
    """Whether every position was drafted for, or those where steps of this very configuration began."""
    sizes: tuple[int, ...]
    """Draft lengths, or sizes of a tree, that :meth:`counts` can tell of; the last is the configuration's."""
    trees: bool
    exact: str
    """How far it is what an engine counts, in words."""
    notes: tuple[str, ...]
    """What an engine may do otherwise, in words."""
    concurrency: int
    seconds: float
    """Time that the replay took, loading and compiling excluded."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """The driver's (:meth:`spec_plugins.statistics.Statistics.snapshot`). In mode ``steps`` they are what an
    engine's would be; otherwise only faults and times mean something."""

    def counts(self, size: int | None = None) -> Counts:
        """What an engine would have counted with drafts of so many tokens; ``None``: the configuration's.

        Raises:
            ConfigError: this replay cannot tell of that size.
        """
        size = self.sizes[-1] if size is None else size
        if size not in self.sizes:
            raise ConfigError(
                f"size: {size} is none of {', '.join(map(str, self.sizes))}; replay a configuration with it"
            )
        return self.trace.counts(size)

    @property
    def positions_per_second(self) -> float:
        """Positions drafted for, by time."""
        return float(np.count_nonzero(self.trace.nodes >= 0)) / max(self.seconds, 1e-9)


def replay(
    recorded: Recorded,
    config: Config,
    target: ReplayTarget,
    *,
    mode: Literal["auto", "positions", "steps"] = "auto",
    concurrency: int = CONCURRENCY,
    provides: frozenset[Need] = EVERYTHING,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keep: Collection[int] = (),
) -> Replayed:
    """Replay one configuration.

    Args:
        recorded: conversations, in the order in which they are to come.
        config: what drafts, and how much.
        target: the model that said them.
        mode: ``positions`` drafts at every position of every response, which tells of all draft lengths, and
            needs a proposer whose drafts do not depend on which steps came before. ``steps`` steps through
            them as an engine does with just this configuration. ``auto``: the first, where it can be.
        concurrency: how many conversations run side by side. It matters to a proposer that learns from those
            that are finished (``suffix``), and to memory: a head's states are kept for so many.
        provides: what the engine asked about gives a proposer, as :data:`spec_plugins.support.ENGINES` says.
        progress: told every while how many response tokens are done, of how many.
        keep: conversations whose drafts are kept, at the beginning of their response, for
            :func:`spec_plugins.evaluation.replay_examples.examples`.

    Raises:
        UnsupportedError: the proposer cannot be replayed, or not in this mode.
        Exception: whatever :meth:`Proposer.load` raises.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency: {concurrency} is out of range; set it to at least 1")
    proposer = config.create_proposer()
    free = config.policy == "fixed" and proposer.depends_on != "steps"
    if mode == "positions" and not free:
        raise UnsupportedError(
            f"mode: what {config.proposer!r} drafts depends on the steps before, so no position can be "
            "drafted for by itself; use mode 'steps'"
        )
    every = free if mode == "auto" else mode == "positions"
    sees_states = target.looked_at(proposer, provides)
    rows = concurrency
    if every and proposer.depends_on == "text" and proposer.bounded and not sees_states:
        rows = max(rows, WIDE)
    rows = min(rows, len(recorded))
    described = target.describe(proposer, config, provides, rows, offline=every)
    states = target.states(proposer, provides, rows) if sees_states else None
    driver = Driver(proposer, described, config.model_copy(update={"containment": _PATIENT}))
    run = _Run(
        recorded,
        driver,
        states,
        rows,
        every,
        Need.SAMPLING in provides & (proposer.needs | proposer.uses),
        keep,
    )
    order = np.arange(len(recorded))
    if every and proposer.depends_on == "text":  # the longest first, so that few are left over at the end
        order = np.argsort(-(recorded.lengths - recorded.prompt_lengths), kind="stable")
    _compile()
    started = time.perf_counter()
    for done in run.through(order.tolist()):
        progress(done, recorded.response_tokens)
    seconds = time.perf_counter() - started
    trees = run.trace.ranks is not None
    size = described.max_draft_nodes if trees else described.num_speculative_tokens
    return Replayed(
        config,
        recorded,
        run.trace,
        "positions" if every else "steps",
        tuple(range(1, size + 1)) if every and proposer.nested else (size,),
        trees,
        _exactness(every, proposer.depends_on, rows),
        tuple(_notes(recorded, config, driver, provides)),
        concurrency,
        seconds,
        dict(driver.statistics.snapshot()),
    )


def _exactness(every: bool, depends_on: str, rows: int) -> str:
    if not every:
        return f"what an engine counts with this configuration, {rows} requests at once in this order"
    if depends_on == "text":
        return "what an engine counts"
    return (
        f"what an engine counts, but for what is learned from finished requests: {rows} run at once, each a "
        "token further a step, and all of a response is learned; mode 'steps' is exact, for one draft length"
    )


def _notes(recorded: Recorded, config: Config, driver: Driver, provides: frozenset[Need]) -> Iterator[str]:
    uses, figures = driver.proposer.uses & provides, driver.statistics
    sampled = int((recorded.temperatures > 0).sum())
    if sampled and Need.PROBABILITIES in uses:
        yield (
            f"{sampled} of {len(recorded)} responses were sampled. Drafts were the likeliest tokens, and for "
            "those the estimate is unbiased. An engine that draws drafts and verifies with their "
            "probabilities accepts another share, mostly more; no record holds what that depends on"
        )
    if Need.PREDICTIONS in uses:
        yield (
            f"{config.proposer!r} also learns from what the target says after rejected tokens, where an "
            "engine tells; no record does, so it drafted as in an engine that does not"
        )
    if figures.faults:
        faults = ", ".join(f"{fault.value} {n}" for fault, n in figures.faults.items())
        yield f"faults of the proposer: {faults}; those drafts were not used, as in an engine"
    if figures.skipped_steps:
        yield f"the proposer kept failing and was not asked in {figures.skipped_steps} steps"


class _Run:
    """Conversations side by side, on their way through one proposer."""

    def __init__(
        self,
        recorded: Recorded,
        driver: Driver,
        states: StatesInRows | None,
        rows: int,
        every: bool,
        tells_sampling: bool,
        keep: Collection[int],
    ) -> None:
        self.recorded, self.driver, self.states, self.every = recorded, driver, states, every
        self.tells_sampling, self._keep = tells_sampling, list(keep)
        lengths = recorded.lengths
        positions = np.maximum(lengths - recorded.prompt_lengths - 1, 0)
        self.trace = Trace(
            np.concatenate([[0], np.cumsum(positions, dtype=np.int64)]), driver.target.num_speculative_tokens
        )
        self._totals = lengths
        self._several_tenants = any(recorded.tenants)
        self._token_ids: IntArray = np.zeros((rows, int(lengths.max())), np.int32)
        self._free = list(range(rows))[::-1]
        # Of the conversations at work: which, in which row, how many tokens are committed, up to where the
        # proposer was shown states, and where each stands (:meth:`Trace.judge`).
        self._which = self._rows = self._lengths = self._shown = np.zeros(0, np.int32)
        self._places = np.zeros((3, 0), np.int64)
        self._ids: list[str] = []
        self._tenants: list[str] | None = None

    def through(self, order: list[int]) -> Iterator[int]:
        """All of them, in this order; gives how many tokens of responses are done, now and then."""
        waiting, done, steps = order[::-1], 0, 0
        while self._admit(waiting):
            done += self._step()
            steps += 1
            if steps % 64 == 0:
                yield done
        none = np.zeros(0, np.int32)
        self.driver.propose([], self._token_ids, none, none)  # lets the proposer forget the last ones
        yield self.recorded.response_tokens

    def _admit(self, waiting: list[int]) -> int:
        """Fill free rows; returns how many are at work."""
        new: list[int] = []
        while waiting and len(new) < len(self._free):
            c = waiting.pop()
            if self._totals[c] - self.recorded.prompt_lengths[c] > 1:  # else the prefill says all
                new.append(c)
        if new:
            rows = [self._free.pop() for _ in new]
            texts = [self.recorded.conversation(c) for c in new]
            lengths = self.recorded.prompt_lengths[new] + 1  # and the first token, which the prefill gives
            for row, text, length in zip(rows, texts, lengths.tolist(), strict=True):
                self._token_ids[row, :length] = text[:length]
            if self.states is not None:
                self.states.fill(rows, texts)
            self._which = np.append(self._which, np.array(new, np.int32))
            self._rows = np.append(self._rows, np.array(rows, np.int32))
            self._lengths = np.append(self._lengths, lengths)
            self._shown = np.append(self._shown, np.zeros(len(new), np.int32))
            self._regroup()
        return len(self._which)

    def _regroup(self) -> None:
        """What changes only when a conversation comes or goes."""
        recorded, which, lengths = self.recorded, self._which, self._lengths
        self._ids = [str(c) for c in which.tolist()]
        if self._several_tenants:
            self._tenants = [recorded.tenants[c] for c in which.tolist()]
        self._prompts, self._last = recorded.prompt_lengths[which], recorded.ends[which] - 1
        self._places = np.stack(
            [
                self.trace.offsets[which] + lengths - self._prompts - 1,
                recorded.offsets[which] + lengths,
                self._totals[which] - lengths,
            ]
        )
        self._kept: list[int] = np.flatnonzero(np.isin(which, self._keep)).tolist() if self._keep else []
        self._sampling = None
        if self.tells_sampling:
            greedy = Sampling.greedy(len(which))
            temperatures = np.nan_to_num(recorded.temperatures[which])
            self._sampling = Sampling(temperatures, greedy.top_k, greedy.top_p, greedy.min_p)

    def _step(self) -> int:
        """One step of an engine, or one position on; returns how many tokens were committed."""
        driver, lengths, places = self.driver, self._lengths, self._places
        hidden = aux = None
        if self.states is not None:
            hidden, aux = self.states.packed(self._rows, self._shown, lengths - 1)
            self._shown = lengths - 1
        drafts = driver.propose(
            self._ids, self._token_ids, self._rows, lengths,
            limits=self._last - lengths,
            prompt_lengths=self._prompts,
            tenants=self._tenants,
            sampling=self._sampling,
            hidden_states=hidden,
            aux_hidden_states=aux,
        )  # fmt: skip
        right = self.trace.judge(drafts, self.recorded.tokens, places)
        for i in self._kept:
            if lengths[i] - self._prompts[i] <= KEPT_TOKENS:
                n, parents = drafts.counts[i], drafts.parents
                self.trace.kept[int(places[0, i])] = (
                    drafts.tokens[i, :n].copy(), None if parents is None else parents[i, :n].copy(),
                )  # fmt: skip
        if self.every:
            right[:] = 0
        else:
            ranks = self.trace.ranks
            driver.observe(self._ids, right, None if ranks is None else ranks[places[0]].astype(np.int32))
        committed, over = _commit(self.recorded.tokens, right, places, lengths, self._rows, self._token_ids)
        if over:
            stay = places[2] > 0
            self._free += self._rows[~stay][::-1].tolist()
            self._which, self._rows = self._which[stay], self._rows[stay]
            self._lengths, self._shown = lengths[stay], self._shown[stay]
            self._regroup()
        return committed


@numba.njit(cache=True)
def _commit(
    texts: IntArray, right: IntArray, places: Longs, lengths: IntArray, rows: IntArray, token_ids: IntArray
) -> tuple[int, int]:
    """Move each conversation on by what was right and one, in place, and let the proposer see those tokens;
    it never sees what it is to guess. Returns how many that were, and how many conversations are over."""
    committed, over = 0, 0
    for i in range(len(right)):
        on = min(right[i] + 1, places[2, i])
        for j in range(on):
            token_ids[rows[i], lengths[i] + j] = texts[places[1, i] + j]
        lengths[i] += on
        places[0, i] += on
        places[1, i] += on
        places[2, i] -= on
        committed += on
        over += places[2, i] == 0
    return committed, over


@functools.cache
def _compile() -> None:
    """Compile what steps run, or load it, so that it is in no replay's time."""
    trace, places = Trace(np.array([0, 1]), 1), np.array([[0], [0], [1]], np.int64)
    one, tokens = np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    for parents in (None, np.full((1, 1), -1, np.int32)):
        trace.judge(Drafts(tokens, one, parents), one, places)
    _commit(one, one.copy(), places, one.copy(), one - 1, np.zeros((1, 2), np.int32))
