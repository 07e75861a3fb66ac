"""``spec-plugins inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_plugins.cli.output import AsJson, progress, require, show_json, show_table

if TYPE_CHECKING:
    from spec_plugins.checkpoints import TargetModel
    from spec_plugins.checkpoints.files import Stored
    from spec_plugins.checkpoints.layouts import Found

__all__ = ["inspect_command"]


def inspect_command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Folder of a head, or of a draft model.")
    ],
    target: Annotated[
        Path | None,
        typer.Option(metavar="MODEL_DIR", help="Folder of a target model: say whether it fits that one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is, for which target it was made, and which engines load it as it is.

    spec-plugins inspect path/to/head --target path/to/model

    Exit code 1 where it does not fit the target, 2 where it is broken or unknown.
    """
    require("torch", "transformers")
    require("safetensors", "transformers")
    from rich.text import Text

    from spec_plugins.checkpoints import Wanted, misfits, read_target
    from spec_plugins.checkpoints.draft_model import describe, vocabulary_misfits
    from spec_plugins.checkpoints.files import has_weights, read_folder
    from spec_plugins.checkpoints.layouts import find_head, is_draft_model

    doing = [""]
    with progress(not as_json, lambda: Text(f"checking {doing[0]}")):
        model = read_target(target) if target else None
        stored = read_folder(checkpoint)
        if is_draft_model(stored):
            said = {**describe(stored), **_weights(stored)}
            faults = vocabulary_misfits(stored, model) if model else []
        else:
            found = find_head(stored, lambda name: doing.__setitem__(0, name))
            faults = misfits(found.head.config, model) if model else []
            # Of a target that it does not fit, and of one without weights, nothing can be copied.
            usable = model if model is not None and not faults and has_weights(model.folder) else None
            said = _head(found, Wanted(usable))
    fits = None if model is None else not faults
    if as_json:
        show_json({**said, "fits": fits, "faults": faults})
    else:
        rows = [(key.replace("_", " "), _text(value)) for key, value in said.items()]
        if model is not None:
            rows.append((f"fits {target}", f"no: {'; '.join(faults)}" if faults else "yes"))
        show_table(("checkpoint", str(checkpoint)), rows)
    if fits is False:
        raise typer.Exit(1)


def _head(found: Found, wanted: Any) -> dict[str, Any]:
    from spec_plugins.checkpoints import EagleConfig, MedusaConfig
    from spec_plugins.support import METHODS

    config = found.head.config
    said: dict[str, Any] = {
        "method": f"{config.method}: {METHODS[config.method].summary}",
        "layout": found.layout.name,
        "made_for": config.target or "not said",
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "draft_vocabulary": config.draft_vocab_size,
    }
    if isinstance(config, MedusaConfig):
        said["heads"] = config.num_heads
        said["layers"] = f"{config.num_layers} in each head{', with biases' if config.bias else ''}"
        said["lm_head"] = {
            "target": "the target's",
            "own": "one for each head",
            "shared": "one for all heads",
        }[config.lm_head]
    if isinstance(config, EagleConfig):
        said["layers"] = config.num_layers
        said["embeddings"] = "its own" if config.own_embeddings else "the target's"
        if config.method == "eagle3":
            said["target_layers"] = _target_layers(config, wanted.target)
    said |= _weights(found.stored)
    for engine in ("vllm", "sglang"):
        said[engine] = _engine(found, engine, wanted)
    return said


def _target_layers(config: Any, target: TargetModel | None) -> str:
    if config.aux_layers:
        return f"the input of {', '.join(map(str, config.aux_layers))}"
    taken = f": {', '.join(map(str, config.layers_taken(target.num_layers)))}" if target else ""
    return f"the input of the usual ones, 2, the middle one and the last but 2{taken}"


def _engine(found: Found, engine: str, wanted: Any) -> str:
    from spec_plugins.checkpoints.layouts import check_layout
    from spec_plugins.errors import UnsupportedError
    from spec_plugins.support import ENGINES

    config = found.head.config
    obstacles = found.obstacles(engine, wanted)
    if not obstacles:
        return f"loads it as it is: {ENGINES[engine].native[config.method]}"
    text = f"does not load it as it is: {'; '.join(obstacles)}"
    try:
        layout = check_layout(engine, config.method)
    except UnsupportedError:
        return text
    # The obstacle may be of the head itself; then another layout is no way out.
    lost = layout.lost(layout.complete(found.head, wanted), wanted)
    return text if lost else f"{text}. It does after `spec-plugins convert --to {engine}`"


def _weights(stored: Stored) -> dict[str, Any]:
    tensors = stored.tensors.values()
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()})
    return {
        "parameters": sum(t.numel() for t in tensors if t.is_floating_point()),
        "bytes": sum(t.nbytes for t in tensors),
        "dtype": ", ".join(dtypes),
        "file": stored.weights,
    }


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
