"""From traffic to a trained head in a folder: capture, train, write, with a card that says what it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from spec_plugins import __version__
from spec_plugins.checkpoints.files import weights_digest
from spec_plugins.checkpoints.head import usual_layers
from spec_plugins.checkpoints.layouts import check_layout
from spec_plugins.errors import ConfigError
from spec_plugins.traffic.conversations import Traffic, read_traffic
from spec_plugins.training.beginnings import begin_eagle, begin_medusa, begin_with, frequent, said
from spec_plugins.training.card import write_card
from spec_plugins.training.draft import DraftObjective, begin_draft, begin_with_draft
from spec_plugins.training.features import (
    Captured,
    FeatureStore,
)
from spec_plugins.training.objectives import EagleObjective, MedusaObjective, Objective, Score
from spec_plugins.training.trainer import Progress, Schedule, split, train

__all__ = ["HeadPlan", "Trained", "train_head"]

CONVERSATIONS_AT_LEAST = 64
AUX_LAYERS_AT_LEAST = 6
"""Of a target with fewer layers an EAGLE-3 head takes the last three, and its files name them."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What to train, on what, and where to put it."""

    method: Literal["medusa", "eagle", "eagle3", "draft"]
    model: Path
    data: Path
    out: Path
    features: Path
    """Where what the target's layers say is kept; heads of the same target and data share it."""
    begin_with: Path | None = None
    """A trained head to go on from, which then decides what it drafts and how far; ``None``: begin from the
    target's weights."""
    draft_vocab_size: int = 8192
    positions: int = 4
    """Heads of ``medusa``; draft positions that ``eagle`` and ``eagle3`` are trained ahead."""
    hidden_size: int = 192
    num_layers: int = 4
    """Of ``draft``."""
    max_length: int = 1024
    """Conversations are cut there, in tokens."""
    max_conversations: int | None = None
    """A sample of so many, taken by chance; ``None``: all."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the files."""
    layout: str | None = None
    """Of the files; ``None``: EAGLE's own, which engines load by themselves, where it holds the head, and
    otherwise this project's."""
    device: str = "cpu"
    schedule: Schedule = field(default_factory=Schedule)


