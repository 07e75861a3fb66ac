"""Lets the evaluation run prompts in the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_plugins.adapters.transformers.engine import Engine
from spec_plugins.adapters.transformers.requests import SamplingParams
from spec_plugins.adapters.transformers.target_model import load_model
from spec_plugins.config import Config

__all__ = ["EmbeddedRunner", "runners"]


class EmbeddedRunner:
    """One configuration; see :class:`spec_plugins.evaluation.comparison.Runner`."""

    def __init__(self, model: Any, tokenizer: Any, config: Config | None) -> None:
        self.config = config
        self._engine = Engine(model, tokenizer, config, max_num_seqs=1)

    def generate(self, messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> tuple[list[int], int]:
        before = self._engine.forwards
        prompt = [dict(message) for message in messages]
        (answer,) = self._engine.generate([prompt], SamplingParams(max_new_tokens=max_new_tokens))
        return answer.token_ids, self._engine.forwards - before

    def statistics(self) -> Mapping[str, Any]:
        driver = self._engine.driver
        return driver.statistics.snapshot() if driver is not None else {}


@contextmanager
def runners(
    model: Path, configs: Mapping[str, Config | None], say: Callable[[str], None]
) -> Iterator[dict[str, EmbeddedRunner]]:
    """A runner a configuration, all with one model in float32."""
    import transformers.utils.logging as quiet

    quiet.disable_progress_bar()
    say(f"loading {model.name}")
    loaded, tokenizer = load_model(model, dtype="float32")
    yield {name: EmbeddedRunner(loaded, tokenizer, config) for name, config in configs.items()}
