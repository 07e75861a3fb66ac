"""What replays found, as plain data, as a table and as Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spec_plugins.evaluation.intervals import ratio_intervals
from spec_plugins.evaluation.recorded import Recorded
from spec_plugins.evaluation.replay import Replayed
from spec_plugins.evaluation.replay_examples import Decode, examples
from spec_plugins.evaluation.trace import PLACES, Counts

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["as_json", "dumps", "figures", "markdown", "table", "write"]

POSITIONS = 4
"""Draft positions shown in tables; the JSON has them all."""
COLUMNS = ("requests", "proposer", "draft tokens", "tokens a forward", "accepted at 1–4", "with fewer")
NOTE = (
    "Tokens a forward is the acceptance length, the target's own token included, with a 95 % interval over "
    "requests. Accepted at 1–4: the share of all steps in which the draft was accepted up to that position. "
    "With fewer: tokens a forward with drafts of so many tokens."
)
Rows = npt.NDArray[np.intp]


def as_json(
    results: Mapping[str, Replayed], about: Mapping[str, Any], decode: Decode | None = None
) -> dict[str, Any]:
    """Everything, as plain data, of replays of the same responses; with ``decode`` also examples."""
    recorded = next((r.recorded for r in results.values()), None)
    return {
        "about": dict(about),
        "traffic": {} if recorded is None else _traffic(recorded),
        "proposers": {
            name: {**_proposer(r), "examples": _examples(r, decode)} for name, r in results.items()
        },
    }


def _examples(result: Replayed, decode: Decode | None) -> list[dict[str, Any]]:
    return [] if decode is None else [e.model_dump() for e in examples(result, decode)]


def _traffic(recorded: Recorded) -> dict[str, Any]:
    prompts = recorded.prompt_lengths.astype(np.int64)
    decoded = np.maximum(recorded.lengths - prompts - 1, 0)
    return {
        "requests": len(recorded),
        "prompt_tokens": int(prompts.sum()),
        "response_tokens": recorded.response_tokens,
        # Over the tokens that decoding gives; what an engine attends to before each.
        "mean_context": _ratio((decoded * (prompts + 1 + (decoded - 1) / 2)).sum(), decoded.sum()),
    }


def dumps(data: Mapping[str, Any]) -> str:
    """As JSON, lists of numbers on a line each."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n([-+.\deE,\s]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def _proposer(result: Replayed) -> dict[str, Any]:
    tags = result.recorded.tags
    counts = {size: result.counts(size) for size in result.sizes}
    return {
        "config": result.config.model_dump(),
        "mode": result.mode,
        "exact": result.exact,
        "notes": list(result.notes),
        "trees": result.trees,
        "concurrency": result.concurrency,
        "seconds": result.seconds,
        "positions_per_second": result.positions_per_second,
        "faults": result.statistics.get("faults", {}),
        "drafting": {
            # What the proposer took, on the machine of the replay; for each request that it drafted for.
            "seconds": result.statistics.get("propose_seconds", 0.0),
            "steps": result.statistics.get("steps", 0),
            "requests": int(np.count_nonzero(result.trace.nodes >= 0)),
        },
        "all": figures(counts, np.arange(len(tags))),
        "by_tag": {
            tag: figures(counts, np.array([i for i, t in enumerate(tags) if tag in t]))
            for tag in sorted({tag for of_one in tags for tag in of_one})
        },
        "by_request": [
            {
                "draft_tokens": size,
                "steps": found.steps.tolist(),
                "drafts": found.drafted[:, 0].tolist(),
                "drafted_tokens": found.draft_tokens.tolist(),
                "accepted_tokens": found.accepted_tokens.tolist(),
            }
            for size, found in counts.items()
        ],
    }


def figures(counts: Mapping[int, Counts], rows: Rows) -> dict[str, Any]:
    """Figures over some of the conversations.

    Args:
        counts: by draft length or size of a tree; the last is the configuration's.
        rows: which conversations.

    Returns:
        ``by_size``: for each size, acceptance length and all that goes into it. ``by_position`` and
        ``by_place``, of the last size: by position in the draft, and by where in the response a step began.
        An interval is ``None`` where there are too few requests for one.
    """
    sizes = list(counts)
    last = counts[sizes[-1]]
    steps = np.stack([counts[s].steps[rows] for s in sizes], 1)
    accepted = np.stack([counts[s].accepted_tokens[rows] for s in sizes], 1)
    known = last.drafted[rows] - last.past_end[rows]
    depth = int(np.flatnonzero(last.drafted[rows].any(0)).max(initial=-1)) + 1
    by_depth = np.repeat(last.steps[rows][:, None], depth, 1)
    columns = [
        (accepted, steps),
        (last.accepted[rows][:, :depth], by_depth),
        (last.accepted[rows][:, :depth], known[:, :depth]),
        (last.place_accepted[rows], last.place_steps[rows]),
    ]
    low, high = ratio_intervals(*(np.hstack([c[k] for c in columns]) for k in (0, 1)))
    ends = np.cumsum([0, *(c[0].shape[1] for c in columns)])
    lengths, survival, rates, places = (
        [
            (_ratio(above[:, i].sum(), below[:, i].sum()), _pair(low[at + i], high[at + i]))
            for i in range(above.shape[1])
        ]
        for (above, below), at in zip(columns, ends, strict=False)
    )
    return {
        "requests": len(rows),
        "steps": int(steps[:, -1].sum()),
        "by_size": [
            {
                "draft_tokens": size,
                "acceptance_length": 1 + value,
                "interval": _shifted(interval),
                "steps": int(counts[size].steps[rows].sum()),
                "drafted_tokens": int(counts[size].draft_tokens[rows].sum()),
                "accepted_tokens": int(counts[size].accepted_tokens[rows].sum()),
                "survival": _survival(counts[size], rows),
            }
            for size, (value, interval) in zip(sizes, lengths, strict=True)
        ],
        "by_position": [
            {
                "position": i + 1,
                "survival": survival[i][0],
                "survival_interval": survival[i][1],
                "acceptance_rate": rates[i][0],
                "acceptance_rate_interval": rates[i][1],
                "drafted": int(last.drafted[rows, i].sum()),
                "accepted": int(last.accepted[rows, i].sum()),
                "past_end": int(last.past_end[rows, i].sum()),
            }
            for i in range(depth)
        ],
        "by_place": [
            {
                "from_token": place,
                "acceptance_length": 1 + value,
                "interval": _shifted(interval),
                "steps": int(last.place_steps[rows, k].sum()),
            }
            for k, (place, (value, interval)) in enumerate(zip(PLACES, places, strict=True))
            if last.place_steps[rows, k].any()
        ],
    }


