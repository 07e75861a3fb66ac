"""``spec-plugins confirm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spec_plugins.cli.output import AsJson, console, progress, require, show_json
from spec_plugins.cli.replay import ModelFolder, Traffic
from spec_plugins.errors import UnsupportedError

__all__ = ["check_serves", "confirm_command"]

SERVES = ("vllm", "sglang")


def confirm_command(
    model: ModelFolder,
    replays: Annotated[
        list[Path],
        typer.Argument(exists=True, help="What `spec-plugins replay --out` wrote, files or folders."),
    ],
    times: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="What `spec-plugins calibrate --out` wrote."),
    ],
    traffic: Traffic,
    concurrency: Annotated[
        str, typer.Option(help="How many users ask at once, each anew once answered: numbers with commas.")
    ] = "1,8",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="What to serve beside plain decoding, by its name in the replay; may be given several "
            "times. Default: the two best."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=2, help="How often each user asks, where the traffic has requests enough.")
    ] = 6,
    open_loop: Annotated[
        bool,
        typer.Option(
            "--open-loop/--no-open-loop",
            help="Also send requests as fast as they came in the traffic, where it has arrival times.",
        ),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the result, as Markdown and JSON.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve the best methods and plain decoding, and set what was predicted beside what is measured.

    spec-plugins confirm path/to/model out --times out/times.json --traffic traffic.jsonl

    Starts the engine that was calibrated, with the same arguments, once for each method and twice without
    any, and puts load on it with the engine's own benchmark client. Requests need responses, which say how
    long answers may be: `evaluate --generate` writes such a file, `answered.jsonl`.
    """
    from rich.text import Text

    from spec_plugins.cli.calibrate import numbers
    from spec_plugins.cli.recommend import read_times
    from spec_plugins.evaluation import confirmation_report
    from spec_plugins.evaluation.candidates import read_replays
    from spec_plugins.evaluation.confirmation import Asked, confirm
    from spec_plugins.support import ENGINES

    read, step_times = read_replays(replays), read_times(times)
    engine = step_times.setting.engine
    check_serves("--times", engine)
    require("transformers", "transformers")
    require(f"spec_plugins.adapters.{ENGINES[engine].package}.load_runner", f"evaluate,{engine}")
    from spec_plugins.evaluation.answered import recorded_conversations
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.traffic.reading import TrafficFile

    target = ReplayTarget.open(model)
    tokenizer = target.tokenizer()
    found = recorded_conversations(TrafficFile(traffic), tokenizer, target.max_model_len)
    asked = Asked(
        str(model), sorted({*numbers("--concurrency", concurrency)}), tuple(method or ()), rounds=rounds,
        open_loop=open_loop,
    )  # fmt: skip
    doing = ["reading"]

    def tell(done: float, words: str) -> None:
        doing[0] = f"{done:4.0%}  {words}"

    with progress(not as_json, lambda: Text(doing[0])):
        result = confirm(read, step_times, found, tokenizer, asked, tell)
    if as_json:
        show_json(result.model_dump(mode="json"))
    else:
        console().print(confirmation_report.table(result))
        for sentence in confirmation_report.sentences(result):
            console().print(sentence, markup=False, soft_wrap=True)
    for path in confirmation_report.write(result, out) if out is not None else ():
        console(stderr=True).print(f"wrote {path}", markup=False, soft_wrap=True)


def check_serves(option: str, engine: str) -> None:
    """Raise :class:`UnsupportedError` where this version starts no server of an engine to put load on."""
    from spec_plugins.support import find_engine

    if find_engine(engine) not in SERVES:
        raise UnsupportedError(
            f"{option}: nothing can be confirmed in {engine}, of which this version starts no server to put "
            f"load on; calibrate with --engine {' or '.join(SERVES)}"
        )
