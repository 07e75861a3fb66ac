"""Drafts with a small language model (speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318), of the target's vocabulary or of another (Timor et al., arXiv 2502.05202).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from spec_plugins.errors import ConfigError, UnavailableError, UnsupportedError
from spec_plugins.proposer import Drafts, Need, Proposer, Sampling, Step, Target

if TYPE_CHECKING:
    import torch

    from spec_plugins.proposers.draft_runner import DraftRunner, Job
    from spec_plugins.proposers.draft_vocabulary import Vocabulary

__all__ = ["DraftModelProposer"]

logger = logging.getLogger("spec_plugins")

SEED = 0x5EED
PREFILL = {"cpu": 256}  # by kind of device: what a small draft takes in within the default allowance
PREFILL_ELSEWHERE = 8192


class DraftModelProposer(Proposer):
    """A small causal language model writes each request's next tokens, one after the other.

    For any text, where the target is some ten times its draft's size or more. Chains only. Greedy requests
    get the draft's likeliest tokens. Sampled ones get tokens drawn from the draft's own distribution at the
    request's settings, with that distribution, where the engine verifies with probabilities; else the
    likeliest ones, which is as exact and accepted less often.

    Costs one forward pass of the draft over what is new of all requests, one for each further depth, and
    besides those some 2 ms a step and 0.1 ms a request, twice that where tokens are drawn. A new prompt is
    taken in ``prefill_tokens`` a step; until it is, its request drafts nothing. Memory is the draft's
    weights, and its keys and values: as many rows as requests, each as long as the longest.
    """

    uses = frozenset({Need.SAMPLING, Need.PROBABILITIES})

    def __init__(
        self,
        *,
        model: Annotated[
            str,
            Field(min_length=1, description="Folder of the draft: a transformers causal LM, safetensors."),
        ],
        draft_sample_method: Annotated[
            Literal["greedy", "probabilistic"] | None,
            Field(
                description="How tokens of sampled requests are chosen. Default: `probabilistic`, but "
                "`greedy` with the vocabulary `text`."
            ),
        ] = None,
        vocabulary: Annotated[
            Literal["same", "intersection", "text"],
            Field(
                description="`same`: the draft has the target's tokens. Else it may have others: "
                "`intersection` drafts those that both have, `text` encodes its text anew."
            ),
        ] = "same",
        dtype: Annotated[
            Literal["bfloat16", "float16", "float32", "float64"] | None,
            Field(description="Of the draft's weights. Default: the target's."),
        ] = None,
        cache_tokens: Annotated[
            int,
            Field(
                ge=64,
                le=2**28,
                description="Most tokens in the draft's cache: requests times the longest of them. The "
                "longest requests that do not fit get no drafts.",
            ),
        ] = 65_536,
        prefill_tokens: Annotated[
            int | None,
            Field(
                ge=16,
                le=2**24,
                description="Most tokens of new text that a step takes in; it must be done within "
                "`time_allowance_ms`. Default: 256 on a CPU, else 8,192.",
            ),
        ] = None,
    ) -> None:
        if vocabulary == "text" and draft_sample_method == "probabilistic":
            raise ConfigError(
                "options.draft_sample_method: 'probabilistic' needs drafts in the target's own tokens, which "
                "those of vocabulary 'text' are not; set it to 'greedy', or vocabulary to 'intersection'"
            )
        self._folder, self._vocabulary_kind, self._dtype = model, vocabulary, dtype
        self._method = draft_sample_method or ("greedy" if vocabulary == "text" else "probabilistic")
        self._asked_for_sampling = draft_sample_method == "probabilistic"
        self._cache_tokens, self._prefill_tokens = cache_tokens, prefill_tokens
        self._samples = False
        self._vocab_size = 0
        self._runner: DraftRunner | None = None
        self._vocabulary: Vocabulary | None = None
        self._columns: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen: dict[str, int] = {}
        """How many tokens of each request the vocabulary has read."""
        self._lost: set[str] = set()
        """Requests whose text the draft has no tokens for."""
        self._chance: dict[str, np.random.Generator] = {}
        self._serial = itertools.count()

    # With `text`, where its tokens begin anew depends on when it read the text.
    @property
    def depends_on(self) -> Literal["text", "steps"]:  # type: ignore[override]
        return "steps" if self._vocabulary_kind == "text" else "text"

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self._vocabulary_kind != "text"

    def load(self, target: Target) -> None:
        """Load the draft onto the target's device, compare the vocabularies, and try it.

        Raises:
            UnavailableError: torch or transformers is missing.
            ConfigError: the folder holds no model that can be used, or no tokenizer where one is needed.
            UnsupportedError: draft and target do not go together; names the first token that differs.
        """
        try:
            import torch

            from spec_plugins.proposers.draft_runner import DraftRunner, load_draft
            from spec_plugins.proposers.draft_vocabulary import make_vocabulary, read_tokens
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"proposer 'draft_model' needs the module {error.name!r}, which is not installed: "
                "pip install 'spec-plugins[transformers]'"
            ) from error
        kind = torch.device(target.device).type
        prefill = self._prefill_tokens or PREFILL.get(kind, PREFILL_ELSEWHERE)
        prefill = sys.maxsize if target.offline else prefill
        model = load_draft(self._folder, self._dtype or target.dtype, target.device)
        self._runner = runner = DraftRunner(model, self._cache_tokens, prefill)
        size = runner.model.vocab_size
        self._vocabulary = make_vocabulary(
            self._vocabulary_kind, self._folder, read_tokens(self._folder, size),
            read_tokens(target.model, target.vocab_size), size, target.vocab_size,
        )  # fmt: skip
        self._vocab_size = target.vocab_size
        choices, targets = self._vocabulary.choices, self._vocabulary.targets
        if choices is not None and targets is not None:
            self._columns = (
                torch.as_tensor(choices.astype(np.int64), device=target.device),
                torch.as_tensor(targets.astype(np.int64), device=target.device),
            )
        self._samples = (
            self._method == "probabilistic" and {Need.SAMPLING, Need.PROBABILITIES} <= target.provides
        )
        if self._asked_for_sampling and not self._samples:
            logger.warning(
                "draft_model: this engine does not verify with draft probabilities, so drafts are greedy"
            )
        self._rehearse(target.num_speculative_tokens)

    def _rehearse(self, depth: int) -> None:
        """Draft once, so that a model that cannot is refused now, and the first step is no slower."""
        from spec_plugins.proposers.draft_runner import Job

        assert self._runner is not None
        try:
            ids = np.ones(4, np.int32) % self._runner.model.vocab_size
            self._runner.draft([Job("rehearsal", ids, 0, min(2, depth))], self._chooser([], None, []).choose)
        except Exception as error:
            raise UnsupportedError(
                f"options.model: {self._folder!r} cannot be run as a draft: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._runner.forget("rehearsal")

    def propose(self, step: Step) -> Drafts:
        assert self._runner is not None
        assert self._vocabulary is not None
        wanted, jobs = [], []
        for i, (request_id, depth) in enumerate(
            zip(step.request_ids, np.minimum(step.budgets, step.depths).tolist(), strict=True)
        ):
            if depth < 1:
                continue  # what is new is taken in when drafts are wanted again
            job = self._job(step, i, request_id, depth)
            if job is None:
                self._runner.forget(request_id)
            else:
                wanted.append(i)
                jobs.append(job)
        n, width = len(step), max((job.depth for job in jobs), default=0)
        tokens, counts = np.zeros((n, width), np.int32), np.zeros(n, np.int32)
        probs: list[torch.Tensor | None] = [None] * n
        if not jobs:
            return Drafts(tokens, counts)
        sampled = self._sampling(step, wanted)
        chooser = self._chooser(jobs, sampled, [step.request_ids[i] for i in wanted])
        drafted = self._runner.draft(jobs, chooser.choose)
        for row, (i, job) in enumerate(zip(wanted, jobs, strict=True)):
            chosen = drafted[row, : int((drafted[row] >= 0).sum())]
            if len(chosen):
                mine = self._vocabulary.write(job.request_id, chosen)[: job.depth]
                tokens[i, : len(mine)], counts[i] = mine, len(mine)
                probs[i] = chooser.probs(row, len(mine))
        return Drafts(tokens, counts, None, probs if any(p is not None for p in probs) else None)

    def _job(self, step: Step, i: int, request_id: str, depth: int) -> Job | None:
        """What is to be done for a request; ``None`` where its draft would not know how to go on."""
        from spec_plugins.proposers.draft_runner import Job

        assert self._runner is not None
        assert self._vocabulary is not None
        tokens, model = step.tokens(i), self._runner.model
        seen = self._seen.get(request_id, 0)
        if seen > len(tokens) or step.fresh[i] > len(tokens) - seen:
            self.finish(request_id)  # other tokens than before
            seen = 0
        ids, same = self._vocabulary.read(request_id, tokens)
        self._seen[request_id] = len(tokens)
        same = min(same, seen) if ids is tokens else same
        if int(ids[same:].max(initial=0)) >= model.vocab_size:  # one of a padded LM head
            self._lost.add(request_id)
        room = model.max_model_len - len(ids)
        if not len(ids) or room < 1 or request_id in self._lost:
            return None
        return Job(request_id, ids, same, min(depth, room))

    def _sampling(self, step: Step, wanted: Sequence[int]) -> Sampling | None:
        s = step.sampling
        if s is None or not self._samples or not (s.temperature[list(wanted)] > 0).any():
            return None
        return s[list(wanted)]

    def _chooser(
        self, jobs: Sequence[Job], sampling: Sampling | None, request_ids: Sequence[str]
    ) -> _Chooser:
        chance = None
        if sampling is not None:
            chance = np.zeros((len(jobs), max(job.depth for job in jobs)))
            for row in np.flatnonzero(sampling.temperature > 0).tolist():
                depth = jobs[row].depth
                chance[row, :depth] = self._generator(request_ids[row]).random(depth)
        assert self._vocabulary is not None
        return _Chooser(self._vocabulary.size, self._columns, self._vocab_size, sampling, chance)

    def _generator(self, request_id: str) -> np.random.Generator:
        """A request's own chance: no other's, nor torch's, whose seeds the engine gives away."""
        found = self._chance.get(request_id)
        if found is None:
            found = self._chance[request_id] = np.random.default_rng((SEED, next(self._serial)))
        return found

    def finish(self, request_id: str) -> None:
        self._seen.pop(request_id, None)
        self._chance.pop(request_id, None)
        self._lost.discard(request_id)
        if self._vocabulary is not None:
            self._vocabulary.forget(request_id)
        if self._runner is not None:
            self._runner.forget(request_id)

    def gauges(self) -> Mapping[str, float]:
        if self._runner is None:
            return {}
        return {
            "requests": len(self._seen),
            "rows": len(self._runner),
            "cache_bytes": self._runner.cache_bytes,
        }


