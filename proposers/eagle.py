"""EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): a small head over the target's hidden states."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from spec_plugins.errors import UnsupportedError
from spec_plugins.proposer import Drafts, Need, Packed, Proposer, Step, Target
from spec_plugins.trees import spread

if TYPE_CHECKING:
    import torch

    from spec_plugins.checkpoints.head import HeadConfig
    from spec_plugins.heads.eagle import EagleHead
    from spec_plugins.heads.eagle_runner import EagleRunner

__all__ = ["Eagle3Proposer", "EagleProposer"]

logger = logging.getLogger("spec_plugins")

# A request with more to feed than this is fed by itself, so that others are not padded to its length.
_TOGETHER = 32
# The most positions in one forward pass of the head.
_CHUNK = 512


@dataclasses.dataclass(slots=True)
class _Fed:
    """What of a request the head has seen."""

    row: int
    """Its row of the cache."""
    entries: int = 0
    """Keys and values of true features in its row."""
    position: int = 0
    """The next position that it has not seen."""
    lost: bool = False
    """Whether the cache was too small for it once; then what is there of it is no more use."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """What is new of a request: its last ``count`` positions but one."""

    request: int
    held: _Fed
    count: int


class _EagleProposer(Proposer):
    """Feeds the head the features of every position that the target has processed, then drafts from its own.

    A step costs one forward pass of the head over what is new in all requests, and one for each further
    draft position; attention alone grows with the context. Chains, or with ``topk`` more than 1 and on a host
    that verifies them dynamic trees (EAGLE-2, arXiv 2406.16858): each position expands the ``topk`` likeliest
    nodes, and the likeliest of all within the budget are verified. Positions that the target skipped, since a
    prefix was cached, are missing from what the head attends to, and are counted. Memory: keys and values of
    the head's layers (of a head for SmolLM2-135M in float32 1536 bytes a token), for as many tokens as there
    are requests times the longest of them, ``cache_tokens`` at most; freed when no request is left.
    """

    bounded = True
    depends_on = "text"
    uses = frozenset({Need.TREES, Need.SAMPLING, Need.PROBABILITIES, Need.EMBEDDINGS, Need.LM_HEAD})
    method: ClassVar[Literal["eagle", "eagle3"]]

    def __init__(
        self,
        model: Annotated[str, Field(min_length=1, description="Folder of the head.")],
        topk: Annotated[int, Field(ge=1, le=32, description="Branches of a tree's node; 1: chains.")] = 1,
        max_draft_nodes: Annotated[
            int, Field(ge=1, le=1024, description="Draft tokens of a tree, unless the configuration says.")
        ] = 24,
        draft_sample_method: Annotated[
            Literal["greedy", "probabilistic"],
            Field(
                description="How a chain's tokens are chosen for requests that sample: the likeliest, or "
                "drawn from the head's distribution, which is accepted more often."
            ),
        ] = "probabilistic",
        min_probability: Annotated[
            float,
            Field(ge=0, lt=1, description="A draft ends where its estimated probability falls below this."),
        ] = 0.0,
        cache_tokens: Annotated[
            int,
            Field(
                ge=64,
                le=1 << 28,
                description="Most tokens in the head's cache: requests times the longest of them. Requests "
                "that do not fit get no drafts.",
            ),
        ] = 1 << 18,
        dtype: Annotated[
            Literal["bfloat16", "float16", "float32", "float64"] | None,
            Field(description="Of the head's weights. Default: the target's."),
        ] = None,
    ) -> None:
        self.model, self.topk, self.most_nodes = model, topk, max_draft_nodes
        self.draws, self.min_probability = draft_sample_method == "probabilistic", min_probability
        self.dtype, self.cache_tokens = dtype, cache_tokens
        self._fed: dict[str, _Fed] = {}
        self._config: HeadConfig | None = None
        self._skipped = 0

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self.topk == 1

    @property
    def draft_nodes(self) -> int:
        return self.most_nodes if self.topk > 1 else 0

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Those that the head's files name; raises :class:`ConfigError` where they cannot be used."""
        from spec_plugins.checkpoints import read_head
        from spec_plugins.checkpoints.head import EagleConfig
        from spec_plugins.heads.loading import check_method

        if self._config is None:
            self._config = read_head(self.model).config
        check_method(self._config, self.method, self.model)
        assert isinstance(self._config, EagleConfig)
        return self._config.layers_taken(num_layers)

    def load(self, target: Target) -> None:
        """Load the head.

        Raises:
            ConfigError: its files cannot be used.
            UnsupportedError: it is of another method, or does not fit the target.
        """
        from spec_plugins.heads.eagle import EagleHead
        from spec_plugins.heads.eagle_runner import EagleRunner
        from spec_plugins.heads.loading import load_head, own_generator, torch_dtype

        head = load_head(self.model, EagleHead, self.method, target, torch_dtype(self.dtype, target))
        self._config = config = head.config
        self._limit = min(config.max_position_embeddings, target.max_model_len)
        self._topk = min(self.topk, config.draft_vocab_size) if Need.TREES in target.provides else 1
        self._draws = self.draws and Need.PROBABILITIES in target.provides
        self._generator = own_generator(self.name, target.device)
        self._runner: EagleRunner = EagleRunner(
            head,
            self._own_or_targets(head, "embed_tokens", "embeddings", target.embeddings),
            self._own_or_targets(head, "lm_head", "LM head", target.lm_head),
            target.vocab_size,
            self.cache_tokens,
        )
        # What drafting puts behind the true entries of a row.
        self._ahead = self._topk * target.num_speculative_tokens
        if config.max_position_embeddings < target.max_model_len:
            logger.warning(
                "proposer %r: the head in %r was made for %d tokens; longer requests get no drafts",
                self.name,
                self.model,
                config.max_position_embeddings,
            )
        self._rehearse()

    def _rehearse(self) -> None:
        """A step before the first, which would otherwise be late."""
        import torch

        step = Step.rehearsal()
        width = self._runner.head.config.features * self._runner.head.config.target_hidden_size
        shown = Packed(torch.zeros(7, width), np.array([0, 7], np.int32))
        three = self.method == "eagle3"
        self.propose(
            dataclasses.replace(
                step, hidden_states=None if three else shown, aux_hidden_states=shown if three else None
            )
        )
        self.finish(step.request_ids[0])

    def _own_or_targets(
        self, head: EagleHead, name: str, words: str, targets: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        own = getattr(head, name, None)
        if own is not None:
            return own.weight  # type: ignore[no-any-return]
        if targets is None:
            raise UnsupportedError(
                f"proposer {self.name!r}: the head in {self.model!r} uses the target's {words}, which this "
                "engine does not give; use a head that has its own, or no tensor parallelism"
            )
        return targets()

    def propose(self, step: Step) -> Drafts:
        import torch

        from spec_plugins.proposers.eagle_drafting import Start, draft_chains, draft_trees

        states = step.aux_hidden_states if self.method == "eagle3" else step.hidden_states
        if states is None:
            return Drafts.empty(len(step))
        depths = np.minimum(step.budgets, step.depths)
        with torch.inference_mode():
            fed = self._feed(step, states)
            # In the order of their rows, so that those that stand together are seen without a copy.
            ready = sorted((i for i in fed if depths[i] > 0), key=lambda i: self._held(step, i).row)
            if not ready:
                return Drafts.empty(len(step))
            held = [self._held(step, i) for i in ready]
            start = Start(
                [h.row for h in held],
                torch.tensor([h.entries for h in held], device=self._runner.device),
                max(h.entries for h in held),
                torch.tensor([h.position for h in held], device=self._runner.device),
                torch.stack([fed[i][0] for i in ready]),
                torch.stack([fed[i][1] for i in ready]),
            )
            if self._topk > 1:
                drafts = draft_trees(
                    self._runner, start, step.budgets[ready], depths[ready], self._topk, self.min_probability
                )
            else:
                sampling = step.sampling if self._draws else None
                drafts = draft_chains(
                    self._runner, start, depths[ready], sampling and sampling[ready], self._generator,
                    self.min_probability,
                )  # fmt: skip
        return spread(drafts, ready, len(step))

    def _feed(self, step: Step, states: Packed[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Run the head over what is new. For each request that can be drafted for: the features that follow
        its last true position, and what the LM head takes there."""
        work = []
        for i, request_id in enumerate(step.request_ids):
            length, shown = int(step.lengths[i]), int(states.offsets[i + 1] - states.offsets[i])
            held = self._fed.get(request_id)
            if held is None or step.fresh[i] >= length:
                held = self._fed[request_id] = _Fed(self._runner.kv.row(request_id))
            first = max(length - 1 - shown, held.position)
            if first < length - 1 < self._limit:
                self._skipped += first - held.position
                held.position = first
                work.append(_Work(i, held, length - 1 - first))
        # Known only now that every request has its row.
        room = self._runner.kv.longest - self._ahead
        for w in work:
            if w.held.lost or w.held.entries + w.count > room:
                w.held.lost = True
        work = sorted((w for w in work if not w.held.lost), key=lambda w: w.held.row)
        together = [w for w in work if w.count <= _TOGETHER]
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in ([w] for w in work if w.count > _TOGETHER):
            self._feed_group(step, states, group, found)
        if together:
            self._feed_group(step, states, together, found)
        return found

    def _feed_group(
        self,
        step: Step,
        states: Packed[torch.Tensor],
        group: list[_Work],
        found: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        import torch

        runner, longest = self._runner, max(w.count for w in group)
        requests = np.array([w.request for w in group])
        for at in range(0, longest, _CHUNK):
            counts = np.array([min(_CHUNK, w.count - at) for w in group])
            entries = np.array([w.held.entries for w in group])
            positions = np.array([w.held.position for w in group])
            # Shorter ones repeat their last position, which writes the same once more.
            ahead = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
            shown = states.offsets[requests + 1] - np.array([w.count for w in group]) + at
            ids = step.token_ids[step.rows[requests][:, None], positions[:, None] + 1 + ahead]
            ids, slots, positions_fed = torch.from_numpy(
                np.stack(
                    [ids.clip(0, runner.vocab_size - 1), entries[:, None] + ahead, positions[:, None] + ahead]
                )
            ).to(runner.device)
            index = torch.from_numpy((shown[:, None] + ahead).astype(np.int64)).to(states.values.device)
            extent = int((entries + counts).max())
            following, heard = runner.forward(
                ids,
                runner.features(states.values[index]),
                positions_fed,
                [w.held.row for w in group],
                slots,
                torch.arange(extent, device=runner.device) <= slots[:, :, None],
            )
            for row, (w, n) in enumerate(zip(group, counts.tolist(), strict=True)):
                w.held.entries, w.held.position = w.held.entries + n, w.held.position + n
                if at + n == w.count:
                    found[w.request] = following[row, n - 1], heard[row, n - 1]

    def _held(self, step: Step, i: int) -> _Fed:
        return self._fed[step.request_ids[i]]

    def finish(self, request_id: str) -> None:
        if self._fed.pop(request_id, None) is not None:
            self._runner.kv.discard(request_id)

    def gauges(self) -> Mapping[str, float]:
        return {
            "requests": len(self._fed),
            "requests_too_long": sum(held.lost for held in self._fed.values()),
            "cache_bytes": self._runner.kv.nbytes,
            "positions_without_states": self._skipped,
        }


class EagleProposer(_EagleProposer):
    """EAGLE: a head over the target's last layer, with its whole LM head for every position. For
    SmolLM2-135M it holds 1536 bytes a token of context."""

    needs = frozenset({Need.HIDDEN_STATES})
    method = "eagle"


class Eagle3Proposer(_EagleProposer):
    """EAGLE-3: a head over several of the target's layers, with its own LM head, often for fewer tokens. For
    SmolLM2-135M it holds 1536 bytes a token of context."""

    needs = frozenset({Need.AUX_HIDDEN_STATES})
    method = "eagle3"
