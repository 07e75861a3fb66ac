"""``spec-plugins train``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.cli.output import AsJson, console, require, show_json, show_warning

if TYPE_CHECKING:
    from spec_plugins.traffic.conversations import Traffic
    from spec_plugins.training.trainer import Progress

__all__ = ["train_command"]


class Trainable(str, enum.Enum):
    """What can be trained."""

    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    DRAFT = "draft"


class FileDtype(str, enum.Enum):
    """Number formats of a head's files."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def train_command(
    method: Annotated[Trainable, typer.Argument(help="Which kind of head, or a small draft model.")],
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the target model.")],
    data: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A .jsonl or .jsonl.gz file: 'messages' that end with an answer, or a 'prompt' and a "
            "'response' or its 'token_ids', a line. Answers of the target itself serve best.",
        ),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the head; new or empty.")],
    features: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for what the target's layers say over the data, shared by heads of the same target "
            "and data. Default: beside OUT.",
        ),
    ] = None,
    begin_with: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A head to go on from, for example after the target changed. It keeps its draft vocabulary "
            "and its number of heads or layers. Default: begin from the target's weights.",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int, typer.Option(min=1, help="How many of the target's tokens it can draft; EAGLE takes all.")
    ] = 8192,
    positions: Annotated[
        int, typer.Option(min=1, max=16, help="Medusa: heads. EAGLE: draft positions trained ahead.")
    ] = 4,
    hidden_size: Annotated[int, typer.Option(min=8, help="Of a draft model.")] = 192,
    num_layers: Annotated[int, typer.Option(min=1, help="Of a draft model.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Times over the data, at most.")] = 4,
    patience: Annotated[
        int, typer.Option(min=1, help="Epochs without a better held-out score until it ends.")
    ] = 2,
    learning_rate: Annotated[float, typer.Option(min=1e-7, max=1.0, help="The highest.")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Positions in one step of training.")] = 2048,
    max_length: Annotated[int, typer.Option(min=8, help="Where conversations are cut, in tokens.")] = 1024,
    max_conversations: Annotated[
        int | None, typer.Option(min=1, help="Train on a sample of so many. Default: all.")
    ] = None,
    dtype: Annotated[FileDtype, typer.Option(help="Number format of the files.")] = FileDtype.BFLOAT16,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout of the files, as for `spec-plugins convert --to`. Default: EAGLE's own, which vLLM "
            "and SGLang load by themselves; for Medusa this project's."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the order of the data.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a head, or a draft model, for a target model on one's own traffic.

    spec-plugins train eagle3 --model path/to/model --data traffic.jsonl --out eagle3-head

    The target runs over the data once; that, and training, go on where they were interrupted. It takes one
    GPU or a CPU: for more, train with the speculators library and use `spec-plugins convert`.
    """
    require("spec_plugins.training.session", "train")
    from spec_plugins.registry import registry
    from spec_plugins.training.session import HeadPlan, train_head
    from spec_plugins.training.trainer import Schedule

    for fault in registry().faults:  # one of them may have been to redact
        show_warning(fault)
    plan = HeadPlan(
        method.value,
        model,
        data,
        out,
        features or out.with_name(f"{out.name}.features"),
        begin_with=begin_with,
        draft_vocab_size=draft_vocab_size,
        positions=positions,
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_length=max_length,
        max_conversations=max_conversations,
        dtype=dtype.value,
        layout=layout,
        device=device,
        schedule=Schedule(epochs, learning_rate, batch_tokens=batch_tokens, patience=patience, seed=seed),
    )
    with _Shown() as shown:
        trained = train_head(plan, shown)
    if as_json:
        show_json(
            {
                "folder": str(out),
                "held_out_accuracy": trained.score.accuracy,
                "held_out_acceptance_length": trained.score.acceptance_length,
                "draft_vocab_coverage": trained.coverage,
            }
        )
        return
    name = "draft_model" if method is Trainable.DRAFT else method.value
    console().print(
        f"Wrote {out}: acceptance length {trained.score.acceptance_length:.2f} on conversations held out of "
        f"training.\nTry it: spec-plugins generate {model} --spec "
        f"'{{\"proposer\": \"{name}\", \"options\": {{\"model\": \"{out}\"}}}}' \"…\"",
        markup=False, soft_wrap=True,
    )  # fmt: skip


class _Shown:
    """Progress on stderr: bars for people, a line for each epoch elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task: Any = None
        self._about = ""

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def read(self, traffic: Traffic) -> None:
        if left_out := traffic.file.told():
            show_warning(left_out)
        self._say(
            f"{len(traffic.conversations):,} conversations, {traffic.tokens:,} tokens, of which the target "
            f"said {traffic.answered_tokens:,}"
        )

    def captured(self, tokens: int, total: int) -> None:
        self._show("capturing features", tokens / total, f"{tokens:,} tokens")

    def trained(self, progress: Progress) -> None:
        score = progress.trained
        if progress.shard:
            accuracy = " ".join(f"{a:.2f}" for a in score.accuracy)
            figures = f"loss {score.mean_loss:.2f}, accuracy {accuracy}"
            self._show(f"epoch {progress.epoch + 1}", progress.shard / progress.shards, figures)
        elif progress.validated is not None:
            held_out = progress.validated
            accuracy = " ".join(f"{a:.3f}" for a in held_out.accuracy)
            self._say(
                f"epoch {progress.epoch}: held out: accuracy {accuracy}, acceptance length "
                f"{held_out.acceptance_length:.2f}"
            )

    def _say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, soft_wrap=True)

    def _show(self, about: str, done: float, figures: str) -> None:
        if self._task is None or about != self._about:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task, self._about = self._bars.add_task(about, total=1.0, figures=""), about
        self._bars.update(self._task, completed=done, figures=figures)