class Watcher(Protocol):
    """Is told how it goes."""

    def read(self, traffic: Traffic) -> None: ...
    def captured(self, tokens: int, total: int) -> None: ...
    def trained(self, progress: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it."""

    score: Score
    coverage: float
    """The share of the target's own tokens that the draft vocabulary holds."""


def train_head(plan: HeadPlan, watcher: Watcher) -> Trained:
    """Do all of a plan; what was done before it was interrupted is not done again.

    Raises:
        ConfigError: the data, the model or a folder cannot be used; says which and why.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if plan.out.exists() and any(plan.out.iterdir()):
        raise ConfigError(f"out: {str(plan.out)!r} is not empty; give another, or delete it")
    if plan.layout is not None and plan.method == "draft":
        raise ConfigError(f"layout: {plan.layout!r} is one of heads; a draft is a model as any, leave it out")
    if plan.layout is not None:
        check_layout(plan.layout, plan.method)
        if plan.method == "medusa" and plan.layout != "spec-plugins":
            raise ConfigError(
                f"layout: {plan.layout!r} has no place for heads over the target's LM head; leave it out, "
                "and convert them: spec-plugins convert --target"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(plan.model)
        # What is kept is bfloat16, so that a GPU's own format loses nothing; a CPU is fastest in float32.
        dtype = torch.float32 if plan.device == "cpu" else "auto"
        model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {str(plan.model)!r} cannot be loaded: {error}") from error
    model = model.to(plan.device).eval().requires_grad_(False)
    traffic = read_traffic(plan.data, tokenizer, plan.max_length)
    traffic.sample(plan.max_conversations)
    if len(traffic.conversations) < CONVERSATIONS_AT_LEAST:
        raise ConfigError(
            f"data: {len(traffic.conversations)} conversations are too few to train on some and score on "
            f"others; give {CONVERSATIONS_AT_LEAST} or more"
        )
    watcher.read(traffic)
    store, about = FeatureStore(plan.features), _about(plan, model, traffic)
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        watcher.captured(done, traffic.tokens)

    store.fill(model, traffic, about, advance)
    paths = store.paths()
    torch.manual_seed(plan.schedule.seed)
    objective, coverage = _objective(plan, model, about, split(paths)[0])
    del model
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    state = plan.out.with_name(f"{plan.out.name}.training.pt")
    identity = {
        "method": plan.method,
        "draft_vocab_size": plan.draft_vocab_size,
        "positions": plan.positions,
        "hidden_size": plan.hidden_size,
        "num_layers": plan.num_layers,
        "begin_with": _digest(plan.begin_with),
        **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(about).items()},
    }
    score = train(objective, paths, plan.schedule, state, identity, watcher.trained)
    objective.save(plan.out, score, getattr(torch, plan.dtype), plan.layout)
    if plan.method == "draft":
        tokenizer.save_pretrained(plan.out)
    write_card(plan.out, _facts(plan, about, traffic, score, coverage))
    state.unlink(missing_ok=True)
    return Trained(score, coverage)


def _about(plan: HeadPlan, model: Any, traffic: Traffic) -> Captured:
    layers = model.config.get_text_config().num_hidden_layers
    aux = usual_layers(layers) if layers >= AUX_LAYERS_AT_LEAST else tuple(range(max(0, layers - 3), layers))
    return Captured(
        plan.model.name, weights_digest(plan.model), traffic.file.sha256, plan.max_length, aux,
        len(traffic.conversations), traffic.tokens, traffic.answered_tokens,
    )  # fmt: skip


def _objective(plan: HeadPlan, model: Any, about: Captured, paths: list[Path]) -> tuple[Objective, float]:
    lm_head = model.get_output_embeddings().weight.detach().clone()
    counts = said(paths, len(lm_head))
    module, draft_ids = _begin(plan, model, about, counts)
    coverage = float(counts[draft_ids].sum() / counts.sum().clamp(min=1))
    module, draft_ids = module.to(plan.device), draft_ids.to(plan.device)
    if plan.method == "draft":
        return DraftObjective(module, lm_head, draft_ids), coverage
    if plan.method == "medusa":
        return MedusaObjective(module, lm_head, draft_ids), coverage
    embeddings = model.get_input_embeddings().weight.detach().clone()
    return EagleObjective(module, embeddings, lm_head, draft_ids, plan.positions), coverage


def _begin(plan: HeadPlan, model: Any, about: Captured, counts: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A module to train, and the tokens that it drafts, ``[draft_vocab]``."""
    if plan.begin_with is not None and plan.method != "draft":
        return begin_with(plan.begin_with, plan.method, model, about.aux_layers)
    drafted = frequent(counts, len(counts) if plan.method == "eagle" else plan.draft_vocab_size)
    if plan.method == "draft":
        if plan.begin_with is not None:
            return begin_with_draft(plan.begin_with, len(counts)), drafted
        return begin_draft(model, drafted, plan.hidden_size, plan.num_layers), drafted
    if plan.method == "medusa":
        return begin_medusa(model, drafted, plan.positions, about.target), drafted
    default = about.aux_layers == usual_layers(model.config.get_text_config().num_hidden_layers)
    layers = () if default else about.aux_layers
    return begin_eagle(model, drafted, plan.method, about.target, layers), drafted


def _digest(folder: Path | None) -> str | None:
    return None if folder is None else weights_digest(folder)


def _facts(
    plan: HeadPlan, about: Captured, traffic: Traffic, score: Score, coverage: float
) -> dict[str, Any]:
    return {
        "method": plan.method,
        "target": about.target,
        "target_weights": about.weights,
        "data_sha256": about.data_sha256,
        "conversations": about.conversations,
        "tokens": about.tokens,
        "answered_tokens": about.answered_tokens,
        "lines_left_out": traffic.file.left_out,
        "begun_with": _digest(plan.begin_with),
        "draft_vocab_coverage": round(coverage, 4),
        "schedule": asdict(plan.schedule),
        "held_out_accuracy": [round(a, 4) for a in score.accuracy],
        "held_out_acceptance_length": round(score.acceptance_length, 4),
        "spec_plugins": __version__,
        "torch": torch.__version__,
    }
