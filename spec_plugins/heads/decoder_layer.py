"""A Llama decoder layer whose attention is the caller's: dense in training, over a cache when drafting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from spec_plugins.checkpoints.head import EagleConfig

__all__ = ["Attend", "DecoderLayer", "rotate"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries ``[batch, heads, n, head_dim]``, keys and values ``[batch, kv_heads, n, head_dim]``, the first two
rotated, to what they attend to, shaped as the queries."""


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama.

    Args:
        x: ``[batch, heads, n, head_dim]``.
        positions: ``[batch, n]`` or ``[n]``, integers.
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None, :, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, input_size: int) -> None:
        super().__init__()
        self.theta, self.head_dim = config.rope_theta, config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(input_size, heads * config.head_dim, bias)
        self.k_proj = nn.Linear(input_size, kv_heads * config.head_dim, bias)
        self.v_proj = nn.Linear(input_size, kv_heads * config.head_dim, bias)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = attend(rotate(q, positions, self.theta), rotate(k, positions, self.theta), v)
        return self.o_proj(seen.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]


class _MLP(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One layer of an EAGLE head. The first differs: that of ``eagle`` does not normalise its input, that of
    ``eagle3`` attends with embedding and feature side by side."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fuses = config.method == "eagle3" and index == 0
        self.norm_before_residual = config.norm_before_residual
        if self.fuses or index > 0:
            self.input_layernorm = nn.RMSNorm(width, eps)
        if self.fuses:
            self.hidden_norm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(config, 2 * width if self.fuses else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = _MLP(config)

    def forward(
        self, x: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """
        Args:
            x: ``[batch, n, hidden]``.
            embeds: the same of the tokens; used by a first layer that fuses.
            positions: ``[batch, n]`` or ``[n]``.
            attend: see :data:`Attend`.
        """
        residual = x
        if self.fuses:
            x = self.hidden_norm(x)
            if self.norm_before_residual:
                residual = x
            x = torch.cat([self.input_layernorm(embeds), x], -1)
        elif hasattr(self, "input_layernorm"):
            x = self.input_layernorm(x)
        x = residual + self.self_attn(x, positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
