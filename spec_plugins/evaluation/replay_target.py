"""The target model as replay needs it: its sizes, its tokenizer, and its states over recorded text.

Weights are loaded where a proposer asks for states, embeddings or the LM head, and not otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_plugins.config import Config
from spec_plugins.errors import ConfigError
from spec_plugins.proposer import IntArray, Need, Packed, Proposer, Target

if TYPE_CHECKING:
    import torch

__all__ = ["ReplayTarget", "StatesInRows"]

TOGETHER = 4096
"""Tokens, padding included, that the target is run over in one forward pass."""

_OF_THE_MODEL = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES, Need.EMBEDDINGS, Need.LM_HEAD})
_STATES = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES})
_NOT_RECORDED = frozenset({Need.PREDICTIONS, Need.PROBABILITIES})
"""What no record can give: what the target would have said after tokens that it rejected, and how likely."""


@dataclass
class ReplayTarget:
    """A target model; make one with :meth:`open`, or with sizes alone for proposers that see only tokens."""

    vocab_size: int
    max_model_len: int
    folder: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    hidden_size: int | None = None
    num_layers: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    loaded: Any = field(default=None, repr=False)
    """A causal language model of transformers, where one is at hand already."""
    stand_in: str | None = None
    """Folder of the same model's weights before quantising, for where transformers cannot load its own."""
    stood_in: bool = field(default=False, repr=False)
    """Whether the model that was loaded is that one."""
    quantised_by: str | None = None
    """The method that its configuration names."""

    @classmethod
    def open(
        cls, folder: str | Path, dtype: str = "auto", device: str = "cpu", stand_in: str | Path | None = None
    ) -> ReplayTarget:
        """Read a model's configuration.

        Raises:
            ConfigError: there is none that can be used.
        """
        from transformers import AutoConfig

        try:
            whole: Any = AutoConfig.from_pretrained(folder)
            config = whole.get_text_config()
            given = str(getattr(whole, "dtype", None) or "float32").removeprefix("torch.")
            eos = config.eos_token_id
            quantised: Any = getattr(whole, "quantization_config", None)
            by = quantised.get("quant_method") if isinstance(quantised, dict) else None
            return cls(
                int(config.vocab_size),
                int(getattr(config, "max_position_embeddings", None) or 1 << 20),
                str(folder),
                given if dtype == "auto" else dtype,
                device,
                int(config.hidden_size),
                int(config.num_hidden_layers),
                () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
                stand_in=None if stand_in is None else str(stand_in),
                quantised_by=None if by is None else str(by),
            )
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"model: {str(folder)!r} cannot be used: {error}") from error

    def tokenizer(self) -> Any:
        """The model's tokenizer; raises :class:`ConfigError` where it has none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {self.folder!r} has no tokenizer that can be read: {error}") from error

    @functools.cached_property
    def model(self) -> Any:
        """The model, loaded at its first use.

        Raises:
            ConfigError: it cannot be; of a quantised one it says what to do instead.
        """
        if self.loaded is not None:
            return self.loaded
        if self.folder is None:
            raise ConfigError("model: the proposer needs the target's weights; open a folder that has them")
        try:
            return self._load(self.folder)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            if self.quantised_by is None:
                raise ConfigError(f"model: {self.folder!r} cannot be loaded: {reason}") from error
            if self.stand_in is None:
                raise ConfigError(
                    f"model: {self.folder!r} is quantised by {self.quantised_by}, which transformers cannot "
                    f"load here ({reason}); replay heads with --unquantised and the folder of the weights "
                    "before quantising, or leave them out, and have prompts answered by the engine that "
                    "serves it: `spec-plugins evaluate --engine vllm --generate N`"
                ) from error
        try:
            model = self._load(self.stand_in)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"--unquantised: {self.stand_in!r} cannot be loaded: {error}") from error
        self.stood_in = True
        return model

    def _load(self, folder: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.dtype))
        if folder == self.folder and self.quantised_by and getattr(model, "hf_quantizer", None) is None:
            raise ValueError("it does not know that method, and would take its numbers for weights")
        return model.to(self.device).eval()

    def describe(
        self, proposer: Proposer, config: Config, provides: frozenset[Need], rows: int, offline: bool
    ) -> Target:
        """What the proposer is told: of a host that ``provides`` so much, but what no record holds."""
        wanted = (proposer.needs | proposer.uses) & provides
        weights = bool(wanted & _OF_THE_MODEL)
        return Target(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=rows,
            provides=provides - _NOT_RECORDED,
            num_speculative_tokens=config.num_speculative_tokens,
            max_draft_nodes=config.draft_nodes(proposer),
            model=self.folder,
            device=self.device,
            dtype=self.dtype,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            eos_token_ids=self.eos_token_ids,
            embeddings=(lambda: self.model.get_input_embeddings().weight) if weights else None,
            lm_head=(lambda: self.model.get_output_embeddings().weight) if weights else None,
            offline=offline,
        )

    def looked_at(self, proposer: Proposer, provides: frozenset[Need]) -> frozenset[Need]:
        """Which of the target's states the proposer looks at."""
        return (proposer.needs | proposer.uses) & provides & _STATES

    def states(self, proposer: Proposer, provides: frozenset[Need], rows: int) -> StatesInRows:
        """Room for the states of the requests at work."""
        wanted = self.looked_at(proposer, provides)
        layers: tuple[int, ...] = ()
        if Need.AUX_HIDDEN_STATES in wanted:
            layers = proposer.aux_layers(int(self.model.config.get_text_config().num_hidden_layers))
        return StatesInRows(self.model, rows, Need.HIDDEN_STATES in wanted, layers)


