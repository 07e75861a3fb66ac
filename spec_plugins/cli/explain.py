"""``spec-plugins explain``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.output import AsJson, console, show_json, show_table
from spec_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from spec_plugins.launch import Flags, Route
    from spec_plugins.support import Explanation

__all__ = ["explain_command"]


def explain_command(
    engine: Annotated[
        str | None,
        typer.Argument(help="transformers, vllm, sglang or tensorrt-llm. Without it: all, side by side."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Argument(help="A registered proposer, or a method such as eagle3. Without it: all of them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    from spec_plugins.support import ENGINES, explain, explain_all, matrix

    if engine is None:
        cells = matrix()
        if as_json:
            show_json(cells)
        else:
            titles = [about.title for about in ENGINES.values()]
            show_table(("method", *titles), [(m, *(row[e] for e in ENGINES)) for m, row in cells.items()])
        return
    if method is not None:
        found = explain(engine, method)
        if as_json:
            flags, _ = _flags(found)
            show_json(
                {
                    **asdict(found),
                    "flags": flags and flags.flags,
                    "environment": flags and flags.environment,
                }
            )
        else:
            _show(found)
        return
    every = explain_all(engine)
    if as_json:
        show_json([asdict(e) for e in every])
        return
    show_table(
        ("method", "route", "how, or why not"),
        [(e.method, e.route or "none yet", _how(e)) for e in every],
    )


def _how(e: Explanation) -> str:
    if e.route is None:
        return f"plugin: {e.plugin.rstrip('.')}. Nearest: {e.nearest or 'nothing'}"
    return e.plugin if e.route == "plugin" else e.native


def _show(e: Explanation) -> None:
    from rich.table import Table
    from rich.text import Text

    from spec_plugins.support import ENGINES, METHODS, runs_as_plugin

    about = METHODS.get(e.method)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [("route", e.route or "none yet")]
    if e.route == "plugin":
        rows += [("why", e.plugin), ("native", e.native), ("uses", _uses(e)), *_start(e, "plugin")]
    elif e.route == "native":
        _, refusal = _flags(e)
        rows += [("why", e.native), *([("but", refusal)] if refusal else []), ("plugin", e.plugin)]
        if runs_as_plugin(e.engine, e.method):
            rows += [(f"plugin {name}", text) for name, text in _start(e, "plugin")]
    else:
        rows += [("plugin", e.plugin), ("native", e.native), ("nearest", e.nearest or "nothing")]
    for name, text in rows:
        table.add_row(name, Text(text))
    out = console()
    title = f"{e.method} on {ENGINES[e.engine].title}{f': {about.summary}' if about else ''}"
    out.print(title, markup=False)
    out.print(table)


def _start(e: Explanation, route: Route) -> list[tuple[str, str]]:
    """Rows that say what to start the engine with, where it takes flags, or what stands against that."""
    found, refusal = _flags(e, route)
    if found is None:
        return [("flags", refusal)] if refusal else []
    variables = [f"export {name}={shlex.quote(value)}" for name, value in found.environment.items()]
    return [("flags", shlex.join(found.flags)), *(("variable", text) for text in variables)]


def _flags(e: Explanation, route: Route | None = None) -> tuple[Flags | None, str]:
    """What to start the engine with, where it takes flags, or what stands against that."""
    from spec_plugins.launch import example

    try:
        return example(e, route), ""
    except ConfigError as error:
        return None, f"see `spec-plugins args` with a configuration; {error}"
    except UnsupportedError as error:
        return None, str(error)


def _uses(e: Explanation) -> str:
    if e.takes is None:
        return "what its options ask for"
    return ", ".join(f"{name} {'yes' if used else 'no'}" for name, used in e.takes.items())
