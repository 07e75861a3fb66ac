"""The embedded engine: batched speculative decoding of a Hugging Face causal language model."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_plugins.adapters.transformers.requests import (
    Completion,
    Delta,
    Detokenizer,
    Prompt,
    Request,
    SamplingParams,
)
from spec_plugins.adapters.transformers.target_model import TargetModel, load_model
from spec_plugins.config import Config, load_config
from spec_plugins.driver import Driver
from spec_plugins.errors import ConfigError
from spec_plugins.proposer import Drafts, IntArray, Need, Packed, Proposer, Sampling
from spec_plugins.token_store import TokenStore
from spec_plugins.verification import Verdict, verify

__all__ = ["Engine"]

PROVIDES = frozenset(Need)
"""This engine gives a proposer everything the contract knows."""


class Engine:
    """Generates with a Hugging Face causal language model and, optionally, a proposer.

    Requests join and leave a running batch; chains and trees are verified in one forward pass, with a
    4-D mask over a key-value cache in which every request owns a row. Output is the target model's own:
    exactly in greedy float32, in distribution when sampling.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        spec: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        proposer: Proposer | None = None,
        max_num_seqs: int = 8,
        dtype: str | torch.dtype = "auto",
    ) -> None:
        """
        Args:
            model: a causal language model, or the path of one to load.
            tokenizer: its tokenizer; loaded with the model where ``model`` is a path.
            spec: the speculation: whatever :func:`~spec_plugins.config.load_config` reads; ``None``: none.
            proposer: an instance to use in place of the one that ``spec`` names.
            max_num_seqs: the most requests in one forward pass.
            dtype: for loading, see ``from_pretrained``.

        Raises:
            ConfigError, UnknownProposerError, UnavailableError: ``spec`` cannot be used.
            UnsupportedError: this engine cannot run the model, or not with this proposer.
        """
        if isinstance(model, (str, Path)):
            model, tokenizer = load_model(model, tokenizer, dtype)
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs: {max_num_seqs} is out of range; set it to at least 1")
        self.tokenizer, self.max_num_seqs = tokenizer, max_num_seqs
        self.target = TargetModel(model, tokenizer, max_num_seqs)
        self.tokens = TokenStore(max_num_seqs)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.forwards = 0
        """Target forward passes that decoded."""
        self.driver: Driver | None = None
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._predictions: dict[str, IntArray] = {}
        self._wanted: frozenset[Need] = frozenset()
        self._aux_layers: tuple[int, ...] = ()
        if spec is not None or proposer is not None:
            self._start_driver(load_config(spec), proposer)
        self._ids = itertools.count()

    def _start_driver(self, config: Config, proposer: Proposer | None) -> None:
        if config.route == "native":
            raise ConfigError(
                "route: 'native' is not known to the embedded engine; set it to 'auto' or 'plugin'"
            )
        proposer = proposer or config.create_proposer()
        self._wanted = proposer.needs | proposer.uses
        self.target.gives_hidden_states = bool({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES} & self._wanted)
        target = self.target.describe(
            provides=PROVIDES,
            max_num_seqs=self.max_num_seqs,
            num_speculative_tokens=config.num_speculative_tokens,
            max_draft_nodes=config.draft_nodes(proposer),
        )
        self.driver = Driver(proposer, target, config)
        if Need.AUX_HIDDEN_STATES in self._wanted:
            self._aux_layers = proposer.aux_layers(self.target.config.num_hidden_layers)

    # ------------------------------------------------------------------------------------ requests

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt; the answers stand in the order of the prompts.

        Raises:
            ConfigError: a prompt is empty, too long, or needs a tokenizer that is not there.
        """
        done: list[Completion | None] = [None] * len(prompts)
        with self.accept(self._requests(prompts, params, text=False)) as requests:
            while self.running or self.waiting:
                self.step()
                for request in requests:
                    if request.finish_reason and done[request.index] is None:
                        done[request.index] = self._completion(request)
        return [completion for completion in done if completion is not None]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Delta]:
        """Complete every prompt, giving what each step adds. Leaving the loop early aborts the rest."""
        with self.accept(self._requests(prompts, params, text=True)) as requests:
            sent = [(0, 0)] * len(requests)
            open_requests = list(requests)
            while self.running or self.waiting:
                self.step()
                for request in list(open_requests):
                    tokens, characters = sent[request.index]
                    if len(request.output) == tokens and not request.finish_reason:
                        continue
                    text = self._text(request)
                    # Held back while more tokens could turn it into a stop string.
                    end = (
                        len(text)
                        if request.finish_reason
                        else len(text) - _overhang(text, request.params.stop)
                    )
                    sent[request.index] = len(request.output), max(end, characters)
                    if request.finish_reason:
                        open_requests.remove(request)
                    yield Delta(
                        request.index, request.output[tokens:], text[characters:end], request.finish_reason
                    )

    def accept(self, requests: list[Request]) -> AbstractContextManager[list[Request]]:
        """Queue requests for the time of a ``with`` block; what is unfinished at its end is aborted."""
        return _Accepted(self, requests)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, text: bool
    ) -> list[Request]:
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(
                f"params: {len(each)} given for {len(prompts)} prompts; give one, or one a prompt"
            )
        return [self.request(i, p, s, text) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]

    def request(self, index: int, prompt: Prompt, params: SamplingParams, text: bool = False) -> Request:
        """Make a request of a prompt; :attr:`waiting` takes it."""
        tokens = self.encode(prompt)
        if not tokens:
            raise ConfigError(f"prompt {index} is empty; give at least one token")
        if len(tokens) >= self.target.max_model_len:
            raise ConfigError(
                f"prompt {index} has {len(tokens)} tokens; the model takes {self.target.max_model_len}, its "
                "answer included"
            )
        bad = [t for t in tokens if not 0 <= t < self.target.vocab_size]
        if bad:
            raise ConfigError(
                f"prompt {index}: token {bad[0]} is not in the vocabulary of {self.target.vocab_size}"
            )
        request = Request(index, f"{next(self._ids)}", tokens, params)
        if params.temperature > 0:
            request.generator = torch.Generator(self.target.device)
            if params.seed is None:
                request.generator.seed()
            else:
                request.generator.manual_seed(params.seed)
        if params.stop or (text and self.tokenizer is not None):
            if self.tokenizer is None:
                raise ConfigError(
                    "stop: stop strings need a tokenizer; give the engine one, or use stop_token_ids"
                )
            request.detokenizer = Detokenizer(self.tokenizer, params.stop)
        return request

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages through the model's chat template."""
        if not isinstance(prompt, str) and all(isinstance(t, (int, np.integer)) for t in prompt):
            return [int(t) for t in prompt]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ConfigError("prompts: text needs a tokenizer; give the engine one, or give token ids")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not self.tokenizer.chat_template:
            raise ConfigError("prompts: this model has no chat template; give text or token ids")
        return list(
            self.tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        )

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            request.index, request.prompt, request.output, self._text(request), request.finish_reason,
            request.statistics,
        )  # fmt: skip

    def _text(self, request: Request) -> str:
        if request.detokenizer is not None:
            return request.detokenizer.text
        return (
            ""
            if self.tokenizer is None
            else str(self.tokenizer.decode(request.output, skip_special_tokens=True))
        )

    @torch.inference_mode()
    def abort(self, request: Request) -> None:
        """Drop a request, running or waiting."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._leave(request)

    # ------------------------------------------------------------------------------------- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then decode one step for every running request."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            self._prefill(self.waiting.popleft())
        if self.running:
            started = time.perf_counter()
            drafts = self._propose()
            verdict = self._verify(drafts)
            self._commit(drafts, verdict, time.perf_counter() - started)

    def _prefill(self, request: Request) -> None:
        output = self.target.prefill(len(self.running), request.prompt)
        self.running.append(request)
        self.tokens.append(request.request_id, request.prompt)
        if output.hidden_states is not None:
            self._keep_states(request.request_id, output, 0, np.arange(len(request.prompt)))
        verdict = verify(output.logits, Drafts.empty(1), _sampling([request]), [request.generator])
        self._append(request, verdict.tokens[0, :1].tolist())
        if request.finish_reason:
            self._leave(request)

    def _propose(self) -> Drafts:
        n = len(self.running)
        if self.driver is None:
            return Drafts.empty(n)
        ids = [r.request_id for r in self.running]
        rows, lengths = self.tokens.rows(ids)
        limits = np.array([self._limit(r) for r in self.running], np.int32)
        hidden, aux = self._packed_states(ids)
        sampling = _sampling(self.running) or Sampling.greedy(n)
        return self.driver.propose(
            ids, self.tokens.token_ids, rows, lengths,
            limits=limits,
            prompt_lengths=np.array([len(r.prompt) for r in self.running], np.int32),
            tenants=[r.tenant for r in self.running],
            sampling=sampling if Need.SAMPLING in self._wanted else None,
            predictions=self._packed_predictions(ids),
            hidden_states=hidden,
            aux_hidden_states=aux,
        )  # fmt: skip

    def _limit(self, request: Request) -> int:
        """The deepest draft position of any use: each step commits one token more than it accepts."""
        params = request.params
        room = (
            min(params.max_new_tokens - len(request.output), self.target.max_model_len - request.length) - 1
        )
        cap = params.num_speculative_tokens
        return max(0, room if cap is None else min(room, cap))

    def _verify(self, drafts: Drafts) -> Verdict:
        """One target forward, and what becomes of the drafts."""
        lengths = np.array([r.length - 1 for r in self.running])  # what the cache holds
        output = self.target.verify([r.output[-1] for r in self.running], lengths, drafts)
        self.forwards += 1
        best = output.logits.argmax(-1)
        verdict = verify(
            output.logits, drafts, _sampling(self.running), [r.generator for r in self.running], best
        )
        self.target.keep(lengths, drafts, verdict)
        if Need.PREDICTIONS in self._wanted:
            told = best.to("cpu", torch.int32).numpy()
            self._predictions = {
                r.request_id: told[i, : drafts.counts[i] + 1] for i, r in enumerate(self.running)
            }
        if output.hidden_states is not None:
            for i, request in enumerate(self.running):
                slots = np.append(0, verdict.path[i, : verdict.accepted[i]] + 1)
                self._keep_states(request.request_id, output, i, slots)
        return verdict

    def _keep_states(self, request_id: str, output: Any, row: int, slots: Any) -> None:
        """Keep the hidden states of committed tokens for the proposer's next step."""
        assert self.driver is not None
        states = output.hidden_states
        layers = self._aux_layers
        self._states[request_id] = (
            states[-1][row, slots],
            torch.cat([states[layer][row, slots] for layer in layers], -1) if layers else None,
        )

    def _packed_states(
        self, ids: list[str]
    ) -> tuple[Packed[torch.Tensor] | None, Packed[torch.Tensor] | None]:
        if not self._states:
            return None, None
        kept = [self._states[r] for r in ids]
        offsets = np.concatenate([[0], np.cumsum([len(last) for last, _ in kept])]).astype(np.int32)
        aux = [a for _, a in kept if a is not None]
        return (
            Packed(torch.cat([last for last, _ in kept]), offsets),
            Packed(torch.cat(aux), offsets) if aux else None,
        )

    def _packed_predictions(self, ids: list[str]) -> Packed[IntArray] | None:
        if Need.PREDICTIONS not in self._wanted:
            return None
        none = np.empty(0, np.int32)
        kept = [self._predictions.get(r, none) for r in ids]
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in kept])]).astype(np.int32)
        return Packed(np.concatenate(kept), offsets)

    def _commit(self, drafts: Drafts, verdict: Verdict, seconds: float) -> None:
        requests = list(self.running)
        for i, request in enumerate(requests):
            accepted = int(verdict.accepted[i])
            figures = request.statistics
            figures.verify_steps += 1
            figures.drafts += bool(drafts.counts[i])
            figures.draft_tokens += int(drafts.counts[i])
            figures.accepted_tokens += accepted
            self._append(request, verdict.tokens[i, : accepted + 1].tolist())
        if self.driver is not None:
            self.driver.observe(
                [r.request_id for r in requests], verdict.accepted, verdict.path, step_seconds=seconds
            )
        for request in requests:
            if request.finish_reason:
                self._leave(request)

    def _append(self, request: Request, tokens: list[int]) -> None:
        """Commit tokens one by one, up to the one that ends the request."""
        params = request.params
        kept = 0
        for token in tokens:
            kept += 1
            request.output.append(token)
            stopped = request.detokenizer.add(token) if request.detokenizer is not None else False
            ended = token in params.stop_token_ids or (
                token in self.target.eos_token_ids and not params.ignore_eos
            )
            if request.stop_when is not None:
                ended = request.stop_when(request.output) or ended
            if stopped or ended:
                request.finish_reason = "stop"
            elif len(request.output) >= params.max_new_tokens or request.length >= self.target.max_model_len:
                request.finish_reason = "length"
            if request.finish_reason:
                if request.detokenizer is not None and not stopped:
                    request.detokenizer.finish()
                break
        self.tokens.append(request.request_id, tokens[:kept])

    def _leave(self, request: Request) -> None:
        """Free a request's row by moving the last one into it."""
        row, last = self.running.index(request), self.running[-1]
        if last is not request:
            self.target.cache.copy_row(len(self.running) - 1, row, last.length)
            self.running[row] = last
        self.running.pop()
        self.tokens.discard(request.request_id)
        self._states.pop(request.request_id, None)
        self._predictions.pop(request.request_id, None)
        if self.driver is not None and not self.running:
            none = np.empty(0, np.int32)
            self.driver.propose([], self.tokens.token_ids, none, none)


class _Accepted(AbstractContextManager[list[Request]]):
    """Requests that were handed to the engine; whatever is left of them at the end is aborted."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.engine, self.requests = engine, requests

    def __enter__(self) -> list[Request]:
        self.engine.waiting.extend(self.requests)
        return self.requests

    def __exit__(self, *exception: object) -> None:
        for request in self.requests:
            self.engine.abort(request)


def _sampling(requests: Sequence[Request]) -> Sampling | None:
    """The batch's settings, ``None`` where all are greedy."""
    if not any(r.params.temperature > 0 for r in requests):
        return None
    params = [r.params for r in requests]
    return Sampling.of([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params])


def _overhang(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    return max(
        (n for s in stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n])), default=0
    )
