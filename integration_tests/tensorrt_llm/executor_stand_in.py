"""A STAND-IN of TensorRT-LLM's PyTorch executor. It is not TensorRT-LLM, and shares no code with it.

Written from what is known of the engine's source: the order of a step (reserve, draft, pad with zeros,
verify, rewind), the classes that a user-provided drafter derives from, in all their forms, and what of a
request the adapter reads. What holds here is the adapter's side of that contract. That the engine keeps its
side is shown nowhere in this project.

The target is a toy: its next token is a function of the last two, and repeats itself enough to be drafted.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = [
    "DRAFTERS", "VOCAB", "ExecutorStandIn", "MpiStandIn", "RequestStandIn", "engine_stand_in", "target_says",
    "without_drafting",
]  # fmt: skip

VOCAB = 48


def target_says(tokens: Sequence[int]) -> int:
    """The toy target's next token: mostly a walk in a circle, left at tokens that depend on one more."""
    last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else 0
    if last % 7 == 3:
        return (3 * before + last + 1) % VOCAB
    return (last * 5 + 11) % 16


def without_drafting(prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The toy target's greedy output."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(target_says(text))
    return text


class RequestStandIn:
    """What the adapter reads of an ``LlmRequest``, and what the executor keeps there."""

    def __init__(self, number: int, prompt: Sequence[int], new_tokens: int) -> None:
        self.py_request_id = self.request_id = number
        self.py_orig_prompt_len = len(prompt)
        self.py_max_new_tokens = new_tokens
        self.py_batch_idx: int | None = None
        self.py_draft_tokens: list[int] = []
        self.py_num_accepted_draft_tokens = 0
        self.py_rewind_len = 0
        self.cache_salt_id: int | None = None
        self.tokens = list(prompt)
        self.own = 0
        """How many of its draft tokens are no padding."""
        self.reads = 0
        """How many tokens were copied out."""

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)

    def get_token(self, beam: int, pos: int) -> int:
        self.reads += 1
        return self.tokens[pos]

    def get_tokens(self, beam: int) -> list[int]:
        self.reads += len(self.tokens)
        return list(self.tokens)  # the engine's binding makes a new list each time

    @property
    def over(self) -> bool:
        return len(self.tokens) >= self.py_orig_prompt_len + self.py_max_new_tokens


class _Drafter(ABC):
    """What every form has."""

    max_draft_len: int | None
    max_total_draft_tokens: int | None

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        raise NotImplementedError

    def should_use_spec_decode(self, requests: Sequence[Any]) -> bool:
        most = self.max_concurrency  # type: ignore[attr-defined]
        return most is None or len(requests) <= most

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests: Any) -> None:
        for request in scheduled_requests.generation_requests:
            missing = self.max_draft_len - len(request.py_draft_tokens)  # type: ignore[operator]
            request.py_draft_tokens.extend([0] * missing)

    def update_max_total_draft_tokens(self, new: int) -> None:
        self.max_total_draft_tokens = new


class FirstDrafter(_Drafter):
    """The first form: nothing but a limit of concurrency."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency


class SecondDrafter(_Drafter):
    """The second form: lengths, and a schedule of them."""

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, max_total_draft_tokens
        self.max_concurrency, self.draft_len_schedule = max_concurrency, draft_len_schedule


class ThirdDrafter(SecondDrafter):
    """The third form: says whether padding must be reserved for, and pads to a length of its own."""

    _needs_padding_kv_extension = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError  # replaced below, for its signature


def _third(
    self: Any,
    max_draft_len: int | None = None,
    max_total_draft_tokens: int | None = None,
    max_concurrency: int | None = None,
    draft_len_schedule: dict[int, int] | None = None,
) -> None:
    SecondDrafter.__init__(self, max_draft_len, max_total_draft_tokens, max_concurrency, draft_len_schedule)


ThirdDrafter.__init__ = _third  # type: ignore[method-assign]

DRAFTERS: Mapping[str, type[_Drafter]] = {
    "first": FirstDrafter, "second": SecondDrafter, "third": ThirdDrafter
}  # fmt: skip


class BaseResourceManager(ABC):
    """What is told of requests."""

    @abstractmethod
    def get_max_resource_count(self) -> int:
        raise NotImplementedError

    @abstractmethod
    def get_needed_resource_to_completion(self, request: Any) -> int:
        raise NotImplementedError

    def prepare_resources(self, scheduled_batch: Any) -> None:
        return None

    def update_resources(self, scheduled_batch: Any) -> None:
        return None

    def free_resources(self, request: Any) -> None:
        return None


@dataclass
class DecodingConfig:
    """Any of the engine's configurations: its fields, as they were given."""

    max_draft_len: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        self.max_draft_len, self.fields = fields.get("max_draft_len"), fields


