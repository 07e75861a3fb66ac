"""The command line, ``spec-plugins``: one file a command.

Whatever is heavy (torch, numba, an engine) is imported inside the command that needs it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spec_plugins import __version__
from spec_plugins.cli.args import args_command
from spec_plugins.cli.baseline import baseline_app
from spec_plugins.cli.build import build_command
from spec_plugins.cli.calibrate import calibrate_command
from spec_plugins.cli.confirm import confirm_command
from spec_plugins.cli.convert import convert_command
from spec_plugins.cli.demo import demo_command
from spec_plugins.cli.doctor import doctor_command
from spec_plugins.cli.evaluate import evaluate_command
from spec_plugins.cli.explain import explain_command
from spec_plugins.cli.generate import generate_command
from spec_plugins.cli.inspect import inspect_command
from spec_plugins.cli.list import list_command
from spec_plugins.cli.output import show_error
from spec_plugins.cli.recommend import recommend_command
from spec_plugins.cli.replay import replay_command
from spec_plugins.cli.schema import schema_command
from spec_plugins.cli.serve import serve_command
from spec_plugins.cli.train import train_command
from spec_plugins.errors import SpecPluginsError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Turns the project's own errors, which are written for the user, into a message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecPluginsError as error:
            show_error(str(error))
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding for the engine you already run.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spec-plugins {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


app.command("list", help="Show the registered proposers, and which of them can be used here.")(list_command)
app.command("explain", help="Say how a method runs on an engine: by which route, and why.")(explain_command)
app.command("args", help="Print an engine's flags for a configuration, ready to be pasted.")(args_command)
# Without -h, which would be found in the engine's own short options, vLLM's -dph say.
app.command(
    "serve",
    short_help="Start an engine's own server with a proposer in it.",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    },
)(serve_command)
app.command(
    "build",
    short_help="Build an engine that drafts, for TensorRT-LLM up to 1.2.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(build_command)
app.command("schema", help="Print the JSON schema of the configuration.")(schema_command)
app.command("inspect", short_help="Say what a trained head or draft model is, and whether it fits a target.")(
    inspect_command
)
app.command("convert", short_help="Write a trained head in the layout of another engine or trainer.")(
    convert_command
)
app.command("generate", help="Complete prompts with a model on this machine, with speculation or without.")(
    generate_command
)
app.command("train", short_help="Train a head for a target model on one's own traffic.")(train_command)
app.command(
    "evaluate",
    short_help="Say which method pays on your traffic: replay, calibrate and recommend in one go.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(evaluate_command)
app.command(
    "calibrate",
    short_help="Measure how long an engine's steps take, by batch size and draft length.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(calibrate_command)
app.command("replay", short_help="Run proposers over recorded responses: what would have been accepted.")(
    replay_command
)
app.command("recommend", short_help="Say which method pays at which concurrency, or that none does.")(
    recommend_command
)
app.command("confirm", short_help="Serve the best methods: what was predicted beside what is measured.")(
    confirm_command
)
app.add_typer(baseline_app, name="baseline")
app.command("doctor", help="Check what is installed here. Exit code 1 where something of it is broken.")(
    doctor_command
)
app.command("demo", help="Compare the built-in proposers with plain decoding on a real model.")(demo_command)


def main() -> None:
    """Run the command line."""
    app()
