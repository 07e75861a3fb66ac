"""``spec-plugins generate``."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.cli.output import progress, require
from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spec_plugins.adapters.transformers import Engine, Prompt, SamplingParams
    from spec_plugins.adapters.transformers.requests import Request
    from spec_plugins.config import Config

__all__ = ["generate_command"]


class Dtype(str, enum.Enum):
    """Number formats to load a model in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def generate_command(
    model: Annotated[str, typer.Argument(help="Folder, or Hugging Face name, of the model.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="What to complete or answer.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A .txt file with a prompt a line, or a .jsonl file with 'prompt' or 'messages' a line."
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            help="What drafts: a proposer's name, a configuration as JSON, or the path of one. Without it, "
            "nothing does."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="The longest chain of draft tokens; replaces the configuration's.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether prompts are messages of a user. Default: where the model has a chat template.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate for a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set with this probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens at least this likely, relative to the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be given several times.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most prompts in one forward pass.")] = 8,
    dtype: Annotated[Dtype, typer.Option(help="Number format to load the model in.")] = Dtype.AUTO,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print a single prompt's text as it comes.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each prompt.")] = False,
) -> None:
    # All that may be refused is looked at before the model is loaded.
    _check_path(model)
    config = _config(spec, num_speculative_tokens)
    given: list[Prompt] = [*(prompts or []), *(_read(prompt_file) if prompt_file else [])]
    if not given:
        raise ConfigError("there is no prompt: give one or more after the model, or a --prompt-file")
    require("spec_plugins.adapters.transformers", "transformers")
    from spec_plugins.adapters.transformers import SamplingParams

    params = SamplingParams.of(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed, stop=tuple(stop or ()),
    )  # fmt: skip
    engine = _load(model, config, max_num_seqs, dtype.value, quiet=as_json)
    given = _as_messages(given, chat, bool(getattr(engine.tokenizer, "chat_template", None)))
    started = time.perf_counter()
    if stream and len(given) == 1 and not as_json:
        tokens = _stream(engine, given, params)
    else:
        answers = _complete(engine, given, params, quiet=as_json)
        tokens = sum(len(answer.output) for answer in answers)
        for i, answer in enumerate(answers, 1):
            if len(answers) > 1 and not as_json:
                typer.echo(f"=== {i} of {len(answers)}")
            typer.echo(_json_line(answer) if as_json else _text(answer))
    _show_statistics(engine, tokens, len(given), time.perf_counter() - started)


def _check_path(model: str) -> None:
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if looks_local and not path.is_dir():
        raise ConfigError(f"model: there is no folder {model!r}")


def _config(spec: str | None, num_speculative_tokens: int | None) -> Config | None:
    if spec is None:
        if num_speculative_tokens is not None:
            raise ConfigError("--num-speculative-tokens needs --spec, which says what drafts them")
        return None
    from spec_plugins.config import load_config

    return load_config(spec, num_speculative_tokens=num_speculative_tokens)


def _read(file: Path) -> list[Prompt]:
    kind = file.suffix.lower()
    if kind not in (".txt", ".jsonl"):
        raise ConfigError(f"--prompt-file {str(file)!r}: give a .txt or a .jsonl file")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {str(file)!r} cannot be read: {error}") from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if kind == ".txt":
        return [line for _, line in numbered]
    return [_parse(line, f"{file}, line {n}") for n, line in numbered]


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(prompt, str):
        return prompt
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return messages
    raise ConfigError(
        f"{where}: give 'prompt', a text, or 'messages', a list of objects with 'role' and 'content'"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _as_messages(prompts: Sequence[Prompt], chat: bool | None, has_template: bool) -> list[Prompt]:
    if chat is False and not all(isinstance(p, str) for p in prompts):
        raise ConfigError("--no-chat: the prompt file holds messages; leave the option out, or give prompts")
    if chat is None:
        chat = has_template
    return [[{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in prompts]


def _load(model: str, config: Config | None, max_num_seqs: int, dtype: str, quiet: bool) -> Engine:
    from rich.text import Text
    from transformers.utils import logging

    from spec_plugins.adapters.transformers import Engine

    logging.disable_progress_bar()
    with progress(not quiet, lambda: Text(f"loading {model}")):
        return Engine(
            str(Path(model).expanduser()) if model.startswith("~") else model,
            spec=config,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
        )


def _complete(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, quiet: bool
) -> list[Request]:
    requests = [engine.request(i, prompt, params, text=True) for i, prompt in enumerate(prompts)]
    with progress(not quiet, lambda: _bar(requests)), engine.accept(requests):
        while engine.running or engine.waiting:
            engine.step()
    return requests


def _bar(requests: Sequence[Request]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    done = [r.finish_reason is not None for r in requests]
    most = [r.params.max_new_tokens for r in requests]
    tokens = sum(m if d else len(r.output) for r, m, d in zip(requests, most, done, strict=True))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(sum(most), tokens, width=40), f"{sum(done)} of {len(requests)} prompts")
    return grid


def _stream(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> int:
    """Print one prompt's text as it comes; returns how many tokens it has."""
    tokens = 0
    for delta in engine.stream(prompts, params):
        tokens += len(delta.token_ids)
        typer.echo(delta.text, nl=False)
    typer.echo()
    return tokens


def _text(request: Request) -> str:
    assert request.detokenizer is not None  # asked for with the request
    return request.detokenizer.text


def _json_line(request: Request) -> str:
    figures = request.statistics
    return json.dumps(
        {
            "index": request.index,
            "text": _text(request),
            "prompt_token_ids": request.prompt,
            "token_ids": request.output,
            "finish_reason": request.finish_reason,
            "acceptance_length": figures.acceptance_length,
            "verify_steps": figures.verify_steps,
            "drafts": figures.drafts,
            "draft_tokens": figures.draft_tokens,
            "accepted_tokens": figures.accepted_tokens,
        },
        ensure_ascii=False,
    )


def _show_statistics(engine: Engine, tokens: int, prompts: int, seconds: float) -> None:
    forwards = engine.forwards + prompts  # each prompt's first token comes from a pass over the prompt
    words = [
        f"{tokens} tokens in {forwards} target forwards",
        f"{tokens / forwards:.2f} tokens a forward",
        f"{tokens / seconds:.1f} tokens/s",
    ]
    if engine.driver is not None:
        figures = engine.driver.statistics
        words.append(f"{figures.accepted_tokens} of {figures.draft_tokens} draft tokens accepted")
        if figures.faults:
            faults = ", ".join(f"{fault.value} {n}" for fault, n in figures.faults.items())
            words.append(f"faults of the proposer: {faults}")
    typer.echo(", ".join(words), err=True)
