"""A comparison as a table, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_plugins.evaluation.comparison import BASELINE, Measured

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["as_json", "markdown", "table", "write"]

POSITIONS = 4
"""Draft positions shown; the JSON has them all."""
COLUMNS = ("prompts", "proposer", "tok/forward", "accepted at 1–4", "tok/s", "speed-up", "identical")


def as_json(results: Mapping[str, Measured], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, as plain data."""
    baseline = results[BASELINE]
    tags = sorted(set(baseline.tags))
    return {
        "about": dict(about),
        "proposers": {
            name: {
                "config": m.config.model_dump() if m.config else None,
                "all": m.summary(baseline),
                "by_tag": {tag: m.summary(baseline, tag) for tag in tags},
                "statistics": dict(m.statistics),
            }
            for name, m in results.items()
        },
    }


def _rows(data: Mapping[str, Any], quartiles: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    tags = data["proposers"][BASELINE]["by_tag"]
    for tag in [*tags, "all"]:
        for name, figures in data["proposers"].items():
            s = figures["all"] if tag == "all" else figures["by_tag"][tag]
            accepted = figures["statistics"].get("acceptance_by_position", [])[:POSITIONS]
            low, _, high = s["speedup_quartiles"]
            speedup = f"{s['speedup']:.2f}" + (f" ({low:.2f}–{high:.2f})" if quartiles else "")
            rows.append(
                (
                    f"{s['prompts']} {tag}",
                    name,
                    f"{s['tokens_per_forward']:.2f}",
                    " ".join(f"{a:.2f}".removeprefix("0") for a in accepted) if tag == "all" else "",
                    f"{s['tokens_per_second']:.1f}",
                    "" if name == BASELINE else speedup,
                    "" if name == BASELINE else f"{s['identical']}/{s['prompts']}",
                )
            )
    return rows


def table(data: Mapping[str, Any]) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title="Speculation against plain decoding, same prompts, in turn")
    shown.add_column("proposer", no_wrap=True)
    for column in ("tokens/\nforward", "accepted\nat 1 2 3 4", "tok/s", "speed-up", "same\noutput"):
        shown.add_column(column, justify="right", no_wrap=True)
    before = ""
    for prompts, *row in _rows(data, quartiles=False):
        if prompts != before:
            shown.add_section()
            shown.add_row(f"[bold]{prompts}[/]")
        before = prompts
        shown.add_row(*row)
    return shown


def markdown(data: Mapping[str, Any]) -> str:
    """For documents, with what it was measured on."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(data, quartiles=True)]
    about = "; ".join(f"{k} {v}" for k, v in data["about"].items())
    note = (
        "Speed-up is of the sums, with quartiles over prompts; acceptance is of those drafted at a position."
    )
    return "\n".join([*lines, "", note, "", about, ""])


def write(data: Mapping[str, Any], out: Path) -> list[Path]:
    """Write JSON, Markdown and the picture into a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "comparison.json", out / "comparison.md", out / "comparison.png"]
    paths[0].write_text(json.dumps(data, indent=1), encoding="utf-8")
    paths[1].write_text(markdown(data), encoding="utf-8")
    _draw(data, paths[2])
    return paths


def _draw(data: Mapping[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    proposers = data["proposers"]
    names = [name for name in proposers if name != BASELINE]
    tags = [*proposers[BASELINE]["by_tag"], "all"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for k, tag in enumerate(tags):
        figures = [proposers[n]["all"] if tag == "all" else proposers[n]["by_tag"][tag] for n in names]
        at = [i + (k - (len(tags) - 1) / 2) * 0.25 for i in range(len(names))]
        bars = left.bar(at, [f["speedup"] for f in figures], 0.23, label=tag)
        left.bar_label(bars, fmt="%.2f", fontsize=7)
    left.axhline(1, color="black", linewidth=1)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("speed-up over plain decoding")
    left.set_ylim(bottom=0)
    left.legend()
    for name in names:
        rates = proposers[name]["statistics"]["acceptance_by_position"]
        right.plot(range(1, len(rates) + 1), rates, marker="o", label=name)
    right.set_xlabel("draft position")
    right.set_ylabel("accepted, of those drafted there")
    right.set_ylim(0, 1)
    right.legend()
    figure.suptitle(
        ", ".join(
            f"{k} {data['about'][k]}" for k in ("model", "dtype", "processor", "date") if k in data["about"]
        )
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
