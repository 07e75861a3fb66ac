"""Helpers of the tests that run an engine inside their own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def drafter_of(llm: Any) -> Any:
    """Our drafter, inside the engine; ``None`` without speculation."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return getattr(executor.driver_worker.worker.model_runner, "drafter", None)


def statistics_of(llm: Any) -> Any:
    """The driver's counters."""
    return drafter_of(llm).driver.statistics


def ask(llm: Any, prompts: Sequence[Sequence[int]], params: Any, **more: Any) -> list[Any]:
    """vLLM's answers to prompts of token ids; ``more`` goes into each prompt."""
    return list(
        llm.generate([{"prompt_token_ids": list(p), **more} for p in prompts], params, use_tqdm=False)
    )


def token_ids(answers: Sequence[Any]) -> list[list[int]]:
    """The tokens of every output."""
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


def greedy(
    llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 48, **settings: Any
) -> list[list[int]]:
    """Greedy token ids for prompts of token ids."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **settings})
    return token_ids(ask(llm, prompts, params))


@contextmanager
def our_warnings() -> Iterator[list[str]]:
    """Warnings of the project's logger, which vLLM's handlers would keep from pytest."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("spec_plugins")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
