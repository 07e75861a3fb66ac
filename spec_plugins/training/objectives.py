"""What each kind of head learns: its loss, and how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from spec_plugins.checkpoints.head import Head, MedusaConfig
from spec_plugins.checkpoints.layouts import write_head
from spec_plugins.errors import UnsupportedError
from spec_plugins.heads.eagle import EagleHead
from spec_plugins.heads.medusa import MedusaHeads
from spec_plugins.training.batches import Batch, Teacher

__all__ = ["EagleObjective", "MedusaObjective", "Objective", "Score"]

RANKS = 10
"""How many guesses of a Medusa head are scored."""


@dataclass(slots=True)
class Score:
    """Sums over answered tokens, for each draft position."""

    loss: torch.Tensor
    """``[positions]``: summed cross entropy."""
    learned: torch.Tensor
    """``[positions]``: how many it was summed over."""
    right: torch.Tensor
    """``[positions, ranks]``: how often the first, second, … guess was the token."""
    survived: torch.Tensor
    """``[positions]``: how often the first guesses were right up to this position."""
    tokens: torch.Tensor
    """``[positions]``: of how many."""

    @classmethod
    def zero(cls, positions: int, ranks: int) -> Score:
        """Nothing scored."""

        def sums() -> torch.Tensor:
            return torch.zeros(positions)

        return cls(sums(), sums(), torch.zeros(positions, ranks), sums(), sums())

    def add(self, other: Score) -> None:
        """Add another's sums."""
        for name in self.__dataclass_fields__:
            getattr(self, name).add_(getattr(other, name))

    @property
    def accuracy(self) -> list[float]:
        """Of the first guess, at each position."""
        return (self.right[:, 0] / self.tokens.clamp(min=1)).tolist()

    @property
    def mean_loss(self) -> float:
        """Over all positions."""
        return float(self.loss.sum() / self.learned.sum().clamp(min=1))

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, the target's own included, if the text is what the target says."""
        return 1.0 + float((self.survived / self.tokens.clamp(min=1)).sum())


class Objective(ABC):
    """A head, and what it is to learn."""

    module: nn.Module
    positions: int
    ranks = 1
    ahead = 2
    """How far after an entry the token is that its first position is about."""

    def __init__(self, lm_head: torch.Tensor, draft_ids: torch.Tensor, vocab_size: int, decay: float) -> None:
        """
        Args:
            lm_head: ``[vocab, hidden]``, the target's.
            draft_ids: ``[draft_vocab]`` int64, ascending: the tokens that can be drafted.
            vocab_size: the target's.
            decay: the weight of each position's loss, of the one before.
        """
        self.decay, self.draft_ids = decay, draft_ids
        self.teacher_head = lm_head[draft_ids].float()
        self.to_draft = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_ids.device)
        self.to_draft[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)

    @abstractmethod
    def heard(self, batch: Batch) -> list[torch.Tensor]:
        """For each position ``s``, what its LM head takes, ``[batch, n + 1 - ahead - s, hidden]``; entry
        ``i`` is about the token ``ahead + s`` after it."""

    @abstractmethod
    def logits(self, heard: torch.Tensor, position: int) -> torch.Tensor:
        """``[m, draft_vocab]`` of ``[m, hidden]``."""

    @abstractmethod
    def save(self, folder: Path, score: Score, dtype: torch.dtype, layout: str | None) -> None:
        """Write it as it stands into a new folder.

        Args:
            folder: new.
            score: of the held-out conversations; goes where files tell of it.
            dtype: of the weights.
            layout: of the files; ``None``: the one that most engines load by themselves, if it holds all.
        """

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, Score]:
        """The loss to lower, and the score of a batch."""
        teacher = Teacher(batch, self.teacher_head, self.to_draft)
        score, total, alive = Score.zero(self.positions, self.ranks), batch.last.new_zeros(()), None
        for s, heard in enumerate(self.heard(batch)):
            rows = heard.shape[1] - 1  # the last one is about a token that is not there
            wanted, drafts, probs, learns = teacher.ahead(self.ahead + s, rows)
            logits = self.logits(heard[:, :rows][wanted], s)
            # Behind the draft vocabulary there may be others, which the target is taken never to say.
            losses = -(probs * logits.log_softmax(-1)[:, : probs.shape[1]]).sum(-1)[learns]
            if len(losses):
                total = total + self.decay**s * losses.mean()
            with torch.no_grad():
                ranks = min(self.ranks, logits.shape[1])
                hits = logits.topk(ranks).indices == drafts[:, None]
                first = torch.zeros_like(wanted)
                first[wanted] = hits[:, 0]
                alive = first if alive is None else alive[:, :rows] & first
                score.loss[s] = float(losses.sum())
                score.learned[s] = len(losses)
                score.right[s, :ranks] = hits.sum(0).float().cpu()
                score.survived[s] = float((alive & wanted).sum())
                score.tokens[s] = len(drafts)
        return total, score


