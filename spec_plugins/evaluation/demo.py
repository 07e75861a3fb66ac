"""`spec-plugins demo`: proposers against plain decoding, on a real model and real prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_plugins.config import Config, load_config
from spec_plugins.evaluation.comparison import BASELINE

__all__ = ["CONFIGS", "MAX_NEW_TOKENS", "run"]

MAX_NEW_TOKENS = 64
CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"proposer": "ngram", "num_speculative_tokens": 4},
    "suffix": {"proposer": "suffix", "num_speculative_tokens": 8},
    "lookahead": {"proposer": "lookahead", "num_speculative_tokens": 6},
    "combine": {
        "proposer": "combine",
        "num_speculative_tokens": 8,
        "options": {"proposers": ["suffix", "ngram"], "min_tokens": 2},
    },
}


def configs(specs: Sequence[str] = ()) -> dict[str, Config]:
    """The configurations to compare, checked: those given, else one of each proposer that needs no model.

    On the plugin route, whose figures the driver has.
    """
    if not specs:
        return {name: load_config(config) for name, config in CONFIGS.items()}
    found: dict[str, Config] = {}
    for spec in specs:
        config = load_config(spec, route="plugin")
        name = config.proposer
        while name in found or name == BASELINE:
            name += "'"
        found[name] = config
    return found


def run(
    model: Path,
    data: Path,
    out: Path,
    engine: str = "transformers",
    minutes: float = 5.0,
    specs: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare on HumanEval and MT-bench prompts for some minutes; print, write and return the result.

    In float32, so that greedy output must be identical to plain decoding. ``prompts.jsonl`` in ``out`` has
    prompts of HumanEval, MT-bench and agents as a traffic file, for ``spec-plugins evaluate``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from spec_plugins.evaluation import prompts, report
    from spec_plugins.evaluation.comparison import compare, machine, open_runners

    chosen = configs(specs)
    console = Console(stderr=True)
    mixed = prompts.interleaved(prompts.humaneval(data), prompts.mtbench(data))
    with contextlib.ExitStack() as stack:
        with console.status(f"loading {model.name}") as status:
            runners = stack.enter_context(open_runners(engine, model, chosen, status.update))
        progress = stack.enter_context(
            Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)
        )
        task = progress.add_task("compiling, then 0 prompts", total=1.0)
        results = compare(
            runners,
            mixed,
            max_new_tokens=MAX_NEW_TOKENS,
            seconds=minutes * 60,
            progress=lambda share, done: progress.update(
                task, completed=share, description=f"{done} prompts"
            ),
        )
    about = {"model": model.name, "engine": engine, "dtype": "float32", "max_new_tokens": MAX_NEW_TOKENS}
    figures = report.as_json(results, {**about, **machine()})
    Console().print(report.table(figures))
    for path in [*report.write(figures, out), prompts.write_traffic(data, out / "prompts.jsonl")]:
        console.print(f"wrote {path}")
    return figures
