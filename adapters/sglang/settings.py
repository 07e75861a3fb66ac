"""The project's configuration, out of SGLang's flags and an environment variable."""

from __future__ import annotations

import os
from typing import Any

from spec_plugins.adapters.sglang.names import CONFIG_VARIABLE
from spec_plugins.config import Config, load_config, read_config
from spec_plugins.errors import ConfigError

__all__ = ["configuration"]

_STEPS, _WIDTH = "--speculative-num-steps", "--speculative-num-draft-tokens"


def configuration(proposer: str | None, num_steps: int | None, num_draft_tokens: int | None) -> Config:
    """
    Args:
        proposer: the one that the algorithm's name says; ``None``: the configuration's.
        num_steps: SGLang's flag: the deepest draft position.
        num_draft_tokens: SGLang's flag: draft tokens over all branches, and the last committed token.

    Raises:
        ConfigError: something cannot be used, or flags and configuration say different things.
        UnknownProposerError, UnavailableError: the proposer cannot be had.
    """
    if num_draft_tokens is not None and num_draft_tokens < 2:
        raise ConfigError(
            f"{_WIDTH}: {num_draft_tokens} leaves no room for a draft token, since the last committed token "
            "counts; set it to 2 or more"
        )
    data = read_config(os.environ.get(CONFIG_VARIABLE) or None)
    flags: dict[str, tuple[str, Any]] = {
        "proposer": ("--speculative-algorithm", proposer),
        "num_speculative_tokens": (_STEPS, num_steps),
        "max_draft_nodes": (_WIDTH, None if num_draft_tokens is None else num_draft_tokens - 1),
    }
    for field, (flag, value) in flags.items():
        if value is not None and data.setdefault(field, value) != value:
            raise ConfigError(
                f"{field}: {data[field]!r} in {CONFIG_VARIABLE}, but {flag} says {value!r}; leave one of "
                "them out, or make them equal"
            )
    config = load_config(data)
    if config.route == "native":
        raise ConfigError(
            "route: 'native' is SGLang's own implementation, yet its flags start this project's; set "
            "'plugin' or 'auto', or take the flags that `spec-plugins args sglang` prints"
        )
    return config
