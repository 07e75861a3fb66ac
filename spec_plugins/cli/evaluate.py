"""``spec-plugins evaluate``: replay, calibrate and recommend in one go."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.calibrate import RUNS_IN, calibrate_command, numbers
from spec_plugins.cli.generate import Dtype
from spec_plugins.cli.output import console, progress, require, show_warning
from spec_plugins.cli.recommend import read_times, recommend_command
from spec_plugins.cli.replay import (
    Examples,
    Generate,
    MaxConversations,
    MaxNewTokens,
    Mode,
    ModelFolder,
    Specs,
    Traffic,
    Unquantised,
    replay_command,
)

if TYPE_CHECKING:
    from spec_plugins.config import Config

__all__ = ["evaluate_command"]


def evaluate_command(
    context: typer.Context,
    model: ModelFolder,
    traffic: Traffic,
    report: Annotated[Path, typer.Option(file_okay=False, help="Folder for all that is found.")],
    engine: Annotated[
        str, typer.Option(help=f"Which engine is to serve: {', '.join(RUNS_IN)}.")
    ] = "transformers",
    concurrency: Annotated[
        str, typer.Option(help="How many requests decode at once: numbers with commas.")
    ] = "1,4,16",
    spec: Specs = None,
    max_conversations: MaxConversations = None,
    generate: Generate = None,
    max_new_tokens: MaxNewTokens = 256,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to measure of each kind, at least.")] = 40,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the model.")] = Dtype.AUTO,
    examples: Examples = True,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Then serve the two best methods and plain decoding at the lowest and the highest "
            "concurrency, and set what was predicted beside what is measured.",
        ),
    ] = False,
    unquantised: Unquantised = None,
) -> None:
    """Say which method pays on your traffic and engine, with which draft length, or that none does.

    spec-plugins evaluate path/to/model --traffic traffic.jsonl --engine vllm --report out

    First `replay`: what would have been accepted. Then `calibrate`, at the contexts that the traffic has: how
    long steps take in the engine; arguments that are not named here go to it. Then `recommend`. What was
    calibrated is kept, so that the same command goes on where it was interrupted. With `--confirm` also
    `confirm`, the only one that serves the methods themselves.

    spec-plugins evaluate path/to/quantised --unquantised path/to/model --traffic prompts.jsonl --generate 100
    --engine vllm --report out

    With `--generate`, vLLM and SGLang answer the prompts by their own server, so that it is the target as it
    is served that answers. `--unquantised` also says what quantising gains, and speculation with it; where
    `--quantization` quantises, its folder is the target's, and the argument is left out for it.
    """
    from spec_plugins.cli.confirm import SERVES, check_serves, confirm_command
    from spec_plugins.evaluation.demo import configs
    from spec_plugins.support import find_engine

    if confirm:
        check_serves("--engine", engine)
    if unquantised is not None:
        from spec_plugins.evaluation.quantisation import check_unquantised

        check_unquantised(model, unquantised, context.args)
    asked = sorted({*numbers("--concurrency", concurrency)})
    chosen = configs(spec or ())
    lengths = _draft_tokens(chosen.values())
    times, out = report / "times.json", console(stderr=True)
    by_server = generate is not None and find_engine(engine) in SERVES
    parts, number = 3 + by_server + confirm + (unquantised is not None), itertools.count(1)

    def title(words: str) -> None:
        out.print(f"[bold]{next(number)} of {parts}: {words}")

    if by_server and generate is not None:
        title(f"what the target answers[/] in {engine}")
        traffic = _answered(context, model, traffic, report, engine, generate, max_new_tokens, dtype)
        generate = max_conversations = None
    title(f"what is accepted[/] of what proposers draft, on {traffic.name}")
    replay_command(
        model, traffic, spec, engine, Mode.AUTO, None, max_conversations, None, generate, max_new_tokens, 0,
        dtype, "cpu", report, examples, unquantised=unquantised,
    )  # fmt: skip
    _warn_of_states(engine, chosen.values(), context.args)
    mean = json.loads((report / "replay.json").read_text(encoding="utf-8"))["traffic"]["mean_context"]
    title(f"how long steps take[/] in {engine}")
    calibrate_command(
        context, str(model), engine, _listed(asked), _listed(lengths), _listed(_around(mean)), steps,
        dtype.value, times,
    )  # fmt: skip
    title("what pays[/]")
    recommend_command([report], times, _listed(asked), report)
    if unquantised is not None:
        title(f"what quantising gains[/] in {engine}")
        _quantisation(context, unquantised, report, engine, asked, _around(mean), steps, dtype)
    if confirm:
        title(f"what is measured[/] in {engine}")
        answered = report / "answered.jsonl" if generate else traffic
        confirm_command(
            model, [report], times, answered, _listed({asked[0], asked[-1]}), None, 6, True, report
        )


def _answered(
    context: typer.Context,
    model: Path,
    traffic: Path,
    report: Path,
    engine: str,
    generate: int,
    max_new_tokens: int,
    dtype: Dtype,
) -> Path:
    """Have the engine's own server answer a sample of prompts; returns the file of what was said."""
    require("transformers", "transformers")
    from rich.text import Text

    from spec_plugins.evaluation.answered import answer, answering, write_answered
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.support import find_engine
    from spec_plugins.traffic.reading import TrafficFile

    target, file, doing = ReplayTarget.open(model), TrafficFile(traffic), [""]
    tokenizer = target.tokenizer()

    def tell(words: str) -> None:
        doing[0] = words

    key = find_engine(engine)
    with (
        progress(True, lambda: Text(doing[0])),
        answering(key, str(model), dtype.value, context.args, max_new_tokens, tell) as (ask, takes),
    ):
        longest = min(takes, target.max_model_len)
        found = answer(file, tokenizer, ask, generate, longest, max_new_tokens)
    if left_out := file.told():
        show_warning(left_out)
    path = report / "answered.jsonl"
    write_answered(found, path)
    return path


