"""Speculative decoding for the engine you already run.

One :class:`Proposer` interface, adapters that run it inside vLLM, SGLang, TensorRT-LLM and Hugging
Face transformers, and an evaluator. Importing this package loads numpy and pluggy, nothing heavier.
"""

from spec_plugins.errors import (
    ConfigError,
    SpecPluginsError,
    UnavailableError,
    UnknownProposerError,
    UnsupportedError,
)
from spec_plugins.hookspecs import hookimpl
from spec_plugins.proposer import Draft, Drafts, Need, Packed, Proposer, Sampling, Step, Target

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Draft",
    "Drafts",
    "Need",
    "Packed",
    "Proposer",
    "Sampling",
    "SpecPluginsError",
    "Step",
    "Target",
    "UnavailableError",
    "UnknownProposerError",
    "UnsupportedError",
    "__version__",
    "hookimpl",
]
