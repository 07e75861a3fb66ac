"""What a trained head is, whatever the layout of its files: a configuration and named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import torch

__all__ = ["EagleConfig", "Head", "HeadConfig", "MedusaConfig", "usual_layers"]

_Size = Annotated[int, Field(ge=1, le=2**31)]
_Count = Annotated[int, Field(ge=1, le=1024)]


class _HeadConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: _Size
    """Width of the head, and of the target's last layer."""
    vocab_size: _Size
    """The target's."""
    draft_vocab_size: _Size
    """How many tokens the head can draft; less than ``vocab_size`` where its vocabulary is reduced."""
    target: str | None = None
    """Name or path of the model that it was trained for, where its files say so."""

    @model_validator(mode="after")
    def _no_larger_vocabulary(self) -> _HeadConfig:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is more than vocab_size {self.vocab_size}; a head "
                "drafts tokens of its target only"
            )
        return self


class MedusaConfig(_HeadConfig):
    """Medusa heads (arXiv 2401.10774): for each draft position, residual blocks and an LM head.

    Tensors: ``blocks.{head}.layers.{layer}.weight`` ``[hidden, hidden]`` and, with ``bias``, ``….bias``;
    ``lm_heads.{head}.weight`` ``[draft_vocab, hidden]`` where ``lm_head`` is ``own``, ``lm_head.weight``
    where it is ``shared``; ``token_map`` ``[draft_vocab]`` int64, the target's id of each drafted one,
    ascending, where the vocabulary is reduced.
    """

    method: Literal["medusa"] = "medusa"
    num_heads: _Count
    num_layers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Residual blocks of each head."""
    bias: bool = True
    """Whether the blocks have biases."""
    lm_head: Literal["target", "own", "shared"] = "target"
    """The target's LM head after every block, one for each head, or one for all heads."""
    accuracies: tuple[Annotated[tuple[float, ...], Field(min_length=1)], ...] = ()
    """For each head, how often its first, second, … guess was right in training; shapes trees."""


def usual_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The layers whose input engines take for an EAGLE-3 head that names none."""
    return 2, num_target_layers // 2, num_target_layers - 3


class EagleConfig(_HeadConfig):
    """An EAGLE (arXiv 2401.15077) or EAGLE-3 (arXiv 2503.01840) head.

    Tensors, all ``….weight``: ``fc``; ``layers.{i}.self_attn.{q,k,v,o}_proj``, ``layers.{i}.mlp.{gate,up,
    down}_proj``, ``layers.{i}.post_attention_layernorm``; ``embed_tokens`` where it has its own. With
    ``attention_bias`` the four of ``self_attn`` have a ``….bias`` each.
    ``eagle``: ``fc`` is ``[hidden, 2 * hidden]`` over embedding and feature, perhaps with ``fc.bias``;
    the first layer has no ``input_layernorm``, later ones do; no norm at the end, the target's LM head.
    ``eagle3``: ``fc`` is ``[hidden, layers * target_hidden]`` over the target's layers; the first layer's
    attention takes ``2 * hidden``, embedding (``layers.0.input_layernorm``) and feature
    (``layers.0.hidden_norm``); ``norm`` at the end, ``lm_head`` ``[draft_vocab, hidden]``; with a reduced
    vocabulary ``d2t`` ``[draft_vocab]`` int64, the target's id less the draft's.
    """

    method: Literal["eagle", "eagle3"]
    target_hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    num_layers: _Count = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """As Hugging Face's configurations have it, with ``rope_type``; ``None``: none."""
    max_position_embeddings: _Size = 2048
    aux_layers: tuple[int, ...] = ()
    """For ``eagle3``: the target's layers whose *input* is taken: 0 the embeddings, i what layer i - 1 puts
    out. Empty: those that engines take where a checkpoint names none, 2, the middle one, the last but 2."""
    fc_bias: bool = False
    attention_bias: bool = False
    norm_before_residual: bool = False
    """Whether the residual starts from the normalised feature, as the ``speculators`` trainer has it."""
    norm_output: bool = False
    """Whether the feature handed on to the next draft position is normalised."""
    own_embeddings: bool = False
    """Whether the files hold the input embeddings; otherwise the target's serve."""

    @model_validator(mode="after")
    def _holds_together(self) -> EagleConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.method == "eagle":
            named = {
                "aux_layers": self.aux_layers,
                "norm_before_residual": self.norm_before_residual,
                "norm_output": self.norm_output,
                "draft_vocab_size below vocab_size": self.draft_vocab_size < self.vocab_size,
                "target_hidden_size unlike hidden_size": self.target_hidden_size != self.hidden_size,
            }
            if given := [name for name, value in named.items() if value]:
                raise ValueError(f"{', '.join(given)}: of eagle3 only, and this is eagle")
        if list(self.aux_layers) != sorted({layer for layer in self.aux_layers if layer >= 0}):
            raise ValueError(
                f"aux_layers {list(self.aux_layers)} must ascend, each once, from 0 on: engines hand them "
                "over in that order"
            )
        if self.target_hidden_size != self.hidden_size and not self.own_embeddings:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not target_hidden_size {self.target_hidden_size}, so the "
                "head needs own embeddings, and has none"
            )
        return self

    @property
    def features(self) -> int:
        """How many of the target's layers ``fc`` takes at once."""
        return 1 if self.method == "eagle" else len(self.aux_layers) or 3

    def layers_taken(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose input the head takes, for a target of so many layers."""
        if self.method == "eagle":
            return ()
        return self.aux_layers or usual_layers(num_target_layers)


HeadConfig = MedusaConfig | EagleConfig


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head in memory: its configuration, and its tensors under the names that the configuration lists."""

    config: HeadConfig
    tensors: Mapping[str, torch.Tensor]
