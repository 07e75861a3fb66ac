"""``python -m benchmarks``: run cases, print their tables, write JSON and Markdown."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.case import CACHE, CASES, Context, Result
from spec_plugins.errors import SpecPluginsError
from spec_plugins.evaluation.comparison import machine


def markdown(name: str, result: Result, about: dict[str, object]) -> str:
    """A section of a report."""
    lines = [f"## {name}", "", CASES[name].summary, ""]
    lines += ["| " + " | ".join(result.columns) + " |", "|" + " --- |" * len(result.columns)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in result.rows]
    lines += ["", *result.notes, "", "; ".join(f"{k} {v}" for k, v in about.items()), ""]
    return "\n".join(lines)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Cases to run; all in this environment.")] = None,
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
            needs = f" (needs {case.needs}; runs by name only)" if case.needs else ""
            console.print(f"[bold]{case.name}[/]  {case.summary}{needs}")
        return
    unknown = [name for name in names or [] if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"no case is named {unknown[0]!r}; there are {', '.join(CASES)}")
    out.mkdir(parents=True, exist_ok=True)
    waiting = Console(stderr=True)
    for name in names or [name for name, case in CASES.items() if case.needs is None]:
        with waiting.status(name) as status:
            context = Context(model, data, quick, lambda text, n=name, s=status: s.update(f"{n}: {text}"))  # type: ignore[misc]
            try:
                result = CASES[name].run(context)
            except SpecPluginsError as error:
                waiting.print(f"[red]{name}[/]: ", error, sep="", highlight=False, soft_wrap=True)
                raise typer.Exit(1) from None
        about = {
            **machine(),
            **result.about,
            "command": f"make bench ARGS={name}",
            **({"quick": True} if quick else {}),
        }
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
    for case in [] if names else CASES.values():
        if case.needs is not None:
            console.print(f"{case.name} needs {case.needs} and was left out: make bench ARGS={case.name}")


typer.run(main)
