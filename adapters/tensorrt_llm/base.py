"""A target's checkpoint, as TensorRT-LLM's own converter writes it: ``config.json`` and a file a rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_plugins.checkpoints import TargetModel, read_target
from spec_plugins.checkpoints.files import read_config
from spec_plugins.checkpoints.streaming import Streamed, read_streamed
from spec_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["Base", "read_base"]

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Base:
    """A target's checkpoint folder, as TensorRT-LLM's converter wrote it."""

    target: TargetModel
    config: dict[str, Any]
    tp_size: int
    """How many ranks it is split for."""

    @property
    def folder(self) -> Path:
        return self.target.folder

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found = getattr(torch, self.config["dtype"])
        assert isinstance(found, torch.dtype)
        return found

    @property
    def vocab_rows(self) -> int:
        """Rows of the LM head on each rank; those past the vocabulary are zeros, as its converter has it."""
        return ceil(self.target.vocab_size / self.tp_size)

    def rank(self, rank: int) -> dict[str, Streamed]:
        """One rank's tensors; raises :class:`ConfigError`."""
        return read_streamed(self.folder / f"rank{rank}.safetensors")

    def size(self) -> int:
        """Bytes of all ranks."""
        return sum((self.folder / f"rank{rank}.safetensors").stat().st_size for rank in range(self.tp_size))


def read_base(folder: str | Path) -> Base:
    """Read a target's checkpoint, as far as its sizes; no tensor is read.

    Raises:
        ConfigError: it is none, or a file of a rank is missing.
        UnsupportedError: it is split for pipeline or context parallelism.
    """
    config = read_config(folder)
    if not isinstance(config.get("architecture"), str) or not isinstance(config.get("mapping"), dict):
        raise ConfigError(
            f"{folder}: no checkpoint of TensorRT-LLM's: its config.json has no architecture and mapping. "
            "Make one of the target with TensorRT-LLM's own convert_checkpoint.py"
        )
    mapping = config["mapping"]
    sizes = {name: mapping.get(name, 1) for name in ("tp_size", "pp_size", "cp_size")}
    if wrong := [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]:
        raise ConfigError(f"{folder}: config.json: mapping.{wrong[0]} is {mapping[wrong[0]]!r}")
    for name, what in (("pp_size", "pipeline"), ("cp_size", "context")):
        if sizes[name] > 1:
            raise UnsupportedError(
                f"{folder} is split for {what} parallelism ({name} {sizes[name]}), which TensorRT-LLM's "
                "heads do not have; convert the target with --tp_size alone"
            )
    if config.get("dtype") not in _DTYPES:
        raise ConfigError(
            f"{folder}: config.json: dtype is {config.get('dtype')!r}, not one of {', '.join(_DTYPES)}"
        )
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ConfigError(f"{folder}: config.json: num_attention_heads is {heads!r}")
    base = Base(read_target(folder), config, sizes["tp_size"])
    for rank in range(base.tp_size):
        if not (base.folder / f"rank{rank}.safetensors").is_file():
            raise ConfigError(
                f"{folder}: rank{rank}.safetensors is not there, and config.json names {base.tp_size} ranks"
            )
    return base
