"""EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) heads.

Position ``i`` of a head takes the target's feature there and the embedding of the token *after* it, and says
what the token after that will be. Further ahead it takes its own output for the feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spec_plugins.checkpoints.head import EagleConfig
from spec_plugins.heads.decoder_layer import Attend, DecoderLayer

__all__ = ["EagleHead"]


class EagleHead(nn.Module):
    """The layers of a head; parameters bear the names that :class:`EagleConfig` lists.

    Input embeddings and, for ``eagle``, the LM head are the target's unless the files hold their own; they
    are handed in, and are no parameters.
    """

    d2t: torch.Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        inputs = config.features * config.target_hidden_size if config.method == "eagle3" else 2 * width
        self.fc = nn.Linear(inputs, width, config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.method == "eagle3":
            self.norm = nn.RMSNorm(width, config.rms_norm_eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer(
            "d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None
        )

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, of any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]``: what the layers take, of what the target shows (:attr:`EagleConfig.aux_layers`
        side by side, or its last layer)."""
        return self.fc(states) if self.config.method == "eagle3" else states

    def forward(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            embeds: ``[batch, n, hidden]``, of the token after each position.
            features: ``[batch, n, hidden]``: of :meth:`features`, or what this returned a position before.
            positions: ``[batch, n]`` or ``[n]``, of the features.
            attends: one for each layer.

        Returns:
            The next position's features, and what the LM head takes; ``[batch, n, hidden]`` each.
        """
        x = self.fc(torch.cat([embeds, features], -1)) if self.config.method == "eagle" else features
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, embeds, positions, attend)
        if self.config.method == "eagle":
            return x, x
        normed = self.norm(x)
        return (normed if self.config.norm_output else x), normed

    def unroll(self, embeds: torch.Tensor, states: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Draft ``steps`` positions ahead from every position at once, as it will be when serving: the
        training-time test of EAGLE-3.

        Args:
            embeds: ``[batch, n, hidden]`` of the tokens themselves.
            states: ``[batch, n, …]``, what the target shows at each.

        Returns:
            For each step ``s``, ``[batch, n - 1 - s, hidden]``: what the LM head takes at entry ``i``, which
            has seen the target's features up to ``i`` and tokens up to ``i + 1 + s``.
        """
        n = states.shape[1]
        features = self.features(states[:, : n - 1])
        attends = [_Unrolled() for _ in self.layers]
        outputs = []
        for s in range(steps):
            rows = n - 1 - s
            if rows <= 0:
                break
            positions = torch.arange(s, s + rows, device=states.device)
            features, heard = self(embeds[:, 1 + s : 1 + s + rows], features[:, :rows], positions, attends)
            outputs.append(heard)
        return outputs


class _Unrolled:
    """Attention of one layer while drafting from every position: entry ``i`` sees what is true up to ``i``,
    and then only the drafted positions that follow from ``i`` itself."""

    def __init__(self) -> None:
        self.true: tuple[torch.Tensor, torch.Tensor] | None = None
        self.drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if self.true is None:
            self.true = k, v
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.drafted.append((k, v))
        n = q.shape[2]
        scores = q @ self.true[0][:, :, :n].mT
        ahead = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        own = [(q * k[:, :, :n]).sum(-1, keepdim=True) for k, _ in self.drafted]
        weights = torch.cat([scores.masked_fill(ahead, float("-inf")), *own], -1)
        weights = (weights * q.shape[-1] ** -0.5).softmax(-1)
        seen: torch.Tensor = weights[..., :n] @ self.true[1][:, :, :n]
        for j, (_, v) in enumerate(self.drafted):
            seen = seen + weights[..., n + j : n + j + 1] * v[:, :, :n]
        return seen