class EagleObjective(Objective):
    """An EAGLE-3 or EAGLE head that drafts from every position of the text, as it will when serving."""

    module: EagleHead

    def __init__(
        self, module: EagleHead, embeddings: torch.Tensor, lm_head: torch.Tensor, draft_ids: torch.Tensor,
        positions: int, decay: float = 0.8,
    ) -> None:  # fmt: skip
        super().__init__(lm_head, draft_ids, module.config.vocab_size, decay)
        self.module, self.positions = module, positions
        self.embeddings = embeddings.float()

    def heard(self, batch: Batch) -> list[torch.Tensor]:
        states = batch.aux if self.module.config.method == "eagle3" else batch.last
        return self.module.unroll(self.embeddings[batch.tokens], states, self.positions)

    def logits(self, heard: torch.Tensor, position: int) -> torch.Tensor:
        if self.module.config.method == "eagle3":
            return self.module.lm_head(heard)  # type: ignore[no-any-return]
        return heard @ self.teacher_head.mT

    def save(self, folder: Path, score: Score, dtype: torch.dtype, layout: str | None) -> None:
        head = Head(self.module.config, _tensors(self.module, dtype))
        if layout is None and self.module.config.method == "eagle3":
            try:
                write_head(head, folder, "eagle")
                return
            except UnsupportedError:
                pass  # it cannot hold all of this head
        write_head(head, folder, layout or "spec-plugins")


class MedusaObjective(Objective):
    """Medusa heads."""

    module: MedusaHeads
    ranks = RANKS

    def __init__(
        self, module: MedusaHeads, lm_head: torch.Tensor, draft_ids: torch.Tensor, decay: float = 0.8
    ) -> None:
        super().__init__(lm_head, draft_ids, module.config.vocab_size, decay)
        self.module, self.positions = module, module.config.num_heads

    def heard(self, batch: Batch) -> list[torch.Tensor]:
        n = batch.last.shape[1]
        heard = self.module(batch.last, self.positions)
        return [heard[:, : n - 1 - s, s] for s in range(min(self.positions, n - 2))]

    def logits(self, heard: torch.Tensor, position: int) -> torch.Tensor:
        if self.module.config.lm_head == "own":  # of heads that were begun elsewhere
            return self.module.lm_heads[position](heard)  # type: ignore[no-any-return]
        return self.module.logits(heard[:, None], self.teacher_head)[:, 0]

    def save(self, folder: Path, score: Score, dtype: torch.dtype, layout: str | None) -> None:
        rates = score.right / score.tokens.clamp(min=1)[:, None]
        accuracies = tuple(tuple(round(x, 4) for x in row) for row in rates.tolist())
        config: MedusaConfig = self.module.config.model_copy(update={"accuracies": accuracies})
        write_head(Head(config, _tensors(self.module, dtype)), folder, layout or "spec-plugins")


def _tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().contiguous()
        for name, tensor in module.state_dict().items()
    }
