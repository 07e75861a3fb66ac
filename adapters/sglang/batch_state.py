"""Turns SGLang's batches into the driver's arguments, and its results into the driver's report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_plugins.adapters.sglang.draft_tree import accepted_paths
from spec_plugins.adapters.sglang.plugin import DRAFT_TOKENS
from spec_plugins.driver import Driver
from spec_plugins.proposer import Drafts, IntArray, Need, Packed, Sampling
from spec_plugins.request_switch import RequestSwitch
from spec_plugins.token_store import TokenStore

if TYPE_CHECKING:
    import torch

__all__ = ["BatchState", "Verified"]

MOST_STATES = 65_536
"""Tokens of prompts whose hidden states are kept until drafting begins; SGLang prefills all that it has room
for first."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What does not change while a request runs."""

    longest: int
    """Tokens at which it ends."""
    cap: int
    """The deepest draft position that it takes."""
    prompt: int
    tenant: str
    sampling: tuple[float, int, float, float]


@dataclass(slots=True)
class Verified:
    """A verified step on its way back, still on the device."""

    requests: Sequence[Any]
    drafts: Drafts
    outputs: Sequence[int]
    """How many output tokens each request had before."""
    accept_lens: torch.Tensor | None = None
    """``[n]``: committed tokens."""
    accept_tokens: torch.Tensor | None = None
    """``[n, width]``."""
    accept_index: torch.Tensor | None = None
    """``[n, width]``: their slots."""
    predictions: torch.Tensor | None = None
    """``[n, width]``; where wanted."""
    states: Mapping[Need, torch.Tensor] = field(default_factory=dict)
    """Hidden states at all slots, ``[n * width, ...]``; where wanted."""


