"""How commands print: tables for people, JSON for programs, one red message for an error."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.errors import UnavailableError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "AsJson",
    "console",
    "progress",
    "require",
    "show_error",
    "show_json",
    "show_table",
    "show_warning",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
# Work that takes no longer than this shows no progress.
PATIENCE_SECONDS = 2.0


def console(*, stderr: bool = False) -> Console:
    """A console; one that is not a terminal is wide, so that piped tables are not folded."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, width=wide, highlight=False)


def show_json(data: Any) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, whose first column is never folded."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as text: what others wrote is no markup
    console().print(table)


def show_error(message: str) -> None:
    """Print an error to stderr."""
    console(stderr=True).print(f"Error: {message}", style="red", markup=False, soft_wrap=True)


def show_warning(message: str) -> None:
    """Print a warning to stderr."""
    console(stderr=True).print(f"Warning: {message}", style="yellow", markup=False, soft_wrap=True)


def require(module: str, extra: str) -> None:
    """Import a module that a command needs.

    Raises:
        UnavailableError: something it imports is not installed; names the extra that brings it.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"this command needs the module {error.name!r}, which is not installed: "
            f"pip install 'spec-plugins[{extra}]'"
        ) from error


def interactive() -> bool:
    """Whether somebody watches stderr."""
    return sys.stderr.isatty()


@contextmanager
def progress(wanted: bool, show: Callable[[], RenderableType]) -> Iterator[None]:
    """Show on stderr how work inside the ``with`` block goes, once it has taken a while.

    ``show`` is called a few times a second from another thread.
    """
    if not (wanted and interactive()):
        yield
        return
    from rich.live import Live

    live = Live(
        console=console(stderr=True), get_renderable=show, transient=True, refresh_per_second=4,
        redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    timer = threading.Timer(PATIENCE_SECONDS, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()