class _Chooser:
    """Picks tokens from the logits of one step, and keeps what they were drawn from."""

    def __init__(
        self,
        size: int,
        columns: tuple[torch.Tensor, torch.Tensor] | None,
        vocab_size: int,
        sampling: Sampling | None,
        chance: npt.NDArray[Any] | None,
    ) -> None:
        self.size, self.columns, self.vocab_size = size, columns, vocab_size
        self.sampling, self.chance = sampling, chance
        self._dense: torch.Tensor | None = None
        self._places: dict[int, int] = {}

    def choose(self, jobs: npt.NDArray[Any], logits: torch.Tensor, depth: int) -> torch.Tensor:
        shared = logits[:, : self.size] if self.columns is None else logits[:, self.columns[0]]
        chosen = shared.argmax(-1) if self.sampling is None else self._draw(jobs, shared, depth)
        return chosen if self.columns is None else self.columns[0][chosen]

    def _draw(self, jobs: npt.NDArray[Any], shared: torch.Tensor, depth: int) -> torch.Tensor:
        import torch

        from spec_plugins.verification import draw, target_probs

        assert self.sampling is not None
        assert self.chance is not None
        probs = target_probs(shared, self.sampling[jobs])
        chosen = draw(probs, torch.as_tensor(self.chance[jobs, depth], device=probs.device))
        sampled = np.flatnonzero(self.sampling.temperature[jobs] > 0)
        if self._dense is None:
            self._places = {int(job): place for place, job in enumerate(jobs[sampled])}
            self._dense = probs.new_zeros(len(sampled), self.chance.shape[1], self.vocab_size)
        if len(sampled):
            rows = torch.as_tensor([self._places[int(job)] for job in jobs[sampled]], device=probs.device)
            mine = probs[torch.as_tensor(sampled, device=probs.device)]
            if self.columns is None:
                self._dense[rows, depth, : self.size] = mine
            else:
                self._dense[rows[:, None], depth, self.columns[1][None]] = mine
        return chosen

    def probs(self, job: int, count: int) -> torch.Tensor | None:
        """``[count, vocab_size]`` float32: what a job's tokens were drawn from; ``None``: they were not."""
        place = self._places.get(job)
        return None if place is None or self._dense is None else self._dense[place, :count]
