"""``spec-plugins doctor``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from spec_plugins.cli.output import AsJson, console, progress, show_error, show_json, show_table

if TYPE_CHECKING:
    from spec_plugins.doctor import Engine, Report

__all__ = ["doctor_command"]


def doctor_command(as_json: AsJson = False) -> None:
    from rich.text import Text

    from spec_plugins.doctor import examine

    with progress(not as_json, lambda: Text("importing the engines, to see whether they fit")):
        report = examine()
    if as_json:
        show_json(asdict(report))
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    threads = ", ".join(f"{name}={value}" for name, value in report.threads.items())
    show_table(
        ("here", ""),
        [
            ("spec-plugins", f"{report.version} in {report.location}"),
            ("python", f"{report.python} at {report.executable}"),
            ("system", report.system),
            ("cpu", f"{report.cpu}, {report.cpus} usable{f', {threads}' if threads else ''}"),
            ("numba cache", report.cache.folder or "none"),
        ],
    )
    show_table(
        ("requires", "installed", "at least"),
        [(p.name, p.version or "no", p.minimum or "-") for p in report.packages],
    )
    show_table(
        ("engine", "state", "installed", ""),
        [
            (e.name, e.state, ", ".join(f"{d} {v}" for d, v in e.versions.items()) or "-", _notes(e))
            for e in report.engines
        ],
    )
    show_table(
        ("proposer", "from", "usable"),
        [(p.name, p.provider, "yes" if p.usable else f"no: {p.reason}") for p in report.proposers],
    )
    for sentence in report.broken:
        show_error(sentence)
    if not report.broken:
        console().print("Nothing that is installed is broken.")


def _notes(engine: Engine) -> str:
    fitting = sum(s.status == "ok" for s in engine.hooks)
    hooks = [f"{fitting} of the {len(engine.hooks)} things that the adapter relies on are as expected"]
    return "; ".join([*(hooks if engine.hooks else []), *engine.notes])
