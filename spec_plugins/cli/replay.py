"""``spec-plugins replay``."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.cli.generate import Dtype
from spec_plugins.cli.output import AsJson, console, progress, require, show_warning

if TYPE_CHECKING:
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.traffic.arrivals import Concurrency
    from spec_plugins.traffic.conversations import Conversation
    from spec_plugins.traffic.reading import TrafficFile

__all__ = [
    "Examples", "Generate", "MaxConversations", "MaxNewTokens", "Mode", "ModelFolder", "Specs", "Traffic",
    "Unquantised", "provided_by", "replay_command",
]  # fmt: skip


ModelFolder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target model.")
]
Traffic = Annotated[
    Path,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A .jsonl or .jsonl.gz file of requests, a request a line, with responses or without.",
    ),
]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        "--spec",
        help="What drafts: a proposer's name, a configuration as JSON, or the path of one; may be given "
        "several times. Default: one of each proposer that needs no model.",
    ),
]
MaxConversations = Annotated[
    int | None, typer.Option(min=1, help="Replay a sample of so many, that keeps the mix. Default: all.")
]
Generate = Annotated[
    int | None,
    typer.Option(min=1, help="Answer a sample of so many prompts with the model first, greedily."),
]
MaxNewTokens = Annotated[int, typer.Option(min=2, help="Of responses that are made.")]
Examples = Annotated[
    bool,
    typer.Option(
        "--examples/--no-examples",
        help="Keep a few responses with what was accepted and rejected in them; it is text of the traffic.",
    ),
]
Unquantised = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder of the target before it was quantised."),
]


class Mode(str, enum.Enum):
    """How responses are gone through."""

    AUTO = "auto"
    POSITIONS = "positions"
    STEPS = "steps"


def replay_command(
    model: ModelFolder,
    traffic: Traffic,
    spec: Specs = None,
    engine: Annotated[
        str, typer.Option(help="Draft as in this engine: trees, or chains only.")
    ] = "transformers",
    mode: Annotated[
        Mode,
        typer.Option(
            help="positions: draft everywhere, which tells of all draft lengths. steps: step as an engine "
            "does with this very draft length. auto: the first, where the proposer allows it."
        ),
    ] = Mode.AUTO,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many requests run at once; matters to a proposer that learns from finished ones. "
            "Default: what runs at once half of the time, where the traffic says when requests came and how "
            "long they took, else 32.",
        ),
    ] = None,
    max_conversations: MaxConversations = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="The engine's longest context. Default: the model's.")
    ] = None,
    generate: Generate = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    dtype: Annotated[
        Dtype, typer.Option(help="Number format of the model, where it has to be run.")
    ] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="Where it is run.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the result, as JSON and Markdown.")
    ] = None,
    examples: Examples = True,
    as_json: AsJson = False,
    unquantised: Unquantised = None,
) -> None:
    """Run proposers over recorded responses, and say how much of what they draft was said.

    Nothing is served: at every position of a response the proposer drafts, and what came next is compared.

    spec-plugins replay path/to/model --traffic traffic.jsonl --spec ngram --spec suffix

    spec-plugins replay path/to/model --traffic prompts.jsonl --generate 100 --out replayed

    spec-plugins replay path/to/model --traffic traffic.jsonl --engine vllm --spec
    '{"proposer": "eagle3", "num_speculative_tokens": 5, "options": {"model": "path/to/head"}}'

    Heads see the target's hidden states, by transformers. Of a quantised target that it cannot load,
    `--unquantised` says whose states they may see instead.
    """
    require("transformers", "transformers")
    from rich.text import Text

    from spec_plugins.evaluation import replay_report
    from spec_plugins.evaluation.demo import configs
    from spec_plugins.evaluation.recorded import bring_together
    from spec_plugins.evaluation.replay import replay
    from spec_plugins.evaluation.replay_examples import shown_requests
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.registry import registry
    from spec_plugins.traffic.reading import TrafficFile

    for fault in registry().faults:  # one of them may have been to redact
        show_warning(fault)
    provides = provided_by(engine)
    chosen = configs(spec or ())
    target = ReplayTarget.open(model, dtype.value, device, unquantised)
    target.max_model_len = min(target.max_model_len, max_model_len or target.max_model_len)
    file = TrafficFile(traffic)
    doing = [f"reading {traffic.name}"]
    with progress(not as_json, lambda: Text(doing[0])):
        found = _conversations(file, target, max_conversations, generate, max_new_tokens, seed, doing)
        if generate and out is not None:
            from spec_plugins.evaluation.answered import write_answered

            write_answered(found, out / "answered.jsonl")
        if left_out := file.told():
            show_warning(left_out)
        recorded, at_once = bring_together(found, target.max_model_len), concurrency or _at_once(found)
        results = {}
        for name, config in chosen.items():
            results[name] = replay(
                recorded, config, target, mode=mode.value, concurrency=at_once, provides=provides,
                progress=_told(doing, name), keep=shown_requests(recorded) if examples else (),
            )  # fmt: skip
    decode = None
    if examples:
        decode = functools.partial(target.tokenizer().decode, clean_up_tokenization_spaces=False)
    about = _about(model, target, file, engine, len(recorded), recorded.response_tokens, seed)
    figures = replay_report.as_json(results, about, decode)
    if max_conversations is None and (deciles := _deciles(found)):  # fewer of a sample run at once
        figures["traffic"]["concurrency_deciles"] = deciles
    if as_json:
        typer.echo(replay_report.dumps(figures))
    else:
        console().print(replay_report.table(figures))
        for name, result in results.items():
            console().print(
                f"{name}: {result.exact}", *result.notes, sep="\n  ", markup=False, soft_wrap=True
            )
    if target.stood_in:
        show_warning(
            f"transformers cannot load {model.name!r}: heads saw the hidden states of "
            f"{target.stand_in!r}, which is not quantised; the quantised target's own may accept otherwise"
        )
    for path in replay_report.write(figures, out) if out is not None else ():
        console(stderr=True).print(f"wrote {path}", markup=False, soft_wrap=True)


def provided_by(engine: str) -> Any:
    """What an engine gives proposers; raises :class:`UnsupportedError` where nothing is known of it."""
    from spec_plugins.errors import UnsupportedError
    from spec_plugins.support import ENGINES, find_engine

    about = ENGINES[find_engine(engine)]
    if about.provides is None:
        raise UnsupportedError(f"engine: this version has no adapter for {about.title}; use another")
    return about.provides


def _conversations(
    file: TrafficFile,
    target: ReplayTarget,
    most: int | None,
    generate: int | None,
    max_new_tokens: int,
    seed: int,
    doing: list[str],
) -> list[Conversation]:
    from spec_plugins.evaluation.answered import answer, recorded_conversations

    tokenizer, longest = target.tokenizer(), target.max_model_len
    if generate is None:
        return recorded_conversations(file, tokenizer, longest, most, seed)
    from spec_plugins.adapters.transformers import Engine, SamplingParams
    from spec_plugins.errors import ConfigError

    def ask(prompts: Sequence[list[int]]) -> list[tuple[list[int], str]]:
        doing[0] = f"answering {len(prompts)} prompts"
        model = target.model
        if target.stood_in:
            raise ConfigError(
                f"--generate: transformers cannot load {target.folder!r}, and what another target says is "
                "not what it says; have it answer by `spec-plugins evaluate --engine vllm --generate N`"
            )
        answers = Engine(model).generate(prompts, SamplingParams(max_new_tokens=max_new_tokens))
        return [(a.token_ids, a.finish_reason) for a in answers]

    return answer(file, tokenizer, ask, generate, longest, max_new_tokens, seed)


def _told(doing: list[str], name: str) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        doing[0] = f"replaying {name}: {done:,} of {total:,} tokens"

    return tell


def _at_once(found: Sequence[Conversation]) -> int:
    from spec_plugins.evaluation.replay import CONCURRENCY

    known = _overlap(found)
    return CONCURRENCY if known is None else max(1, known.quantile(0.5))


def _deciles(found: Sequence[Conversation]) -> list[int]:
    """How many requests run at once in each tenth of the time, as far as the traffic says."""
    known = _overlap(found)
    return [] if known is None else [max(1, known.quantile((i + 0.5) / 10)) for i in range(10)]


def _overlap(found: Sequence[Conversation]) -> Concurrency | None:
    from spec_plugins.traffic.arrivals import overlap

    times = [(c.record.arrived, c.record.seconds) for c in found]
    known = [(a, s) for a, s in times if a is not None and s is not None]
    return overlap(*zip(*known, strict=True)) if known and len(known) == len(times) else None


def _about(
    model: Path,
    target: ReplayTarget,
    file: TrafficFile,
    engine: str,
    conversations: int,
    tokens: int,
    seed: int,
) -> dict[str, Any]:
    from spec_plugins import __version__
    from spec_plugins.evaluation.calibration_cache import model_config, model_digest
    from spec_plugins.evaluation.comparison import processor

    # Without weights it would be that of another model than the one which is served.
    weights = [*model.glob("*.safetensors"), *model.glob("*.bin")]
    return {
        "model": model.name,
        "model_sha256": model_digest(model) if weights else None,
        "model_type": model_config(model).get("model_type"),
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "traffic": file.path.name,
        "traffic_sha256": file.sha256,
        "lines_left_out": file.left_out,
        "conversations": conversations,
        "response_tokens": tokens,
        "engine": engine,
        "processor": processor(),
        "device": target.device,
        "states_of": Path(target.stand_in).name if target.stood_in and target.stand_in else None,
        "seed": seed,
        "spec_plugins": __version__,
    }
