"""What a head needs to know of its target model, from the target's own files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_plugins.checkpoints.files import read_config, read_folder
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["TargetModel", "read_target"]

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_LM_HEAD = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A target model's sizes, as :func:`spec_plugins.checkpoints.misfits` asks for them."""

    folder: Path
    hidden_size: int
    vocab_size: int
    num_layers: int
    architectures: tuple[str, ...]
    tied: bool
    """Whether the LM head is the input embeddings."""

    def embeddings(self) -> torch.Tensor:
        """The input embeddings, ``[vocab_size, hidden_size]``, mapped from the file.

        Raises:
            ConfigError: they cannot be found or read.
        """
        return self._matrix(_EMBEDDINGS, "input embeddings")

    def lm_head(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The LM head, or those of its rows: a copy, ``[rows, hidden_size]``; raises as ``embeddings``."""
        found = self.embeddings() if self.tied else self._matrix(_LM_HEAD, "LM head")
        return found.clone() if rows is None else found[rows]

    def _matrix(self, endings: tuple[str, ...], what: str) -> torch.Tensor:
        tensors = read_folder(self.folder).tensors
        names = [n for n in tensors if any(n == e or n.endswith(f".{e}") for e in endings)]
        if len(names) != 1:
            raise ConfigError(
                f"{self.folder}: its {what} cannot be told from its tensors' names; looked for "
                f"{' or '.join(endings)}, and found {', '.join(names) or 'none'}"
            )
        found = tensors[names[0]]
        if tuple(found.shape) != (self.vocab_size, self.hidden_size) or not found.is_floating_point():
            raise ConfigError(
                f"{self.folder}: {names[0]} is {list(found.shape)} of {found.dtype}, and its configuration "
                f"calls for [{self.vocab_size}, {self.hidden_size}], not quantized"
            )
        return found


def read_target(folder: str | Path) -> TargetModel:
    """A target model's sizes, from its ``config.json`` alone.

    Raises:
        ConfigError: there is none, or it does not say them.
    """
    config = read_config(folder)
    # Models that also see or hear keep the language model's sizes apart.
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    return TargetModel(
        Path(folder),
        _size(folder, text, "hidden_size", "n_embd"),
        _size(folder, text, "vocab_size"),
        _size(folder, text, "num_hidden_layers", "n_layer"),
        tuple(config.get("architectures") or ()),
        bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )


def _size(folder: str | Path, config: dict[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{Path(folder) / 'config.json'}: {names[0]} is {value!r}; is this a target model?")
    return value
