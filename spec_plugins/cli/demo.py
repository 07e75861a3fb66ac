"""``spec-plugins demo``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from spec_plugins.cli.output import AsJson, require, show_json
from spec_plugins.errors import UnsupportedError

__all__ = ["demo_command"]

RUNS_IN = ("transformers", "vllm", "sglang")


def demo_command(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the model.")],
    data: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the prompts.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the report.")] = Path("demo-out"),
    engine: Annotated[
        str, typer.Option(help=f"Which engine to run in: {', '.join(RUNS_IN)}.")
    ] = "transformers",
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long it may take.")] = 5.0,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare with plain decoding: a proposer's name, a configuration as JSON, or the "
            "path of one; may be given several times. Default: one of each proposer that needs no model."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    from spec_plugins.support import ENGINES, find_engine

    key = find_engine(engine)
    if key not in RUNS_IN:
        raise UnsupportedError(
            f"the demo cannot run in {ENGINES[key].title} in this version; "
            f"use --engine {' or '.join(RUNS_IN)}"
        )
    require("spec_plugins.evaluation.demo", f"evaluate,{key}")
    require(f"spec_plugins.adapters.{ENGINES[key].package}.comparison_runner", f"evaluate,{key}")
    from spec_plugins.evaluation.demo import run

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        figures = run(model, data, out, key, minutes, spec or ())
    if as_json:
        show_json(figures)
