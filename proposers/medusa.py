"""Medusa (arXiv 2401.10774): a head for each draft position, all run at once on the target's last state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from spec_plugins.errors import UnsupportedError
from spec_plugins.proposer import Drafts, IntArray, Need, Proposer, Step, Target
from spec_plugins.trees import USUAL_NODES, sparse_tree, spread

if TYPE_CHECKING:
    import torch

    from spec_plugins.heads.medusa import MedusaHeads

__all__ = ["MedusaProposer"]

# How likely each further guess of a head is, where its files do not say.
_UNKNOWN_ACCURACIES = tuple(tuple(0.6 * 0.75**head * 0.35**rank for rank in range(10)) for head in range(16))


class MedusaProposer(Proposer):
    """Runs the heads on the target's newest hidden state; holds 0 bytes of state.

    A step is one pass of all heads for the whole batch, whatever the context. Chains of each head's likeliest
    token, or with ``tree`` and on a host that verifies them one sparse tree for all: the nodes that, going by
    how often each head's first, second, … guess was right in training, are accepted most often.
    """

    bounded = True
    depends_on = "text"
    nested = True
    needs = frozenset({Need.HIDDEN_STATES})
    uses = frozenset({Need.TREES, Need.SAMPLING, Need.PROBABILITIES, Need.LM_HEAD})

    def __init__(
        self,
        model: Annotated[str, Field(min_length=1, description="Folder of the heads.")],
        tree: Annotated[
            bool, Field(description="Trees, where the engine verifies them; otherwise chains.")
        ] = False,
        max_draft_nodes: Annotated[
            int, Field(ge=1, le=1024, description="Draft tokens of a tree, unless the configuration says.")
        ] = USUAL_NODES,
        draft_sample_method: Annotated[
            Literal["greedy", "probabilistic"],
            Field(
                description="How a chain's tokens are chosen for requests that sample: the likeliest, or "
                "drawn from the heads' distributions, which are accepted more often."
            ),
        ] = "probabilistic",
        min_probability: Annotated[
            float,
            Field(ge=0, lt=1, description="A chain ends where its estimated probability falls below this."),
        ] = 0.0,
        dtype: Annotated[
            Literal["bfloat16", "float16", "float32", "float64"] | None,
            Field(description="Of the heads' weights. Default: the target's."),
        ] = None,
    ) -> None:
        self.model, self.tree, self.most_nodes = model, tree, max_draft_nodes
        self.draws, self.min_probability = draft_sample_method == "probabilistic", min_probability
        self.dtype = dtype

    @property
    def draft_nodes(self) -> int:
        return self.most_nodes if self.tree else 0

    def load(self, target: Target) -> None:
        """Load the heads.

        Raises:
            ConfigError: their files cannot be used.
            UnsupportedError: they are of another method, or do not fit the target.
        """
        from spec_plugins.heads.loading import load_head, own_generator, torch_dtype
        from spec_plugins.heads.medusa import MedusaHeads

        self._heads: MedusaHeads = load_head(
            self.model, MedusaHeads, "medusa", target, torch_dtype(self.dtype, target)
        )
        config = self._heads.config
        self._device, self._dtype = target.device, next(self._heads.parameters()).dtype
        self._vocab_size = target.vocab_size
        self._lm_head: torch.Tensor | None = None
        if config.lm_head == "target":
            if target.lm_head is None:
                raise UnsupportedError(
                    f"proposer {self.name!r}: the heads in {self.model!r} use the target's LM head, which "
                    "this engine does not give; use heads that have their own, or no tensor parallelism"
                )
            whole = target.lm_head()
            self._lm_head = (whole if self._heads.token_map is None else whole[self._heads.token_map]).to(
                self._dtype
            )
        self._draws = self.draws and Need.PROBABILITIES in target.provides
        self._generator = own_generator(self.name, target.device)
        self._tree: tuple[IntArray, IntArray, IntArray] | None = None
        if self.tree and Need.TREES in target.provides:
            depth = min(config.num_heads, target.num_speculative_tokens)
            accuracies = (config.accuracies or _UNKNOWN_ACCURACIES)[:depth]
            ranks = min(config.draft_vocab_size, *map(len, accuracies))
            self._tree = sparse_tree([row[:ranks] for row in accuracies], target.max_draft_nodes)

    def propose(self, step: Step) -> Drafts:
        import torch

        states = step.hidden_states
        if states is None:
            return Drafts.empty(len(step))
        depths = np.minimum(np.minimum(step.budgets, step.depths), self._heads.config.num_heads)
        ready = np.flatnonzero((depths > 0) & (np.diff(states.offsets) > 0))
        if not len(ready):
            return Drafts.empty(len(step))
        with torch.inference_mode():
            newest = states.values[
                torch.from_numpy(states.offsets[1:][ready] - 1).to(states.values.device).long()
            ]
            heard = self._heads(newest.to(self._device, self._dtype), int(depths[ready].max()))
            logits = self._heads.logits(heard, self._lm_head).float()
            if self._tree is not None:
                drafts = self._trees(logits, step.budgets[ready], depths[ready])
            else:
                drafts = self._chains(logits, depths[ready], step, ready)
        return spread(drafts, ready.tolist(), len(step))

    def _chains(
        self, logits: torch.Tensor, depths: IntArray, step: Step, ready: npt.NDArray[np.intp]
    ) -> Drafts:
        import torch

        from spec_plugins.verification import draw, target_probs

        chosen, counts = logits.argmax(-1), depths.astype(np.int32)
        probs: list[torch.Tensor | None] | None = None
        sampling = step.sampling[ready] if self._draws and step.sampling is not None else None
        draws = np.zeros(len(ready), bool) if sampling is None else sampling.temperature > 0
        if sampling is not None and draws.any():
            shaped = target_probs(logits, sampling)
            chance = torch.rand(
                chosen.numel(), dtype=torch.float64, device=chosen.device, generator=self._generator
            )
            drawn = draw(shaped.flatten(0, 1), chance).view_as(chosen)
            chosen = torch.where(torch.from_numpy(draws).to(chosen.device)[:, None], drawn, chosen)
        if self.min_probability:
            spread_out = logits.softmax(-1)
            path = spread_out.gather(-1, chosen[..., None])[..., 0].cumprod(1)
            # Of the likeliest token, not the drawn one: whether a position is drafted must not depend on it.
            best = spread_out.amax(-1) * torch.nn.functional.pad(path[:, :-1], (1, 0), value=1.0)
            counts = np.minimum(counts, (best >= self.min_probability).int().cumprod(1).sum(1).cpu().numpy())
        if sampling is not None and draws.any():
            ids = self._heads.target_ids(torch.arange(logits.shape[-1], device=logits.device))
            probs = [None] * len(ready)
            for i in np.flatnonzero(draws).tolist():
                wide = shaped.new_zeros(int(counts[i]), self._vocab_size)
                wide[:, ids] = shaped[i, : counts[i]]
                probs[i] = wide
        tokens = self._heads.target_ids(chosen).to("cpu", torch.int32).numpy()
        return Drafts(tokens, counts.astype(np.int32), None, probs)

    def _trees(self, logits: torch.Tensor, budgets: IntArray, depths: IntArray) -> Drafts:
        import torch

        assert self._tree is not None
        parents, heads, ranks = self._tree
        best = logits.topk(int(ranks.max()) + 1, dim=-1).indices
        guesses = self._heads.target_ids(best).to("cpu", torch.int32).numpy()
        n = len(guesses)
        # Where no request goes as deep as the tree, its deepest heads were not run, and are cut below.
        tokens = guesses[:, np.minimum(heads, guesses.shape[1] - 1), ranks]
        # Nodes stand in the order of their use, so that any beginning is the best tree of its size; one that
        # is too deep for a request ends its tree there.
        shallow = heads[None] < depths[:, None]
        counts = np.minimum(np.where(shallow.all(1), len(heads), shallow.argmin(1)), budgets)
        return Drafts(tokens, counts.astype(np.int32), np.tile(parents, (n, 1)))