class BatchState:
    """One worker's requests, as the driver wants them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        target = driver.target
        takes = (driver.proposer.needs | driver.proposer.uses) & target.provides
        self._wants_sampling = Need.SAMPLING in takes
        self.wants_predictions = Need.PREDICTIONS in takes
        self.tokens = TokenStore(target.max_num_seqs, min(target.max_model_len, 1024))
        self._switch = RequestSwitch(target.num_speculative_tokens)
        self._requests: dict[str, _Request] = {}
        self._predictions: dict[str, IntArray] = {}
        self._states: dict[Need, dict[str, list[torch.Tensor]]] = {
            need: {} for need in takes & {Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES}
        }
        """Of each kind that is wanted: what was not yet shown, by request."""
        self._chunked: str | None = None
        """The request whose prompt has parts to come; SGLang has one at a time."""
        self._last_ids: frozenset[str] = frozenset()
        self._last_time = 0.0

    def propose(self, batch: Any) -> tuple[Verified, IntArray]:
        """Drafts for a decode batch, and each request's last token.

        Args:
            batch: a ``ScheduleBatch``, its ``seq_lens_cpu`` up to date: what the KV cache holds.
        """
        ids = [r.rid for r in batch.reqs]
        totals = batch.seq_lens_cpu.numpy().astype(np.int32) + 1
        self._take_in(batch, totals)
        requests = [self._requests.get(r.rid) or self._admit(r) for r in batch.reqs]
        rows, lengths = self.tokens.rows(ids)
        limits = [
            min(q.longest - total - 1, q.cap) for q, total in zip(requests, totals.tolist(), strict=True)
        ]
        drafts = self.driver.propose(
            ids,
            self.tokens.token_ids,
            rows,
            lengths,
            limits=np.maximum(np.array(limits, np.int32), 0),
            prompt_lengths=np.array([q.prompt for q in requests], np.int32),
            tenants=[q.tenant for q in requests],
            sampling=Sampling.of([q.sampling for q in requests]) if self._wants_sampling else None,
            predictions=self._packed_predictions(ids) if self.wants_predictions else None,
            hidden_states=self._packed_states(Need.HIDDEN_STATES, ids),
            aux_hidden_states=self._packed_states(Need.AUX_HIDDEN_STATES, ids),
        )
        if drafts.probs is not None:
            device = self.driver.target.device
            drafts.probs = [None if q is None else q.to(device) for q in drafts.probs]
        last_tokens = self.tokens.token_ids[rows, lengths - 1]
        for r in batch.reqs:
            if r.finished():  # known by now, yet still in the batch: nobody will say so again
                self.finish(r.rid)
        outputs = [
            total - len(r.origin_input_ids) for r, total in zip(batch.reqs, totals.tolist(), strict=True)
        ]
        return Verified(list(batch.reqs), drafts, outputs), last_tokens

    def settle(self, step: Verified) -> None:
        """Report a verified step. Waits for the device."""
        assert step.accept_lens is not None
        assert step.accept_tokens is not None
        ids = [r.rid for r in step.requests]
        accepted = step.accept_lens.cpu().numpy().astype(np.int32) - 1
        # With overlap a step more is begun for a request that ends meanwhile; nothing of that one counts.
        over = [
            r.finished() and len(r.output_ids) <= before
            for r, before in zip(step.requests, step.outputs, strict=True)
        ]
        accepted[over] = -1
        paths = None
        if step.drafts.parents is not None:
            committed = step.accept_tokens.cpu().numpy().astype(np.int32, copy=False)
            paths = accepted_paths(step.drafts, np.ascontiguousarray(committed), accepted)
        self.driver.observe(ids, accepted, paths, step_seconds=self._step_seconds(ids))
        counts = step.drafts.counts.tolist()
        if step.predictions is not None:
            told = step.predictions.cpu().numpy().astype(np.int32, copy=False)
            self._predictions = {r: told[i, : counts[i] + 1] for i, r in enumerate(ids)}
        if step.states and step.accept_index is not None:
            slots = step.accept_index.long()
            for i, (r, a) in enumerate(zip(ids, accepted.tolist(), strict=True)):
                for need, states in step.states.items() if a >= 0 else ():
                    self._states[need].setdefault(r, []).append(states[slots[i, : a + 1]])
        for request, drafted, a, before in zip(
            step.requests, counts, accepted.tolist(), step.outputs, strict=True
        ):
            if a >= 0:
                _note(request, before, drafted, a)

    def see_prefill(self, batch: Any, shown: Mapping[Need, torch.Tensor]) -> None:
        """A prefill was run.

        Args:
            batch: the ``ScheduleBatch``.
            shown: hidden states of its tokens, ``[tokens, ...]``, kept for the first drafting after it;
                where wanted.
        """
        for request in batch.reqs:
            if request.rid in self.tokens:  # it was retracted, and may end with this very step
                self.finish(request.rid)
        if not shown:
            return
        chunked, before = batch.chunked_req, self._chunked
        self._chunked = None if chunked is None else chunked.rid
        if before is not None and before not in (self._chunked, *(r.rid for r in batch.reqs)):
            self._forget_states(before)  # aborted between two parts, of which there is no word
        for request in batch.reqs:
            if (
                request.rid != before
            ):  # its first part: what is kept is of a prefill that it was retracted after
                self._forget_states(request.rid)
        lengths = [int(n) for n in batch.extend_lens]
        for need, states in shown.items():
            parts = states.split(lengths)  # type: ignore[no-untyped-call]
            for request, part in zip(batch.reqs, parts, strict=True):
                self._states[need].setdefault(request.rid, []).append(part)
        self._bound_states()

    def finish(self, request_id: str) -> None:
        """A request is over."""
        self.driver.finish([request_id])
        for kept in (self._requests, self._predictions):
            kept.pop(request_id, None)
        self._forget_states(request_id)
        self.tokens.discard(request_id)
        if not len(self.tokens):  # the next step may be far
            empty = np.empty(0, np.int32)
            self.driver.propose([], np.empty((0, 0), np.int32), empty, empty)

    def _take_in(self, batch: Any, totals: IntArray) -> None:
        """Bring every request's tokens up to date; O(new tokens)."""
        store = self.tokens
        ahead: list[list[int]] | None = None
        for i, (request, total) in enumerate(zip(batch.reqs, totals.tolist(), strict=True)):
            rid, prompt, output = request.rid, request.origin_input_ids_unpadded, request.output_ids
            # Images take more places than tokens.
            wanted = total - len(request.origin_input_ids) + len(prompt)
            have = store.length(rid)
            if have > wanted:
                store.discard(rid)
                have = 0
            if not have:
                store.append(
                    rid, np.frombuffer(prompt, prompt.typecode) if hasattr(prompt, "typecode") else prompt
                )
                have = len(prompt)
            new = output[have - len(prompt) : wanted - len(prompt)]
            missing = wanted - have - len(new)
            if missing > 0:  # SGLang is a step ahead of its lists
                if ahead is None:  # one copy from the device for all
                    lens, rows = batch.spec_info.accept_lens, batch.spec_info.accept_tokens
                    rows = rows.reshape(len(batch.reqs), -1).tolist()
                    ahead = [row[:n] for row, n in zip(rows, lens.tolist(), strict=True)]
                new = [*new, *ahead[i][-missing:]]
            store.append(rid, new)
        if len(store) > 2 * self.driver.target.max_num_seqs:
            self._prune({r.rid for r in batch.reqs})

    def _prune(self, running: set[str]) -> None:
        """Forget requests that left without a word, such as those aborted while they waited."""
        for rid in [r for r in self._requests if r not in running]:
            self.finish(rid)

    def _admit(self, request: Any) -> _Request:
        params = request.sampling_params
        prompt = len(request.origin_input_ids_unpadded)
        longest = self.driver.target.max_model_len
        if params.max_new_tokens is not None:
            longest = min(longest, len(request.origin_input_ids) + int(params.max_new_tokens))
        cap = self._switch.wanted(params.custom_params)
        if _changes_as_it_goes(request):
            cap = 0
        greedy = params.top_k == 1
        sampling = (
            0.0 if greedy else params.temperature,
            0 if greedy or params.top_k >= 1 << 30 else params.top_k,
            params.top_p,
            params.min_p,
        )
        made = _Request(longest, cap, prompt, _tenant(request), sampling)
        self._requests[request.rid] = made
        return made

    def _step_seconds(self, ids: Sequence[str]) -> float | None:
        """Since the step before, where a request ran on, so that the engine cannot have been idle."""
        now = time.perf_counter()
        seconds, busy = now - self._last_time, not self._last_ids.isdisjoint(ids)
        self._last_ids, self._last_time = frozenset(ids), now
        return seconds if busy else None

    def _packed_predictions(self, ids: Sequence[str]) -> Packed[IntArray]:
        none = np.empty(0, np.int32)
        kept = [self._predictions.get(r, none) for r in ids]
        return Packed(np.concatenate(kept), _offsets([len(k) for k in kept]))

    def _forget_states(self, request_id: str) -> None:
        for kept in self._states.values():
            kept.pop(request_id, None)

    def _bound_states(self) -> None:
        """Drop what waits longest; a request's later states follow as if a cache had had the earlier ones."""
        for kept in self._states.values():
            total = sum(len(part) for parts in kept.values() for part in parts)
            for rid in list(kept):
                if total <= MOST_STATES:
                    break
                total -= sum(len(part) for part in kept.pop(rid))

    def _packed_states(self, need: Need, ids: Sequence[str]) -> Packed[torch.Tensor] | None:
        import torch

        states = self._states.get(need, {})
        kept = [states.pop(r, []) for r in ids]
        every = [part for parts in kept for part in parts]
        if not every:
            return None
        return Packed(torch.cat(every), _offsets([sum(len(p) for p in parts) for parts in kept]))


def _offsets(lengths: Sequence[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _tenant(request: Any) -> str:
    """Whose request it is: between two of these SGLang's radix cache shares nothing either. In 0.5.23 the
    salt is beside the extra key, which has the LoRA adapter at its end."""
    names = (request.extra_key, getattr(request, "cache_salt", None))
    return repr(names) if any(names) else ""


def _changes_as_it_goes(request: Any) -> bool:
    """Whether the distribution at a position depends on the tokens drafted before it in other ways than
    through the model: such a request drafts nothing, and is exact."""
    p = request.sampling_params
    return bool(
        p.frequency_penalty
        or p.presence_penalty
        or p.repetition_penalty != 1.0
        or p.min_new_tokens
        or request.custom_logit_processor
    )


def _note(request: Any, before: int, drafted: int, accepted: int) -> None:
    """Write a step's draft tokens down for the request's ``meta_info``."""
    if request.customized_info is None:
        request.customized_info = {}
    noted = request.customized_info.setdefault(DRAFT_TOKENS, [])
    del noted[before:]
    noted += [0] * (before - len(noted))
    noted += [drafted, *[0] * accepted]
