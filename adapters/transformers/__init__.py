"""The embedded engine: any proposer with any Hugging Face causal language model, in this process.

from spec_plugins.adapters.transformers import generate

for answer in generate("path/to/model", ["def fibonacci(n):"], proposer="suffix", max_new_tokens=64):
    print(answer.text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_plugins.adapters.transformers.custom_generate import speculate
from spec_plugins.adapters.transformers.engine import Engine
from spec_plugins.adapters.transformers.requests import Completion, Delta, Prompt, SamplingParams
from spec_plugins.adapters.transformers.target_model import load_model
from spec_plugins.config import Config
from spec_plugins.proposer import Proposer

__all__ = ["Completion", "Delta", "Engine", "Prompt", "SamplingParams", "generate", "load_model", "speculate"]


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    proposer: Proposer | Config | Mapping[str, Any] | str | Path | None = None,
    *,
    tokenizer: Any = None,
    max_num_seqs: int = 8,
    **params: Any,
) -> list[Completion]:
    """Complete prompts with a proposer, in one call.

    Args:
        model: a causal language model or the path of one.
        prompts: text, token ids or chat messages each.
        proposer: a registered name, a configuration (see :func:`spec_plugins.config.load_config`), an
            instance, or ``None`` for no speculation.
        tokenizer: needed for text where ``model`` is not a path.
        max_num_seqs: the most requests in one forward pass.
        params: fields of :class:`SamplingParams`.

    Raises: as :class:`Engine` does.
    """
    instance = proposer if isinstance(proposer, Proposer) else None
    spec = None if isinstance(proposer, Proposer) else proposer
    engine = Engine(model, tokenizer, spec, proposer=instance, max_num_seqs=max_num_seqs)
    return engine.generate(prompts, SamplingParams.of(**params))
