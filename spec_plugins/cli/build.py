"""``spec-plugins build``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from spec_plugins.cli.output import AsJson, console, progress, require, show_json, show_warning
from spec_plugins.errors import ConfigError, UnsupportedError

__all__ = ["build_command"]


def build_command(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(help="The engine: tensorrt-llm.")],
    config: Annotated[
        str,
        typer.Argument(
            help="What drafts: a configuration as JSON, the path of one, or a method's name: medusa, eagle, "
            "lookahead or draft_model."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The target's checkpoint, of TensorRT-LLM's own convert_checkpoint.py."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to: checkpoint, runtime.json, engine. New or empty."),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests at once that the engine is built for. Default: 64."),
    ] = None,
    engine_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Build for this version. Default: the installed one, else 1.2."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="ENGINE", help="Only compare the folder of a built engine with CONFIG."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the commands, write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build an engine that drafts, where an engine is built: TensorRT-LLM up to 1.2.

    Converts the head, checks the sizes, writes runtime.json, which holds what the engine is run with, and
    prints the commands of trtllm-build; where that is installed, it is run. Every other argument goes to it.

    A Medusa tree that is not given (options.choices) is chosen by the accuracies that the head's files
    record, with max_draft_nodes draft tokens, or else 24; where they record none, a chain is drafted.

    spec-plugins build tensorrt-llm medusa.json --checkpoint target-checkpoint --out medusa-engine

    spec-plugins build tensorrt-llm medusa.json --check medusa-engine/engine
    """
    require("torch", "transformers")
    require("safetensors", "transformers")
    from rich.text import Text

    from spec_plugins.adapters.tensorrt_llm import building
    from spec_plugins.adapters.tensorrt_llm.engine import RUNTIME
    from spec_plugins.launch import installed_version
    from spec_plugins.support import ENGINES, find_engine

    key = find_engine(engine)
    if key != "tensorrt-llm":
        raise UnsupportedError(
            f"{ENGINES[key].title} takes a configuration as it is; engines are built for tensorrt-llm only. "
            f"Nearest: `spec-plugins explain {key}`"
        )
    version = engine_version or installed_version(key)
    configured = building.configured(config, version)
    if check is not None:
        building.check(check, configured)
        typer.echo(f"{check} is built for {configured.proposer} with this configuration")
        return
    if checkpoint is None or out is None:
        missing = "--checkpoint" if checkpoint is None else "--out"
        raise ConfigError(f"{missing}: missing; give the target's checkpoint and a folder to build in")
    doing, began = ["reading", ""], time.monotonic()

    def show() -> Text:
        return Text(
            f"{' '.join(doing)} ({time.monotonic() - began:.0f} s)", no_wrap=True, overflow="ellipsis"
        )

    def step(verb: str, name: str) -> None:
        doing[:] = verb, name

    program = _program()
    with progress(not as_json, show):
        plan = building.prepare(
            configured, checkpoint, out, max_batch_size or building.USUAL_REQUESTS, context.args,
            lambda name: step("checking", name),
        )  # fmt: skip
        if not dry_run:
            building.write(plan, lambda name: step("writing", name))
    builds = program is not None and not dry_run
    if not as_json:
        _tell(plan, dry_run)
    if builds:
        assert program is not None
        ranks = plan.base.tp_size

        def told(folder: str, line: str, done: int) -> None:
            doing[:] = f"{folder}, {done} of {ranks} ranks:", line

        with progress(not as_json, show):
            building.build(plan, program, told)
    elif not as_json:
        why = "nothing was written" if dry_run else "trtllm-build is not on PATH: run them where it is"
        show_warning(f"no engine was built, {why}")
    if as_json:
        show_json(
            {
                "method": configured.proposer,
                "out": str(plan.out),
                "checkpoint": str(plan.checkpoint),
                "runtime": plan.runtime,
                "commands": plan.commands,
                "notes": plan.notes,
                "written": not dry_run,
                "built": builds,
            }
        )
    elif builds:
        typer.echo(
            f"built: {', '.join(str(plan.out / folder) for folder in plan.commands)}; run with {RUNTIME}"
        )


def _tell(plan: object, dry_run: bool) -> None:
    from spec_plugins.adapters.tensorrt_llm.building import Plan

    assert isinstance(plan, Plan)
    config, ranks = plan.config, plan.base.tp_size
    console().print(
        f"{config.proposer}: {plan.runtime['max_draft_len']} draft tokens a step at most, "
        f"{ranks} rank{'s' if ranks > 1 else ''}, {plan.base.config['dtype']}; {plan.out}",
        markup=False,
        soft_wrap=True,
    )
    for command in plan.commands.values():
        typer.echo(shlex.join(command))
    for note in plan.notes:
        typer.echo(f"Note: {note}", err=True)


def _program() -> str | None:
    """``trtllm-build`` of this environment, before any other's; ``None`` where there is none."""
    here = str(Path(sys.executable).parent)
    return shutil.which("trtllm-build", path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