class UserProvidedDecodingConfig(DecodingConfig):
    """Holds a drafter and a resource manager."""

    def __init__(self, max_draft_len: int, drafter: Any, resource_manager: Any = None, **more: Any) -> None:
        super().__init__(max_draft_len=max_draft_len, **more)
        self.drafter, self.resource_manager = drafter, resource_manager


class MpiStandIn:
    """Ranks that are threads of one process: what the adapter calls of the engine's MPI."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._here = threading.local()
        self._met = threading.Barrier(size)
        self._said = b""

    def rank(self) -> int:
        return int(getattr(self._here, "rank", 0))

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """All ranks call it, or none goes on; each gets a copy of its own, but the one that it is from."""
        if self.size == 1:
            return obj
        if self.rank() == root:
            self._said = pickle.dumps(obj)
        self._met.wait(60)
        heard = obj if self.rank() == root else pickle.loads(self._said)
        self._met.wait(60)
        return heard

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Do something on all ranks at once; raises what one of them raises."""

        def begin(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._met.abort()  # the others do not wait for this one
                raise

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(begin, range(self.size)))


@contextmanager
def engine_stand_in(drafter: str = "third", ranks: int = 1) -> Iterator[SimpleNamespace]:
    """Let ``import tensorrt_llm`` find the stand-ins; gives what was served, and the ranks."""
    mpi = MpiStandIn(ranks)
    served: list[tuple[str, int, dict[str, Any]]] = []
    approved: list[Any] = []
    parts: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {},
        "tensorrt_llm._utils": {
            "mpi_world_size": lambda: ranks, "mpi_rank": mpi.rank, "mpi_broadcast": mpi.broadcast
        },
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.speculative": {},
        "tensorrt_llm._torch.speculative.drafter": {"Drafter": DRAFTERS[drafter]},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor.resource_manager": {"BaseResourceManager": BaseResourceManager},
        "tensorrt_llm._torch.pyexecutor.llm_request": {"LlmRequest": RequestStandIn},
        "tensorrt_llm.llmapi": {
            "UserProvidedDecodingConfig": UserProvidedDecodingConfig,
            **{
                name: type(name, (DecodingConfig,), {})
                for name in (
                    "NGramDecodingConfig", "DraftTargetDecodingConfig", "EagleDecodingConfig",
                    "Eagle3DecodingConfig", "MTPDecodingConfig",
                )
            },
        },
        "tensorrt_llm.commands": {},
        "tensorrt_llm.commands.serve": {
            "launch_server": lambda host, port, llm_args: served.append((host, port, llm_args))
        },
        "tensorrt_llm.serialization": {"register_approved_class": approved.append},
    }  # fmt: skip
    before = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tensorrt_llm"
    }
    try:
        for name in before:
            del sys.modules[name]
        for name, values in parts.items():
            module = ModuleType(name)
            vars(module).update(values, __path__=[])
            sys.modules[name] = module
        yield SimpleNamespace(served=served, approved=approved, mpi=mpi)
    finally:
        for name in parts:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class ExecutorStandIn:
    """Runs requests to their end, step by step, in the engine's order.

    ``limits`` says how many draft tokens the engine allows in each step, 0 for none; in those of ``skipped``
    it does not ask its drafter at all, as where its own gate is shut.
    """

    def __init__(
        self,
        drafter: Any,
        manager: Any,
        *,
        seats: int = 64,
        limits: Mapping[int, int] | None = None,
        skipped: Sequence[int] = (),
        preempt_every: int = 0,
        seed: int = 0,
    ) -> None:
        self.drafter, self.manager, self.seats = drafter, manager, seats
        self.limits, self.skipped = limits or {}, frozenset(skipped)
        self.preempt_every = preempt_every
        self.chance = random.Random(seed)
        self.steps = self.forwards = 0
        self.drafted = self.accepted = 0
        """Draft tokens, padding left out."""
        self.kv: dict[int, int] = {}
        """Places reserved, by request."""
        self.waiting: list[RequestStandIn] = []
        self.running: list[RequestStandIn] = []
        self.done: dict[int, list[int]] = {}

    def submit(self, request: RequestStandIn) -> None:
        self.waiting.append(request)

    def run(self, arrivals: Mapping[int, Sequence[RequestStandIn]] | None = None) -> dict[int, list[int]]:
        """Until all are done; ``arrivals`` join at their step."""
        arrivals = dict(arrivals or {})
        while self.waiting or self.running or arrivals:
            for request in arrivals.pop(self.steps, ()):
                self.submit(request)
            self.step()
            assert self.steps < 10_000, "the executor does not come to an end"
        return self.done

    def step(self) -> None:
        """One step of the engine."""
        step, self.steps = self.steps, self.steps + 1
        if (
            self.preempt_every
            and step % self.preempt_every == self.preempt_every - 1
            and len(self.running) > 1
        ):
            self._preempt(self.chance.choice(self.running))
        generating = list(self.running)
        self.chance.shuffle(generating)  # a batch has no order to rely on
        context = [self.waiting.pop(0) for _ in range(min(self.seats - len(generating), len(self.waiting)))]
        batch = SimpleNamespace(context_requests=context, generation_requests=generating)
        most = self._most(step)
        asks = most is not None and self.drafter.should_use_spec_decode(generating)
        for request in generating:  # reserve, for the most
            self.kv[request.request_id] = len(request.tokens) + (most if asks else 0)
            request.py_draft_tokens, request.own = [], 0
        if self.manager is not None:
            self.manager.prepare_resources(batch)
        if asks:
            self.drafter.update_max_total_draft_tokens(most)
            self.drafter.prepare_draft_tokens(batch, None)
            for request in generating:
                assert type(request.py_draft_tokens) is list
                assert all(type(t) is int for t in request.py_draft_tokens)
                assert len(request.py_draft_tokens) <= most
                request.own = len(request.py_draft_tokens)
                self.drafted += request.own
            self.drafter.pad_draft_tokens_for_cuda_graph(batch)
            if self.drafter._needs_padding_kv_extension:
                for request in generating:
                    self.kv[request.request_id] = len(request.tokens) + len(request.py_draft_tokens)
        for request in generating:
            self._verify(request)
        for request in context:
            self.kv[request.request_id] = len(request.tokens)
            request.tokens.append(target_says(request.tokens))  # prefill gives the first token
            request.py_batch_idx = None
            self.running.append(request)
        for i, request in enumerate(self.running):
            request.py_batch_idx = i
        if self.manager is not None:
            self.manager.update_resources(batch)
        for request in [r for r in self.running if r.over]:
            self._end(request)
            self.done[request.request_id] = request.tokens

    def _most(self, step: int) -> int | None:
        if self.drafter is None or step in self.skipped:
            return None
        return min(self.limits.get(step, self.drafter.max_draft_len), self.drafter.max_draft_len)

    def _verify(self, request: RequestStandIn) -> None:
        """One forward pass over the draft, padding included, and the engine's counts after it."""
        self.forwards += 1
        room = request.py_orig_prompt_len + request.py_max_new_tokens - len(request.tokens)
        accepted = 0
        for token in request.py_draft_tokens:
            if accepted + 1 >= room or not self.agrees(request.tokens, token):
                break
            request.tokens.append(token)
            accepted += 1
        request.tokens.append(target_says(request.tokens))
        self.accepted += min(accepted, request.own)
        request.py_num_accepted_draft_tokens = accepted
        request.py_rewind_len = len(request.py_draft_tokens) - accepted
        self.kv[request.request_id] -= request.py_rewind_len
        # The newest token was not fed yet.
        assert self.kv[request.request_id] == len(request.tokens) - 1, "the KV cache lost or kept a place"

    def agrees(self, text: Sequence[int], token: int) -> bool:
        """Whether the target says this token next."""
        return token == target_says(text)

    def _preempt(self, request: RequestStandIn) -> None:
        """The engine pauses it, which frees it; it comes back as a request that has yet to be prefilled."""
        self._end(request)
        self.waiting.append(request)

    def _end(self, request: RequestStandIn) -> None:
        self.running.remove(request)
        del self.kv[request.request_id]
        if self.manager is not None:
            self.manager.free_resources(request)