def _warn_of_states(engine: str, configs: Iterable[Config], arguments: Sequence[str]) -> None:
    """Say so where the engine quantises as it loads, and heads saw states of the folder's own weights."""
    from spec_plugins.evaluation.quantisation import without_quantising
    from spec_plugins.proposer import Need

    states = {Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES}
    heads = [config.proposer for config in configs if config.create_proposer().needs & states]
    if heads and without_quantising(arguments) != tuple(arguments):
        show_warning(
            f"{', '.join(heads)}: replayed with hidden states of the weights as they lie in the folder, "
            f"which {engine} quantises as it loads them; its own may accept otherwise"
        )


def _quantisation(
    context: typer.Context,
    unquantised: Path,
    report: Path,
    engine: str,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    dtype: Dtype,
) -> None:
    """Calibrate the unquantised target without drafts, and set both targets side by side."""
    from rich.text import Text

    from spec_plugins.evaluation import quantisation
    from spec_plugins.evaluation.calibration import Plan, calibrate
    from spec_plugins.evaluation.recommendation_report import write_texts
    from spec_plugins.evaluation.recommended import Recommendation
    from spec_plugins.support import find_engine

    doing = [""]

    def tell(done: float, left: float, words: str) -> None:
        doing[0] = f"{done:4.0%}  {words}"

    plan = Plan(
        str(unquantised), find_engine(engine), tuple(concurrencies), (0,), tuple(contexts), dtype.value,
        quantisation.without_quantising(context.args), steps,
    )  # fmt: skip
    with progress(True, lambda: Text(doing[0])):
        plain = calibrate(plan, progress=tell)
    recommended = Recommendation.model_validate_json(
        (report / "recommendation.json").read_text(encoding="utf-8")
    )
    found = quantisation.gains(recommended, read_times(report / "times.json"), plain)
    console().print(quantisation.table(found))
    for note in found.notes:
        console().print(note, markup=False, soft_wrap=True)
    paths = write_texts({"times_unquantised.json": plain.model_dump_json(indent=1)}, report)
    for path in (*paths, *quantisation.write(found, report)):
        console(stderr=True).print(f"wrote {path}", markup=False, soft_wrap=True)


def _listed(values: Iterable[int]) -> str:
    return ",".join(map(str, sorted(values)))


def _around(context: float) -> list[int]:
    """Two contexts that have it between them, no shorter than what can be calibrated."""
    return [max(16, math.floor(0.75 * context)), max(17, math.ceil(1.25 * context))]


def _draft_tokens(configs: Iterable[Config]) -> list[int]:
    """None, a few, and the most that any of them drafts."""
    longest = max(config.draft_nodes(config.create_proposer()) for config in configs)
    return sorted({0, *(n for n in (1, 2, 4, 8, 16) if n < longest), longest})
