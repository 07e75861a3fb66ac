"""``spec-plugins args``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from spec_plugins.cli.output import AsJson, show_json

__all__ = ["args_command"]


def args_command(
    engine: Annotated[str, typer.Argument(help="The engine: vllm, sglang or tensorrt-llm.")],
    config: Annotated[
        str,
        typer.Argument(
            help="What drafts: the name of a proposer or of a method of the engine's own, a configuration as "
            "JSON, or the path of one."
        ),
    ],
    engine_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Write for this version. Default: the installed one, else the newest known.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    from spec_plugins.launch import prepare

    found = prepare(engine, config, engine_version)
    if as_json:
        show_json(asdict(found))
        return
    typer.echo(found.file or shlex.join(found.flags))
    for note in found.notes:
        typer.echo(f"Note: {note}", err=True)
    if found.environment:
        typer.echo("Note: the engine needs a variable beside them; run this first:", err=True)
    for name, value in found.environment.items():
        typer.echo(f"export {name}={shlex.quote(value)}", err=True)
