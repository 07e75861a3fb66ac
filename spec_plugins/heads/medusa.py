"""Medusa heads (arXiv 2401.10774)."""

from __future__ import annotations

import torch
from torch import nn

from spec_plugins.checkpoints.head import MedusaConfig

__all__ = ["MedusaHeads"]


class _Block(nn.Module):
    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size, config.bias) for _ in range(config.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Head ``j`` guesses, from the target's last hidden state at a position, the token ``j + 2`` after it.

    Parameters bear the names that :class:`MedusaConfig` lists. Where the target's LM head serves, its rows
    are handed in, and are no parameters.
    """

    token_map: torch.Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_heads))
        width, drafts = config.hidden_size, config.draft_vocab_size
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, drafts, bias=False) for _ in range(config.num_heads)
            )
        elif config.lm_head == "shared":
            self.lm_head = nn.Linear(width, drafts, bias=False)
        reduced = drafts < config.vocab_size
        self.register_buffer("token_map", torch.zeros(drafts, dtype=torch.int64) if reduced else None)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, of any shape."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def forward(self, states: torch.Tensor, num_heads: int) -> torch.Tensor:
        """``[..., num_heads, hidden]``: what the first heads' LM heads take, of states ``[..., hidden]``."""
        return torch.stack([block(states) for block in list(self.blocks)[:num_heads]], -2)

    def logits(self, heard: torch.Tensor, target_lm_head: torch.Tensor | None) -> torch.Tensor:
        """``[..., heads, draft_vocab]``, of what :meth:`forward` gave.

        Args:
            heard: ``[..., heads, hidden]``.
            target_lm_head: ``[draft_vocab, hidden]``, the target's rows of the drafted tokens; used where the
                heads have none of their own.
        """
        if self.config.lm_head == "own":
            heads = list(self.lm_heads)[: heard.shape[-2]]
            return torch.stack([head(heard[..., j, :]) for j, head in enumerate(heads)], -2)
        weight = self.lm_head.weight if self.config.lm_head == "shared" else target_lm_head
        assert weight is not None
        return heard @ weight.to(heard.dtype).mT