class StatesInRows:
    """The target's states over the conversations that are being replayed, each in a row.

    Memory: rows times the longest conversation, ``hidden_size`` numbers a token for the last layer and for
    every auxiliary one; and those of all layers for :data:`TOGETHER` tokens, or one conversation.
    """

    def __init__(self, model: Any, rows: int, last: bool, aux_layers: Sequence[int]) -> None:
        self._model, self._rows, self._last, self._layers = model, rows, last, tuple(aux_layers)
        self._kept: dict[str, torch.Tensor] = {}
        """``[rows, longest, width]`` by kind, on the model's device."""

    def fill(self, rows: Sequence[int], texts: Sequence[IntArray]) -> None:
        """Run the target over conversations that come to these rows, those of like length together."""
        together: list[int] = []
        for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            if together and (len(together) + 1) * len(texts[i]) > TOGETHER:
                self._fill([rows[j] for j in together], [texts[j] for j in together])
                together = []
            together.append(i)
        self._fill([rows[j] for j in together], [texts[j] for j in together])

    def _fill(self, rows: list[int], texts: list[IntArray]) -> None:
        import torch

        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int64)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = text
        # Padding stands behind, where causal attention does not see it.
        with torch.inference_mode():
            states = self._model.base_model(
                input_ids=torch.from_numpy(ids).to(self._model.device),
                output_hidden_states=True,
                use_cache=False,
            ).hidden_states
            if self._last:
                self._keep("last", rows, states[-1])
            if self._layers:
                self._keep("aux", rows, torch.cat([states[layer] for layer in self._layers], -1))

    def _keep(self, kind: str, rows: Sequence[int], states: torch.Tensor) -> None:
        kept, longest = self._kept.get(kind), states.shape[1]
        if kept is None or kept.shape[1] < longest:
            room = states.new_zeros(self._rows, longest, states.shape[2])
            if kept is not None:
                room[:, : kept.shape[1]] = kept
            kept = self._kept[kind] = room
        kept[list(rows), :longest] = states

    def packed(
        self, rows: IntArray, starts: IntArray, ends: IntArray
    ) -> tuple[Packed[torch.Tensor] | None, Packed[torch.Tensor] | None]:
        """Last and auxiliary states at positions ``starts[i]`` to ``ends[i] - 1`` of each row."""
        import torch

        counts = ends - starts
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        where = np.repeat(rows, counts), np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        index = tuple(torch.from_numpy(w.astype(np.int64)).to(self._model.device) for w in where)
        last, aux = (
            Packed(self._kept[kind][index], offsets) if kind in self._kept else None
            for kind in ("last", "aux")
        )
        return last, aux
