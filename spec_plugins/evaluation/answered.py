"""From a traffic file to conversations with responses: recorded ones, or made once by the model itself."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spec_plugins.errors import ConfigError, UnavailableError, UnsupportedError
from spec_plugins.launch import installed_version
from spec_plugins.support import ENGINES
from spec_plugins.traffic.conversations import Conversation, asked_tokens, conversations
from spec_plugins.traffic.reading import TrafficFile
from spec_plugins.traffic.record import Record
from spec_plugins.traffic.sampling import sample

if TYPE_CHECKING:
    from spec_plugins.config import Config
    from spec_plugins.evaluation.server_process import ServerProcess

__all__ = [
    "Answer", "Server", "answer", "answer_records", "answering", "recorded_conversations", "write_answered",
]  # fmt: skip

AT_ONCE = 16
"""Prompts that a server is asked at a time."""

Answer = Callable[[Sequence[list[int]]], Sequence[tuple[list[int], str]]]
"""Prompts of token ids to what the model says to each: its token ids, and ``stop`` or ``length``."""


class Server(Protocol):
    """The module ``server`` of an adapter."""

    def server(
        self, model: str, config: Config | None, dtype: str, arguments: Sequence[str], /
    ) -> ServerProcess:
        """See :meth:`spec_plugins.evaluation.load.LoadRunner.server`."""

    def complete(
        self, running: ServerProcess, prompts: Sequence[Sequence[int]], tokens: int, ignore_eos: bool
    ) -> list[tuple[list[int], str]]:
        """Answer prompts of token ids greedily, all at once.

        Args:
            tokens: of an answer, at most.
            ignore_eos: go on past any end, to exactly so many.

        Returns:
            For each its token ids, the end token included, and the engine's word for how it ended.

        Raises:
            SpecPluginsError: the request failed; with the end of the server's log.
        """


@contextmanager
def answering(
    engine: str,
    model: str,
    dtype: str,
    arguments: Sequence[str],
    max_tokens: int,
    tell: Callable[[str], None] = lambda words: None,
) -> Iterator[tuple[Answer, int]]:
    """An engine's own server without speculation, up for the time of a ``with``: so the target as it is
    served, quantised or not.

    Args:
        engine: a key of :data:`spec_plugins.support.ENGINES`.
        model: folder.
        arguments: the user's own, for the engine.
        max_tokens: of an answer.
        tell: told what goes on.

    Returns:
        What asks it, and the longest context that it takes.

    Raises:
        UnsupportedError: this version starts no server of that engine.
        UnavailableError: the engine is not installed.
        SpecPluginsError: it does not start, fails a request, or gives one up; with the end of its log.
    """
    adapter, title = _server_of(engine), ENGINES[engine].title
    tell(f"starting {title}")
    with adapter.server(model, None, dtype, arguments) as running:
        longest = int(json.loads(running.get("/v1/models")[1])["data"][0]["max_model_len"])

        def one(prompt: list[int]) -> tuple[list[int], str]:
            room = min(max_tokens, longest - len(prompt) - 1)  # engines refuse a request for more
            ((said, ended),) = adapter.complete(running, [prompt], room, False)
            if ended not in ("stop", "length"):
                raise running.failure(f"gave up a request ({ended})")
            return said, ended

        def ask(prompts: Sequence[list[int]]) -> list[tuple[list[int], str]]:
            found = []
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for answered in pool.map(one, prompts):
                    found.append(answered)
                    tell(f"{title} has answered {len(found)} of {len(prompts)} prompts")
            return found

        yield ask, longest


def _server_of(engine: str) -> Server:
    about = ENGINES[engine]
    if installed_version(engine) is None:
        raise UnavailableError(f"{about.title} is not installed here, and is to answer prompts; install it")
    try:
        module: Any = importlib.import_module(f"spec_plugins.adapters.{about.package}.server")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("spec_plugins."):
            raise
        raise UnsupportedError(f"this version starts no server of {about.title}") from error
    found: Server = module
    return found


def recorded_conversations(
    file: TrafficFile, tokenizer: Any, max_length: int, most: int | None = None, seed: int = 0
) -> list[Conversation]:
    """Those of a file that have a response; a sample of ``most``, that keeps the mix.

    Raises:
        ConfigError: none has, or no line can be used; says what to do.
    """
    prompts = 0

    def answered() -> Iterator[Record]:
        nonlocal prompts
        for record in file:
            if record.answered:
                yield record
            else:
                prompts += 1

    chosen = answered() if most is None else sample(answered(), most, seed)
    found = conversations(chosen, file, tokenizer, max_length)
    if not found and prompts:
        raise ConfigError(
            f"traffic: {prompts} lines of {str(file.path)!r} have a prompt and no response, and replay needs "
            "what the target said: give --generate N to have N of them answered once on this machine, or a "
            "file with responses, such as `spec-plugins generate MODEL --prompt-file PROMPTS --json` writes"
        )
    if not found:
        raise file.refuse()
    return found


def answer(
    file: TrafficFile, tokenizer: Any, ask: Answer, most: int, max_length: int, max_tokens: int, seed: int = 0
) -> list[Conversation]:
    """Have a sample of a file's prompts answered, recorded responses or not, greedily.

    Args:
        file: what to ask.
        tokenizer: the model's.
        ask: the model, which answers with up to ``max_tokens``.
        most: how many.
        max_length: the model's longest context.
        max_tokens: of an answer.
        seed: of the sample.

    Raises:
        ConfigError: no line can be used.
    """
    return answer_records(sample(file, most, seed), file, tokenizer, ask, max_length, max_tokens)


def answer_records(
    records: Iterable[Record],
    file: TrafficFile,
    tokenizer: Any,
    ask: Answer,
    max_length: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> list[Conversation]:
    """Have these records of a file answered; those that cannot be are counted with the lines it left out.

    ``temperature`` is only noted, as what ``ask`` samples with. Otherwise as :func:`answer`.
    """
    asked: list[tuple[Record, list[int]]] = []
    for record in records:
        try:
            tokens = asked_tokens(record, tokenizer, file.redact)
        except Exception as error:  # a chat template raises what it likes
            file.leave_out(record.line, str(error))
            continue
        if 0 < len(tokens) < max_length - 1:
            asked.append((record, tokens))
        else:
            file.leave_out(record.line, f"a prompt of {len(tokens)} tokens leaves no room")
    if not asked:
        raise file.refuse()
    found = []
    for (record, prompt), (said, ended) in zip(asked, ask([t for _, t in asked]), strict=True):
        text = np.array([*prompt, *said], np.int32)
        kept = Record(
            record.line,
            tags=record.tags,
            temperature=temperature,
            max_tokens=max_tokens,
            tenant=record.tenant,
        )
        found.append(Conversation(text, np.arange(len(text)) >= len(prompt), kept, ended == "stop"))
    return found


def write_answered(found: Sequence[Conversation], path: Path) -> None:
    """Keep conversations as a traffic file of token ids, to be replayed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for c in found:
            line = {
                "prompt_token_ids": c.tokens[: c.prompt_length].tolist(),
                "token_ids": c.tokens[c.prompt_length :].tolist(),
                "finish_reason": "stop" if c.stopped else "length",
                "temperature": c.record.temperature,
                "max_tokens": c.record.max_tokens,
                "tags": list(c.record.tags),
            }
            if c.record.tenant:
                line["cache_salt"] = c.record.tenant
            file.write(json.dumps(line) + "\n")
