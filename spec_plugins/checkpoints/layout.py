"""What a layout of files is: how to recognise, read and write it, and what it cannot hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from spec_plugins.checkpoints.head import Head, HeadConfig
from spec_plugins.checkpoints.target_model import TargetModel
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from spec_plugins.checkpoints.files import Stored

__all__ = ["TARGET_KEY", "Layout", "Wanted", "is_zero", "renamed"]

TARGET_KEY = "base_model_name_or_path"
"""Where a configuration says which target its head is for; Medusa's own name for it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known, beside the head, when it is written."""

    target: TargetModel | None = None
    """The target that it was made for, where its files are at hand."""
    num_speculative_tokens: int = 3
    """For layouts that say how many tokens to draft."""


class Layout(ABC):
    """A layout of one family of heads. Names of tensors are canonical unless said otherwise."""

    name: ClassVar[str]
    """As ``--to`` takes it."""
    methods: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]] = ()
    """Engines that read it by themselves."""
    weights: ClassVar[str] = "model.safetensors"

    @abstractmethod
    def recognises(self, stored: Stored) -> bool:
        """Whether a folder has this layout; asked of one layout after the other."""

    @abstractmethod
    def read(self, stored: Stored) -> Head:
        """The head in a folder of this layout, not checked; raises :class:`ConfigError`."""

    def complete(self, head: Head, wanted: Wanted) -> Head:
        """The same head with what this layout needs in its files, from the target's."""
        return head

    @abstractmethod
    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        """What of a head these files could not hold, or their reader would not use, a phrase each."""

    @abstractmethod
    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        """``config.json`` for a head that loses nothing."""

    def tensors(self, head: Head) -> dict[str, torch.Tensor]:
        """The tensors by the names that they have in the file."""
        return {self.stored_name(name, head.config): tensor for name, tensor in head.tensors.items()}

    def stored_name(self, name: str, config: HeadConfig) -> str:
        """What the file calls a tensor."""
        return name

    def obstacles(self, head: Head, config: Mapping[str, Any], engine: str, wanted: Wanted) -> list[str]:
        """Why one of :attr:`engines` would not draft with this head from these files as they are.

        ``config`` is that of the files.
        """
        return self.lost(head, wanted)


def renamed(stored: Stored, rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """A folder's tensors by other names; raises :class:`ConfigError` where two get the same."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.tensors.items():
        key = rename(name)
        if key in tensors:
            raise ConfigError(f"{stored.weights} holds {name} twice, under two names")
        tensors[key] = tensor
    return tensors


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether a bias changes nothing."""
    return not bool(tensor.count_nonzero())
