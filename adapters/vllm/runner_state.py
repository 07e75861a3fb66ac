"""Turns the state of vLLM's model runner into the driver's arguments."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_plugins.adapters.vllm.plugin import CACHE_SALT
from spec_plugins.driver import Driver
from spec_plugins.proposer import Drafts, IntArray, Need, Packed, Sampling
from spec_plugins.request_switch import RequestSwitch

if TYPE_CHECKING:
    import torch

__all__ = ["RunnerState"]


@dataclass(frozen=True, slots=True)
class _Request:
    """What does not change while a request runs."""

    longest: int
    """Tokens at which it ends."""
    cap: int
    """The most draft tokens that it wants."""
    prompt: int
    sampling: tuple[float, int, float, float]
    grammar: bool
    """Whether vLLM cuts its drafts where a grammar forbids a token."""


class RunnerState:
    """One worker's requests, as the driver wants them."""

    def __init__(self, driver: Driver, *, share_tenants: bool) -> None:
        """
        Args:
            driver: what to ask.
            share_tenants: whether cache salts reach this worker; if not, each request is a tenant.
        """
        self.driver, self.share_tenants = driver, share_tenants
        takes = (driver.proposer.needs | driver.proposer.uses) & driver.target.provides
        self._wants_sampling = Need.SAMPLING in takes
        self._wants_states = Need.HIDDEN_STATES in takes
        self._wants_aux = Need.AUX_HIDDEN_STATES in takes
        self._requests: dict[str, _Request] = {}
        self._tenants: dict[str, str] = {}
        self._last_ids: set[str] = set()
        self._last_time = 0.0
        self._switch = RequestSwitch(driver.target.num_speculative_tokens)

    def update(self, scheduler_output: Any) -> None:
        """Learn which requests are new and which are over."""
        over = scheduler_output.finished_req_ids
        if over:
            self.driver.finish(over)
            for r in over:
                self._requests.pop(r, None)
                self._tenants.pop(r, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests.pop(new.req_id, None)  # one that streams its input comes as new again
            salt = getattr(new, CACHE_SALT, None)
            if salt is not None:
                self._tenants[new.req_id] = salt

    def propose(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
    ) -> Drafts:
        """Report the step that was verified, and get the drafts for the next.

        Args:
            runner: the ``GPUModelRunner``.
            scheduler_output: the step's ``SchedulerOutput``.
            sampled_token_ids: by row of the runner's batch; empty where a prompt is not finished.
            hidden_states: ``[tokens, hidden_size]``, of every scheduled token, in the order of the batch.
            aux_hidden_states: the same of each auxiliary layer.
        """
        n, batch, driver = len(sampled_token_ids), runner.input_batch, self.driver
        # Otherwise one long request would stop all drafting; here each has a limit of its own.
        runner.effective_drafter_max_model_len = runner.max_model_len + driver.target.num_speculative_tokens
        ids = batch.req_ids[:n]
        known = self._requests
        if len(known) > len(runner.requests) + n:  # where update() is not called
            known = self._requests = {r: q for r, q in known.items() if r in runner.requests}
        requests = [known.get(r) or self._admit(r, runner) for r in ids]
        accepted, verified, lengths, limits, prompts, fed, kept = self._read_step(
            ids, requests, batch, scheduler_output, sampled_token_ids
        )
        driver.observe(ids, accepted, verified=verified, step_seconds=self._step_seconds(ids))
        states = aux = None
        if self._wants_states or self._wants_aux:
            states, aux = self._states(fed, kept, hidden_states, aux_hidden_states)
        found = driver.propose(
            ids,
            batch.token_ids_cpu,
            np.arange(n, dtype=np.int32),
            lengths,
            alive=runner.requests,
            limits=limits,
            prompt_lengths=prompts,
            tenants=[self._tenants.get(r, "") for r in ids] if self.share_tenants else ids,
            sampling=Sampling.of([q.sampling for q in requests]) if self._wants_sampling else None,
            hidden_states=states,
            aux_hidden_states=aux,
        )
        if found.probs is not None:
            # Where a draft is cut must not depend on what was drawn there; as a certain one it is exact.
            found.probs = [None if q.grammar else p for q, p in zip(requests, found.probs, strict=True)]
            _hand_over_probabilities(runner, ids, found, driver.target.vocab_size)
        return found

    def _read_step(
        self,
        ids: Sequence[str],
        requests: Sequence[_Request],
        batch: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
    ) -> IntArray:
        """``[7, n]``, of each request: draft tokens accepted (-1 where nothing was decoded) and verified,
        its length, how many draft tokens it can take, its prompt's length, tokens fed to the target and
        how many of them stay."""
        scheduled = scheduler_output.num_scheduled_tokens
        scheduled_drafts = scheduler_output.scheduled_spec_decode_tokens
        most = _scheduler_limit(scheduler_output, self.driver.target.num_speculative_tokens)
        n = len(ids)
        computed, lengths = batch.num_computed_tokens_cpu[:n].tolist(), batch.num_tokens_no_spec[:n].tolist()
        found = []  # in plain Python: at such sizes a call of numpy costs more than a request does here
        for r, q, sampled, before, tokens in zip(
            ids, requests, sampled_token_ids, computed, lengths, strict=True
        ):
            fed, draft = scheduled[r], scheduled_drafts.get(r, ())
            certain, accepted = fed - len(draft), len(sampled) - 1
            decoded = certain == 1 and before >= q.prompt
            length, kept, room = tokens, certain, 0
            if accepted >= 0:
                kept, room = certain + accepted, max(0, min(q.longest - 1 - length, q.cap, most))
            elif self._wants_states or self._wants_aux:
                # Of an unfinished prompt, just what the target has seen, and the token after it.
                length = min(tokens, before + fed + 1)
            found.append((accepted if decoded else -1, _real(draft), length, room, q.prompt, fed, kept))
        figures: IntArray = np.array(found, np.int32).reshape(n, 7).T.copy()
        return figures

    def _step_seconds(self, ids: Sequence[str]) -> float | None:
        """Since the step before, where a request ran on, so that the engine cannot have been idle."""
        now = time.perf_counter()
        seconds = now - self._last_time
        busy = not self._last_ids.isdisjoint(ids)
        self._last_ids, self._last_time = set(ids), now
        return seconds if busy else None

    def _admit(self, request_id: str, runner: Any) -> _Request:
        state = runner.requests[request_id]
        params, prompt = state.sampling_params, int(state.num_prompt_tokens)
        longest, cap = int(runner.max_model_len), self.driver.target.num_speculative_tokens
        sampling, grammar = (0.0, 0, 1.0, 0.0), False
        if params is not None:
            grammar = getattr(params, "structured_outputs", None) is not None
            if params.max_tokens is not None:
                longest = min(longest, prompt + int(params.max_tokens))
            cap = self._switch.wanted(params.extra_args)
            sampling = (params.temperature, max(0, params.top_k), params.top_p, params.min_p)
        self._requests[request_id] = found = _Request(longest, cap, prompt, sampling, grammar)
        return found

    def _states(
        self,
        fed: IntArray,
        kept: IntArray,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
    ) -> tuple[Packed[torch.Tensor] | None, Packed[torch.Tensor] | None]:
        """Hidden states at the positions that stay, packed. A copy only where drafts were rejected."""
        import torch

        ends = np.cumsum(fed)
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
        total = int(ends[-1]) if len(ends) else 0
        if int(offsets[-1]) == total:
            where: Any = slice(0, total)
        else:
            shift = np.repeat(ends - fed - offsets[:-1], kept)
            where = torch.from_numpy(np.arange(offsets[-1]) + shift).to(hidden_states.device)
        states = Packed(hidden_states[where], offsets) if self._wants_states else None
        if not self._wants_aux or not aux_hidden_states:
            return states, None
        return states, Packed(torch.cat([layer[where] for layer in aux_hidden_states], -1), offsets)


def _real(draft: Sequence[int]) -> int:
    """How many tokens of a scheduled draft are ours: vLLM pads with -1."""
    return len(draft) if not draft or draft[-1] >= 0 else sum(token >= 0 for token in draft)


def _scheduler_limit(scheduler_output: Any, most: int) -> int:
    """vLLM's own draft length for this step; 0.22 has none."""
    limit = getattr(scheduler_output, "num_spec_tokens_to_schedule", None)
    return most if limit is None else int(limit)


def _hand_over_probabilities(runner: Any, ids: Sequence[str], drafts: Drafts, vocab_size: int) -> None:
    """Give vLLM's rejection sampler what each token was drawn from; for a deterministic one, certainty.

    ``[requests, longest draft, vocabulary]`` float32, made anew each step.
    """
    import torch

    assert drafts.probs is not None
    counts = drafts.counts.tolist()
    device = next((p.device for p in drafts.probs if p is not None), None)
    if device is None:
        return
    dense = torch.zeros(len(ids), max(counts), vocab_size, dtype=torch.float32, device=device)
    for i, (count, probs) in enumerate(zip(counts, drafts.probs, strict=True)):
        if probs is not None:
            dense[i, :count] = probs
        elif count:
            tokens = torch.from_numpy(drafts.tokens[i, :count].astype(np.int64)).to(device)
            dense[i, torch.arange(count, device=device), tokens] = 1.0
    runner._draft_probs = dense.to(runner.device)
    runner._draft_prob_req_ids = list(ids)
