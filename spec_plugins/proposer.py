"""The contract between a proposer and every engine.

A *proposer* guesses the next tokens of running requests; the engine's target model verifies the
guesses in one forward pass. The engine-neutral :class:`~spec_plugins.driver.Driver` stands between
the two, so a proposer sees the same :class:`Step` whichever engine runs it::

    class Echo(Proposer):
        '''Guesses that the last token comes again.'''

        def propose(self, step: Step) -> list[Draft]:
            return [
                Draft(np.repeat(step.tokens(i)[-1:], min(step.budgets[i], step.depths[i])))
                for i in range(len(step))
            ]

Everything here is numpy; torch tensors appear only where a proposer asks for them, and torch is
never imported by this module.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = [
    "Draft",
    "Drafts",
    "FloatArray",
    "IntArray",
    "Need",
    "Packed",
    "Proposer",
    "Sampling",
    "Step",
    "Target",
]

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ArrayT = TypeVar("ArrayT")


class Need(enum.Enum):
    """Something a host may give a proposer beyond token ids."""

    TREES = "trees"
    """The host verifies tree drafts; without it, chains only."""
    SAMPLING = "sampling"
    """:attr:`Step.sampling`."""
    PREDICTIONS = "predictions"
    """:attr:`Step.predictions` and :attr:`Step.verified`."""
    PROBABILITIES = "probabilities"
    """The host verifies with :attr:`Draft.probs`; without it, drafts must be deterministic."""
    HIDDEN_STATES = "hidden_states"
    """:attr:`Step.hidden_states`, of the last layer."""
    AUX_HIDDEN_STATES = "aux_hidden_states"
    """:attr:`Step.aux_hidden_states`, of the layers that :meth:`Proposer.aux_layers` names."""
    EMBEDDINGS = "embeddings"
    """:attr:`Target.embeddings`."""
    LM_HEAD = "lm_head"
    """:attr:`Target.lm_head`."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a proposer is told of the target model, once, in :meth:`Proposer.load`."""

    vocab_size: int
    """Draft token ids must lie in ``range(vocab_size)``."""
    max_model_len: int
    """The longest context, in tokens, that a request can reach."""
    max_num_seqs: int
    """The most requests in one step."""
    provides: frozenset[Need] = frozenset()
    """What this host gives of :attr:`Proposer.needs` and :attr:`Proposer.uses`."""
    num_speculative_tokens: int = 1
    """The deepest draft position that will ever be asked for."""
    max_draft_nodes: int = 1
    """The most draft tokens of one request in one step, over all branches of a tree."""
    model: str | None = None
    """Path or name of the target, as the engine was given it."""
    device: str = "cpu"
    dtype: str = "float32"
    hidden_size: int | None = None
    num_layers: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embeddings: Callable[[], torch.Tensor] | None = None
    """Returns the input embedding matrix, ``[vocab_size, hidden_size]``, not a copy."""
    lm_head: Callable[[], torch.Tensor] | None = None
    """Returns the output projection, ``[vocab_size, hidden_size]``, not a copy."""
    offline: bool = False
    """No engine waits for drafts: take in all that is new at once, however long that takes."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a batch, one entry a request.

    A temperature of 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch those off.
    """

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray

    @classmethod
    def greedy(cls, n: int) -> Sampling:
        """Greedy settings for ``n`` requests."""
        return cls(
            np.zeros(n, np.float32),
            np.zeros(n, np.int32),
            np.ones(n, np.float32),
            np.zeros(n, np.float32),
        )

    @classmethod
    def of(cls, settings: Sequence[tuple[float, int, float, float]]) -> Sampling:
        """One of each request's: temperature, top-k, top-p, min-p."""
        temperature, top_k, top_p, min_p = zip(*settings, strict=True) if settings else ((),) * 4
        return cls(
            np.array(temperature, np.float32),
            np.array(top_k, np.int32),
            np.array(top_p, np.float32),
            np.array(min_p, np.float32),
        )

    def __getitem__(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> Sampling:
        """Those of some requests."""
        return Sampling(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Packed(Generic[ArrayT]):
    """A ragged batch: request ``i`` owns ``values[offsets[i]:offsets[i + 1]]``. Views, no copies."""

    values: ArrayT
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> ArrayT:
        return self.values[self.offsets[i] : self.offsets[i + 1]]  # type: ignore[index,no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guesses for one request: a chain, or a tree whose nodes are listed parents first.

    Siblings must differ in their token and stand best first: a host that verifies chains only
    follows each node's first child.
    """

    tokens: IntArray
    """``[n]`` int32."""
    parents: IntArray | None = None
    """``[n]`` int32: index of each token's parent, ``-1`` for the last committed token; always
    less than the token's own index. ``None``: a chain."""
    probs: torch.Tensor | None = None
    """``[n, vocab_size]``: the distribution that each token was drawn from, given everything drawn
    before it (so for a second sibling drawn without replacement: without the first, renormalised).
    ``None``: the draft is deterministic. Whether to draft a position at all may depend on anything
    but that position's own drawn token, or the output's distribution changes."""
    sources: IntArray | None = None
    """``[n]`` int32: who guessed each token, as an index into :attr:`Proposer.sources`."""

    def __len__(self) -> int:
        return len(self.tokens)


class Drafts(Sequence[Draft]):
    """A batch of drafts in packed form, for proposers and adapters that want no object a request.

    Iterating gives :class:`Draft` views. Entries at or past ``counts[i]`` have no meaning.
    """

    __slots__ = ("counts", "parents", "probs", "sources", "tokens")

    def __init__(
        self,
        tokens: IntArray,
        counts: IntArray,
        parents: IntArray | None = None,
        probs: Sequence[torch.Tensor | None] | None = None,
        sources: IntArray | None = None,
    ) -> None:
        """
        Args:
            tokens: ``[n, width]`` int32.
            counts: ``[n]`` int32, how many of each row are drafted.
            parents: ``[n, width]`` int32, or ``None`` when every draft is a chain.
            probs: for each request ``None`` or ``[counts[i], vocab_size]``.
            sources: ``[n, width]`` int32, see :attr:`Draft.sources`.
        """
        self.tokens, self.counts, self.parents = tokens, counts, parents
        self.probs, self.sources = probs, sources

    @classmethod
    def empty(cls, n: int) -> Drafts:
        """``n`` empty drafts."""
        return cls(np.empty((n, 0), np.int32), np.zeros(n, np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, i: int) -> Draft: ...
    @overload
    def __getitem__(self, i: slice) -> list[Draft]: ...
    def __getitem__(self, i: int | slice) -> Draft | list[Draft]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        n = int(self.counts[i])
        return Draft(
            self.tokens[i, :n],
            None if self.parents is None else self.parents[i, :n],
            None if self.probs is None else self.probs[i],
            None if self.sources is None else self.sources[i, :n],
        )

    def __iter__(self) -> Iterator[Draft]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The running requests of one engine step, packed. Arrays are read-only views of the host's.

    ``n`` is the number of requests. Rows move between steps: key state by request id.
    """

    request_ids: Sequence[str]
    token_ids: IntArray
    """``[rows, capacity]`` int32: prompt and committed output of every request."""
    rows: IntArray
    """``[n]``: the row of ``token_ids`` that holds request ``i``."""
    lengths: IntArray
    """``[n]``: how many tokens of that row are committed."""
    fresh: IntArray
    """``[n]``: how many of them, the last ones, are new since :meth:`Proposer.propose` last saw
    this request; equal to ``lengths`` when it is new or its state was dropped."""
    budgets: IntArray
    """``[n]``: the most draft tokens wanted, over all branches. 0: take in what is new, draft nothing."""
    depths: IntArray
    """``[n]``: the deepest position wanted (a chain may be no longer than this)."""
    prompt_lengths: IntArray
    """``[n]``: how many of the tokens are the prompt's."""
    tenants: Sequence[str] | None = None
    """``[n]``: whose request it is (the engine's cache salt); state may be shared within a tenant
    only. ``None``: all of one tenant."""
    sampling: Sampling | None = None
    verified: Sequence[Draft | None] | None = None
    """``[n]``: the draft that the target verified in the step before, ``None`` where there was none."""
    predictions: Packed[IntArray] | None = None
    """The target's own next token after each node of ``verified[i]``, rejected ones included:
    entry 0 after the token that was then the last, ``j + 1`` after draft token ``j``."""
    hidden_states: Packed[torch.Tensor] | None = None
    """``[m, hidden_size]`` for request ``i``: the last layer's output at the ``m`` newest positions
    that the target has processed, which end at ``lengths[i] - 2`` (the newest token was not yet fed)."""
    aux_hidden_states: Packed[torch.Tensor] | None = None
    """``[m, layers * hidden_size]``: the same for the layers that :meth:`Proposer.aux_layers` names, side by
    side."""

    def __len__(self) -> int:
        return len(self.request_ids)

    @classmethod
    def rehearsal(cls, *, trees: bool = False, budget: int = 4) -> Step:
        """A step of one request, ``"rehearsal"``, in the very types that the driver gives, so that
        :meth:`Proposer.load` can have compiled all that a real step will run."""

        def array(values: list[int] | list[list[int]]) -> IntArray:
            made = np.array(values, np.int32)
            made.flags.writeable = False
            return made

        length, most = array([8]), array([budget])
        return cls(
            ("rehearsal",), array([[1, 2, 3, 1, 2, 3, 1, 2]]), array([0]), length, length, most, most,
            array([4]),
            verified=[Draft(array([3, 1]), array([-1, 0]) if trees else None)],
            predictions=Packed(array([3, 1, 2]), array([0, 3])),
        )  # fmt: skip

    def tokens(self, i: int) -> IntArray:
        """A view of request ``i``'s committed tokens, ``[lengths[i]]`` int32. No copy."""
        return self.token_ids[self.rows[i], : self.lengths[i]]


class Proposer(ABC):
    """Guesses the next tokens of running requests. One instance serves one engine worker.

    A constructor's keyword arguments are the proposer's options: the configuration checks them
    against their annotations. State is keyed by request id, and any history must be tolerated:
    steps not seen, tokens not drafted, requests that leave and come back, a prefix from a cache.
    Whatever a proposer raises or returns, the engine's output stays the same.
    """

    name: str = ""
    """The registered name, set when the registry makes the proposer."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """Without these the proposer is refused at start-up."""
    uses: ClassVar[frozenset[Need]] = frozenset()
    """Taken where the host provides them."""
    bounded: ClassVar[bool] = False
    """True promises that :meth:`propose` cannot block, so that it is called on the engine's own
    thread. Otherwise it runs in a thread of its own, which a hang cannot stop the engine from
    leaving behind (some 30 µs a step)."""
    depends_on: ClassVar[Literal["text", "finished", "steps"]] = "steps"
    """What a deterministic draft is made from, which says how it can be replayed over recorded text.
    ``text``: the request's own tokens, and the target's states over them. ``finished``: also the requests
    that were finished before. ``steps``: also where steps began, and what was verified in them."""
    nested: ClassVar[bool] = False
    """True promises that a draft for a smaller budget is the beginning of that for a larger one, for chains
    at any depth, so that one replay tells of all sizes."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names behind :attr:`Draft.sources`, for statistics."""
        return (self.name,)

    @property
    def draft_nodes(self) -> int:
        """How many draft tokens it likes to have verified in a step, over all branches, where the host
        verifies trees: the default of ``max_draft_nodes``. 0: as many as the longest chain."""
        return 0

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Which layers of a target with so many :attr:`Step.aux_hidden_states` should come from: 0 is what
        goes into its first, ``i`` what layer ``i - 1`` puts out. Asked before :meth:`load`, and on every
        rank, since some engines must know early.
        """
        return ()

    def load(self, target: Target) -> None:  # noqa: B027
        """Get ready to serve ``target``: load weights, compile. Called once, before any step.

        Raises:
            UnsupportedError: this proposer cannot serve this target, with the reason.
        """

    @abstractmethod
    def propose(self, step: Step) -> Sequence[Draft]:
        """Guess what comes next, one :class:`Draft` a request in the order of the step.

        On the critical path of every engine step. A draft over budget is cut.
        """

    def finish(self, request_id: str) -> None:  # noqa: B027
        """Forget a request: it is over, was preempted, or its state may be wrong after a fault.

        Called for every request that :meth:`propose` saw, perhaps more than once; it may come back
        as new.
        """

    def gauges(self) -> Mapping[str, float]:
        """Figures about held state (entries, bytes) for metrics, by name."""
        return {}
