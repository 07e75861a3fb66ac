"""``python -m benchmarks``: run cases, print their tables, write JSON and Markdown."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.case import CASES, Context, Result
from spec_plugins.evaluation.comparison import machine

CACHE = Path(os.environ.get("SPEC_PLUGINS_CACHE", Path.home() / ".cache" / "spec-plugins"))


def markdown(name: str, result: Result, about: dict[str, object]) -> str:
    """A section of a report."""
    lines = [f"## {name}", "", CASES[name].summary, ""]
    lines += ["| " + " | ".join(result.columns) + " |", "|" + " --- |" * len(result.columns)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in result.rows]
    lines += ["", *result.notes, "", "; ".join(f"{k} {v}" for k, v in about.items()), ""]
    return "\n".join(lines)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Cases to run; all without any.")] = None,
    model: Annotated[Path, typer.Option(help="The model's folder.")] = CACHE / "models/SmolLM2-135M-Instruct",
    data: Annotated[Path, typer.Option(help="The folder of prompts.")] = CACHE / "data",
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("bench-out"),
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, to see that the cases work.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Name the cases and stop.")] = False,
) -> None:
    """Run measured comparisons on an otherwise idle machine."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name not in ("case", "__main__"):
            importlib.import_module(f"benchmarks.{module.name}")
    console = Console()
    if show:
        for case in CASES.values():
            console.print(f"[bold]{case.name}[/]  {case.summary}")
        return
    unknown = [name for name in names or [] if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"no case is named {unknown[0]!r}; there are {', '.join(CASES)}")
    out.mkdir(parents=True, exist_ok=True)
    waiting = Console(stderr=True)
    for name in names or CASES:
        with waiting.status(name) as status:
            context = Context(model, data, quick, lambda text, n=name, s=status: s.update(f"{n}: {text}"))  # type: ignore[misc]
            result = CASES[name].run(context)
        about = {**machine(), "command": f"make bench ARGS={name}", **({"quick": True} if quick else {})}
        table = Table(*result.columns, title=f"{name}: {CASES[name].summary}")
        for row in result.rows:
            table.add_row(*map(str, row))
        console.print(table, *result.notes, sep="\n")
        (out / f"{name}.md").write_text(markdown(name, result, about), encoding="utf-8")
        (out / f"{name}.json").write_text(
            json.dumps(
                {"about": about, "columns": result.columns, "rows": result.rows, "notes": result.notes},
                indent=1,
            ),
            encoding="utf-8",
        )


typer.run(main)
