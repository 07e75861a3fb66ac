"""Lets the evaluation measure step times in the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spec_plugins.adapters.transformers.engine import Engine
from spec_plugins.adapters.transformers.requests import SamplingParams
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.calibration import Answer

__all__ = ["serving"]


@contextmanager
def serving(model: str, config: Config, batch: int, dtype: str, arguments: Sequence[str]) -> Iterator[Answer]:
    """The engine, in this process; see :class:`spec_plugins.evaluation.calibration.Serving`."""
    import transformers.utils.logging as quiet

    if arguments:
        raise ConfigError(f"{arguments[0]}: the embedded engine takes no flags of its own; leave it out")
    quiet.disable_progress_bar()
    engine = Engine(model, spec=config, max_num_seqs=batch, dtype=dtype)

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return [done.token_ids for done in engine.generate([list(p) for p in prompts], params)]

    yield answer
