"""Names that the flags and the adapter share. Imports nothing of SGLang's."""

from __future__ import annotations

import re

__all__ = ["ALGORITHM", "CONFIG_VARIABLE", "algorithm_name"]

CONFIG_VARIABLE = "SPEC_PLUGINS_CONFIG"
"""The environment variable with the configuration, as :func:`spec_plugins.config.read_config` takes it."""
ALGORITHM = "SPEC"
"""The algorithm that takes the proposer from the configuration."""


def algorithm_name(proposer: str) -> str:
    """The SGLang algorithm of a registered proposer: ``SPEC_SUFFIX`` for ``suffix``."""
    return f"{ALGORITHM}_{re.sub(r'[^A-Za-z0-9]', '_', proposer).upper()}"
