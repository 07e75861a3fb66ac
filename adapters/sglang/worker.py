"""The worker behind an algorithm of ours: SGLang's n-gram worker, with a proposer in place of its corpus."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from spec_plugins.adapters.sglang.batch_state import BatchState, Verified
from spec_plugins.adapters.sglang.draft_tree import Mask, Tokens, verify_arrays
from spec_plugins.adapters.sglang.engine_faults import mend
from spec_plugins.adapters.sglang.hooks import EAGLE_SAMPLE
from spec_plugins.adapters.sglang.layer_states import LayerStates
from spec_plugins.adapters.sglang.server_figures import ServerFigures
from spec_plugins.adapters.sglang.settings import configuration
from spec_plugins.adapters.sglang.target_model import describe
from spec_plugins.adapters.sglang.target_verify import (
    exact_sample,
    sampled_wrongly,
    takes_probabilities,
    weighs,
)
from spec_plugins.driver import Driver
from spec_plugins.errors import UnsupportedError
from spec_plugins.hooks import wrap
from spec_plugins.proposer import Drafts, Need

if TYPE_CHECKING:
    import torch

__all__ = ["SpecWorker"]

logger = logging.getLogger("spec_plugins")


class SpecWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
    """Drafts for one scheduler process, by one proposer; on the first rank, whose drafts all ranks take.

    SGLang's own worker does the rest: verify batches, grammars, log probabilities, the KV cache. The width of
    a step is that of its longest draft, where no captured graph fixes it.
    """

    draft_token_num: int
    """The width of the step at hand; set by SGLang's own worker to the widest."""
    _target_worker: Any

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """
        Raises:
            SpecPluginsError: the configuration or the proposer cannot be used; SGLang's start-up ends there.
        """
        with _no_corpus():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        self.config = configuration(
            algorithm.proposer, get_spec().speculative_num_steps, get_spec().speculative_num_draft_tokens
        )
        self.proposer = self.config.create_proposer()
        if not wrap(EAGLE_SAMPLE, _verify):
            raise UnsupportedError(f"{EAGLE_SAMPLE.path} is not as expected; see `spec-plugins doctor`")
        mend()
        self.widest = int(get_spec().speculative_num_draft_tokens)
        self.driver: Driver | None = None
        self.state: BatchState | None = None
        self.layer_states: LayerStates | None = None
        self._figures: ServerFigures | None = None
        self._buffers: dict[int, dict[str, Any]] = {}
        self._drafted: tuple[Tokens, Mask]
        self._step: Verified | None = None
        self._begun = self._returned = 0
        """Steps that were verified, and those of them that SGLang has the outcome of."""
        self._logged = False

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """The target's pools are there, and its weights are loaded: load the proposer."""
        super().alloc_memory_pool(**kwargs)
        self._buffers[self.draft_token_num] = self._width_buffers()
        parallel = get_parallel()
        self._group = parallel.tp_group
        self.layer_states = LayerStates(self.model_runner, self.proposer)
        self._target_worker = self.layer_states.kept_by(self._target_worker)
        if self._group.world_size > 1 and self._group.rank_in_group:
            return
        alone = self._group.world_size == 1
        provides = self.layer_states.provides
        if (get_spec().speculative_eagle_topk or 1) > 1:
            provides |= {Need.TREES}
        if alone and Need.PROBABILITIES in self.proposer.needs | self.proposer.uses and weighs():
            provides |= {Need.PROBABILITIES}
        target = describe(
            self.model_runner,
            self.config,
            self.proposer,
            max_num_seqs=self.max_batch_size,
            provides=provides,
            alone=alone,
        )
        self.driver = Driver(self.proposer, target, self.config)
        self.state = BatchState(self.driver)
        self._figures = ServerFigures(self.driver)
        logger.info(
            "proposer %r drafts up to %d tokens, %d positions deep",
            self.config.proposer,
            self.widest - 1,
            self.config.num_speculative_tokens,
        )

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """A step: a prefill as it is, or drafting and verifying."""
        decodes = batch.forward_mode.is_decode()
        if not decodes:
            self._set_width(self.widest)
        result = super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)
        if decodes:
            self._hand_back(result)
        elif self.state is not None and batch.forward_mode.is_extend():
            self._contained(self.state.see_prefill, batch, self._shown(result))
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang has a step's outcome, and hands out its tokens next."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)
        self._returned += 1
        if self._returned == self._begun:  # with overlap another may be on its way
            self._settle()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang says that a request is over."""
        super().note_request_finished(rid=rid, natural_stop=natural_stop)
        if self.state is not None:
            last = rid in self.state.tokens and len(self.state.tokens) == 1
            self._contained(self.state.finish, rid)
            if last and self._figures is not None:
                self._figures.refresh(now=True)  # the next step may be far

    def clear_cache_pool(self) -> None:
        """Nothing: drafts depend on no cache of SGLang's."""

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        if batch.forward_mode.is_decode():
            self._draft(batch)
        super()._prepare_for_speculative_decoding(batch)
        if batch.forward_mode.is_target_verify():
            batch.spec_info.spec_plugins_worker = self

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Tokens, Mask]:
        return self._drafted

    def _update_ngram_corpus(self, batch: Any) -> None:
        pass

    def _draft(self, batch: Any) -> None:
        """Ask for drafts, and set the step's width."""
        arrays: tuple[Tokens, Mask] | None = None
        if self.state is not None:
            self._settle()
            arrays = self._contained(self._ask, batch)
            if arrays is None:  # our own fault: the last tokens alone
                self._step = None
                arrays = _no_drafts(batch, self._least_width())
        if self._group.world_size > 1:
            arrays = self._group.broadcast_object(arrays, src=0)
        assert arrays is not None
        self._drafted = arrays
        self._set_width(len(arrays[0]) // len(batch.reqs))

    def _ask(self, batch: Any) -> tuple[Tokens, Mask]:
        assert self.state is not None
        step, last_tokens = self.state.propose(batch)
        self._step = step
        width = max(self._least_width(), 1 + int(step.drafts.counts.max(initial=0)))
        return verify_arrays(step.drafts, last_tokens, width)

    def _least_width(self) -> int:
        """Captured graphs verify one width only."""
        return self.widest if self.model_runner.decode_cuda_graph_runner is not None else 1

    def _hand_back(self, result: Any) -> None:
        """Pad what the next step is told to the one width that SGLang keeps it in, and note the outcome."""
        self._begun += 1
        following, width = result.next_draft_input, self.draft_token_num
        tokens = following.accept_tokens.reshape(-1, width)
        if width != self.widest:
            padded = tokens.new_zeros((len(tokens), self.widest))
            padded[:, :width] = tokens
            following.accept_tokens = padded.flatten()
            following.draft_token_num = self.widest
            following.num_tokens_per_req = following.num_tokens_for_logprob_per_req = self.widest
            result.speculative_output_stride = width
        step = self._step
        if step is not None:
            step.accept_lens, step.accept_tokens = result.accept_lens, tokens
            step.states = self._shown(result)
            if not self.enable_overlap:
                self._settle()
        if self._figures is not None:
            self._figures.refresh()

    def _shown(self, result: Any) -> Mapping[Need, torch.Tensor]:
        """Hidden states of a forward pass, where any are wanted."""
        assert self.layer_states is not None
        return self._contained(self.layer_states.of, result.logits_output) or {}

    def _settle(self) -> None:
        """Report the step before, if that was not done."""
        step, self._step = self._step, None
        if step is not None and step.accept_lens is not None and self.state is not None:
            self._contained(self.state.settle, step)

    def sample(
        self,
        original: Callable[..., Any],
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any,
    ) -> Any:
        """``eagle_sample``, exact on every device.

        Args:
            original: SGLang's own, with all its arguments.
        """
        step, state = self._step, self.state
        if step is not None and state is not None and state.wants_predictions:
            best = logits_output.next_token_logits.argmax(-1)
            step.predictions = best.reshape(len(batch.reqs), -1)
        drawn = (
            step.drafts
            if step is not None and takes_probabilities(batch.sampling_info, step.drafts)
            else None
        )
        if drawn is not None or sampled_wrongly(batch.sampling_info, str(self.device)):
            sampler = self.model_runner.sampler
            found = exact_sample(sampler, verify_input, batch, logits_output, grammar_mask, drawn)
        else:
            found = original()
        if step is not None:
            step.accept_index = found[2]
        return found

    def _set_width(self, width: int) -> None:
        """Switch to the buffers of a draft width; made when it is first met."""
        if width == self.draft_token_num:
            return
        self.draft_token_num = width
        if width not in self._buffers:
            self._buffers[width] = self._width_buffers()
        self.__dict__.update(self._buffers[width])

    def _width_buffers(self) -> dict[str, Any]:
        """What ``_init_preallocated_tensors`` makes."""
        before = dict(vars(self))
        self._init_preallocated_tensors()
        return {name: value for name, value in vars(self).items() if before.get(name) is not value}

    def _contained(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A fault of the adapter costs drafts, and not the engine."""
        try:
            return call(*arguments)
        except Exception:
            if not self._logged:
                self._logged = True
                logger.exception("the SGLang adapter failed; SGLang goes on without drafts (logged once)")
            return None

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        """Refused: SGLang's own n-gram algorithm has such a corpus.

        Raises:
            UnsupportedError: always; SGLang answers the request with it.
        """
        raise UnsupportedError(
            f"corpus {corpus_id!r}: proposer {self.config.proposer!r} takes none; SGLang's own NGRAM does"
        )

    def remove_external_corpus(self, corpus_id: str) -> None:
        """There is none."""

    def list_external_corpora(self) -> dict[str, int]:
        """None."""
        return {}


class _NoCorpus:
    """Stands where SGLang's n-gram worker keeps its corpus."""

    def __init__(self, **_: Any) -> None:
        pass

    def erase_match_state(self, request_ids: list[str]) -> None:
        pass


@contextlib.contextmanager
def _no_corpus() -> Iterator[None]:
    """Keep SGLang from compiling and filling a corpus that nobody asks."""
    kept, ngram_worker.NgramCorpus = ngram_worker.NgramCorpus, _NoCorpus
    try:
        yield
    finally:
        ngram_worker.NgramCorpus = kept


def _verify(original: Callable[..., Any]) -> Callable[..., Any]:
    """``eagle_sample`` for our verify batches; others as they are."""

    def eagle_sample(
        verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        worker: SpecWorker | None = getattr(verify_input, "spec_plugins_worker", None)
        if worker is None:
            return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        rest = functools.partial(original, verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        return worker.sample(rest, verify_input, batch, logits_output, grammar_mask)

    return eagle_sample


def _no_drafts(batch: Any, width: int) -> tuple[Tokens, Mask]:
    """A batch of last tokens alone, taken from SGLang's own lists."""
    last = []
    for i, request in enumerate(batch.reqs):
        missing = int(batch.seq_lens_cpu[i]) + 1 - len(request.origin_input_ids) - len(request.output_ids)
        if missing > 0:
            n, row = int(batch.spec_info.accept_lens[i]), batch.spec_info.accept_tokens
            last.append(int(row.reshape(len(batch.reqs), -1)[i, n - 1]))
        else:
            last.append(int((request.output_ids or request.origin_input_ids)[-1]))
    return verify_arrays(Drafts.empty(len(last)), np.array(last, np.int32), width)
