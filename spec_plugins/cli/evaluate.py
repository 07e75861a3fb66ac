"""``spec-plugins evaluate``: replay, calibrate and recommend in one go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.calibrate import RUNS_IN, calibrate_command, numbers
from spec_plugins.cli.generate import Dtype
from spec_plugins.cli.output import console
from spec_plugins.cli.recommend import recommend_command
from spec_plugins.cli.replay import (
    Examples,
    Generate,
    MaxConversations,
    MaxNewTokens,
    Mode,
    ModelFolder,
    Specs,
    Traffic,
    replay_command,
)

if TYPE_CHECKING:
    from spec_plugins.config import Config

__all__ = ["evaluate_command"]


def evaluate_command(
    context: typer.Context,
    model: ModelFolder,
    traffic: Traffic,
    report: Annotated[Path, typer.Option(file_okay=False, help="Folder for all that is found.")],
    engine: Annotated[
        str, typer.Option(help=f"Which engine is to serve: {', '.join(RUNS_IN)}.")
    ] = "transformers",
    concurrency: Annotated[
        str, typer.Option(help="How many requests decode at once: numbers with commas.")
    ] = "1,4,16",
    spec: Specs = None,
    max_conversations: MaxConversations = None,
    generate: Generate = None,
    max_new_tokens: MaxNewTokens = 256,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to measure of each kind, at least.")] = 40,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the model.")] = Dtype.AUTO,
    examples: Examples = True,
) -> None:
    """Say which method pays on your traffic and engine, with which draft length, or that none does.

    spec-plugins evaluate path/to/model --traffic traffic.jsonl --engine vllm --report out

    First `replay`: what would have been accepted. Then `calibrate`, at the contexts that the traffic has: how
    long steps take in the engine; arguments that are not named here go to it. Then `recommend`. What was
    calibrated is kept, so that the same command goes on where it was interrupted.
    """
    from spec_plugins.evaluation.demo import configs

    asked = sorted({*numbers("--concurrency", concurrency)})
    lengths = _draft_tokens(configs(spec or ()).values())
    times, out = report / "times.json", console(stderr=True)
    out.print(f"[bold]1 of 3: what is accepted[/] of what proposers draft, on {traffic.name}")
    replay_command(
        model, traffic, spec, engine, Mode.AUTO, None, max_conversations, None, generate, max_new_tokens, 0,
        dtype, "cpu", report, examples,
    )  # fmt: skip
    mean = json.loads((report / "replay.json").read_text(encoding="utf-8"))["traffic"]["mean_context"]
    out.print(f"[bold]2 of 3: how long steps take[/] in {engine}")
    calibrate_command(
        context, str(model), engine, _listed(asked), _listed(lengths), _listed(_around(mean)), steps,
        dtype.value, times,
    )  # fmt: skip
    out.print("[bold]3 of 3: what pays[/]")
    recommend_command([report], times, _listed(asked), report)


def _listed(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _around(context: float) -> list[int]:
    """Two contexts that have it between them."""
    return [max(1, math.floor(0.75 * context)), math.ceil(1.25 * context)]


def _draft_tokens(configs: Iterable[Config]) -> list[int]:
    """None, a few, and the most that any of them drafts."""
    longest = max(config.draft_nodes(config.create_proposer()) for config in configs)
    return sorted({0, *(n for n in (1, 2, 4, 8, 16) if n < longest), longest})
