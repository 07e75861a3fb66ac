"""Trained heads in files: layouts, checks and conversion."""

from spec_plugins.checkpoints.checks import check_fits, check_head, misfits, target_ids, tensor_shapes
from spec_plugins.checkpoints.head import EagleConfig, Head, HeadConfig, MedusaConfig
from spec_plugins.checkpoints.layout import Wanted
from spec_plugins.checkpoints.layouts import NAMES, read_head, write_head
from spec_plugins.checkpoints.target_model import TargetModel, read_target

__all__ = [
    "NAMES",
    "EagleConfig",
    "Head",
    "HeadConfig",
    "MedusaConfig",
    "TargetModel",
    "Wanted",
    "check_fits",
    "check_head",
    "misfits",
    "read_head",
    "read_target",
    "target_ids",
    "tensor_shapes",
    "write_head",
]
