"""A head out of its files, checked against its target."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
from torch import nn

from spec_plugins.checkpoints.checks import check_fits
from spec_plugins.checkpoints.head import EagleConfig, HeadConfig
from spec_plugins.checkpoints.layouts import read_head
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.proposer import Target

__all__ = ["check_method", "load_head", "own_generator", "torch_dtype"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def torch_dtype(name: str | None, target: Target) -> torch.dtype:
    """A number format by name; ``None``: the target's, or float32 where torch does not compute in that."""
    found = getattr(torch, name or target.dtype, None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


def own_generator(name: str, device: str) -> torch.Generator:
    """A proposer's own chance, the same in every run.

    Its seed is one that nobody gives an engine: were both the same, as 0 and 0, drafts would be drawn with
    the very numbers that they are then verified with, and output would not be distributed as the target's.
    """
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"spec-plugins {name}".encode()).digest()[:7], "big"))
    return generator


def check_method(config: HeadConfig, method: str, folder: str) -> None:
    """Raise :class:`UnsupportedError` where a head is of another method."""
    if config.method != method:
        raise UnsupportedError(
            f"options.model: {folder!r} is a head of method {config.method!r}, not {method!r}; set proposer "
            f"to {config.method!r}"
        )


def load_head(folder: str, module: type[ModuleT], method: str, target: Target, dtype: torch.dtype) -> ModuleT:
    """Make a head's module, on the target's device.

    Raises:
        ConfigError: its files cannot be used.
        UnsupportedError: it is of another method, or does not fit the target.
    """
    read = read_head(folder)
    config = read.config
    check_method(config, method, folder)
    if isinstance(config, EagleConfig) and config.rope_scaling:
        raise UnsupportedError(
            f"options.model: {folder!r} has rope_scaling {config.rope_scaling}, which is not computed on the "
            "plugin route; set route to 'native'"
        )
    try:
        check_fits(config, target)
    except ConfigError as error:
        raise UnsupportedError(f"options.model: {folder!r}: {error}") from None
    made: Any = module(config)
    made.load_state_dict(dict(read.tensors))
    return made.to(target.device, dtype).eval().requires_grad_(False)  # type: ignore[no-any-return]
