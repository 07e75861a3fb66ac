"""``spec-plugins serve``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from spec_plugins.errors import ConfigError, UnavailableError

__all__ = ["serve_command"]


def serve_command(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(help="The engine: vllm, sglang or tensorrt-llm.")],
    model: Annotated[str, typer.Argument(help="Folder, or Hugging Face name, of the model.")],
    spec: Annotated[
        str,
        typer.Option(
            help="What drafts: the name of a proposer or of a method of the engine's own, a configuration as "
            "JSON, or the path of one."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do nothing.")] = False,
) -> None:
    """Start an engine's own server with a proposer in it.

    Every other argument goes to the engine, as in `spec-plugins serve vllm MODEL --spec suffix --port 8001`.
    """
    from spec_plugins.launch import flags_of, prepare

    found = prepare(engine, spec)
    command = flags_of(engine).command(model, found.flags, context.args)
    environment = _environment(found.environment)
    program = None if dry_run else _program(command[0], engine)
    for note in found.notes:
        typer.echo(f"Note: {note}", err=True)
    variables = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
    typer.echo(" ".join([*variables, shlex.join(command)]), err=not dry_run)
    if program is not None:
        os.execvpe(program, [program, *command[1:]], environment)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's, with the engine's variables in it."""
    for name, value in variables.items():
        own = os.environ.get(name)
        if own and own != value:
            raise ConfigError(
                f"{name}: {own!r} in the environment would be replaced by what --spec gives, {value!r}; "
                "unset it, or put what it says into --spec"
            )
    return {**os.environ, **variables}


def _program(name: str, engine: str) -> str:
    """The engine's program: of this environment, where the proposers are, before any other's."""
    from spec_plugins.support import ENGINES, find_engine

    about = ENGINES[find_engine(engine)]
    ways = " or ".join(f"pip install {d}" for part in about.parts for d in part.distributions)
    fix = f"install {about.title} beside spec-plugins ({ways}), or see the command with --dry-run"
    if name == sys.executable:
        # A module of this very Python.
        missing = [part.module for part in about.parts if importlib.util.find_spec(part.module) is None]
        if missing:
            raise UnavailableError(f"{name} has no module {missing[0]!r}: {fix}")
        return name
    here = str(Path(sys.executable).parent)
    program = shutil.which(name, path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise UnavailableError(f"there is no program {name!r} in {here} or on PATH: {fix}")
    return program