def _survival(counts: Counts, rows: Rows) -> list[float]:
    """For each position, the share of steps whose draft was accepted up to it."""
    steps = max(1, int(counts.steps[rows].sum()))
    reached = counts.drafted[rows].sum(0)
    return [float(a / steps) for a, d in zip(counts.accepted[rows].sum(0), reached, strict=True) if d]


def _ratio(above: Any, below: Any) -> float:
    return float(above / below) if below else 0.0


def _pair(low: float, high: float) -> list[float] | None:
    return None if math.isnan(low) or math.isnan(high) else [float(low), float(high)]


def _shifted(interval: list[float] | None) -> list[float] | None:
    return None if interval is None else [1 + end for end in interval]


def _rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    proposers = data["proposers"]
    tags = list(dict.fromkeys(tag for p in proposers.values() for tag in p["by_tag"]))
    for tag in [*tags, "all"] if len(tags) > 1 else ["all"]:
        for name, proposer in proposers.items():
            found = proposer["all"] if tag == "all" else proposer["by_tag"].get(tag)
            if found is None:
                continue
            *smaller, whole = found["by_size"]
            interval = whole["interval"]
            within = "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f})"
            rows.append(
                (
                    f"{found['requests']} {tag}",
                    name,
                    f"{whole['draft_tokens']}{' (tree)' if proposer['trees'] else ''}",
                    f"{whole['acceptance_length']:.2f}{within}",
                    " ".join(f"{s:.2f}".removeprefix("0") for s in whole["survival"][:POSITIONS]),
                    ", ".join(
                        f"{s['draft_tokens']}: {s['acceptance_length']:.2f}"
                        for s in smaller
                        if s["draft_tokens"].bit_count() == 1
                    ),
                )
            )
    return rows


def table(data: Mapping[str, Any]) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title="Replay of recorded responses: nothing was served")
    shown.add_column("proposer", no_wrap=True)
    for column in ("draft\ntokens", "tokens/forward\n(95 %)", "accepted\nat 1 2 3 4"):
        shown.add_column(column, justify="right", no_wrap=True)
    before = ""
    for requests, *row in _rows(data):
        if requests != before:
            shown.add_section()
            shown.add_row(f"[bold]{requests}[/]")
        before = requests
        shown.add_row(*row[:4])
    return shown


def markdown(data: Mapping[str, Any]) -> str:
    """For documents: all draft lengths too, and what each replay is worth."""
    lines = [*_table(COLUMNS, _rows(data)), "", NOTE, ""]
    for name, proposer in data["proposers"].items():
        lines += [f"## {name}", "", f"This is {proposer['exact']}.", ""]
        lines += [f"- {note}" for note in proposer["notes"]] + [""] * bool(proposer["notes"])
        sizes = proposer["all"]["by_size"]
        if len(sizes) > 1:
            rows = [
                (f"{s['draft_tokens']}", f"{s['acceptance_length']:.3f}", f"{s['drafted_tokens']:,}")
                for s in sizes
            ]
            lines += [*_table(("draft tokens", "tokens a forward", "drafted in all"), rows), ""]
        places = [
            (f"from token {p['from_token']}", f"{p['acceptance_length']:.2f}", f"{p['steps']:,}")
            for p in proposer["all"]["by_place"]
        ]
        lines += [*_table(("where in the response", "tokens a forward", "steps"), places), ""]
    lines += ["; ".join(f"{k} {v}" for k, v in data["about"].items()), ""]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def write(data: Mapping[str, Any], out: Path) -> list[Path]:
    """Write JSON and Markdown into a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "replay.json", out / "replay.md"]
    paths[0].write_text(dumps(data), encoding="utf-8")
    paths[1].write_text(markdown(data), encoding="utf-8")
    return paths
