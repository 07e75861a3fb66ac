"""Lets PyPI's torchvision be imported beside a torch for CPUs.

Its compiled operators are linked against CUDA and do not load, but torchvision gives two of them their
shapes while it is imported, which fails for operators that nobody declared. Nothing calls them here.

They are declared when torchvision is imported and not before: this file is imported in every process of the
environment, most of which need no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""A library's declarations end with it."""


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing, but is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
