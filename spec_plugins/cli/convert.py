"""``spec-plugins convert``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_plugins.cli.output import AsJson, console, progress, require, show_json, show_warning
from spec_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from spec_plugins.checkpoints.files import Stored
    from spec_plugins.checkpoints.layouts import Found

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of the head: config.json and weights.")
    ],
    to: Annotated[
        str,
        typer.Option(
            help="The layout wanted: vllm, sglang, speculators, medusa, eagle, tensorrt-llm, or this "
            "project's own, spec-plugins, which holds everything."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to. New or empty. Default: SRC with -LAYOUT behind it."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="Folder of the target model: the head must fit it, and what a layout needs of it is copied. "
            "For tensorrt-llm, which needs all of it: its checkpoint, of TensorRT-LLM's own converter.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How many tokens to draft, in what is printed and written."),
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Write a trained head (Medusa, EAGLE, EAGLE-3) in another layout, with nothing lost.

    spec-plugins convert path/to/eagle3-head --to vllm

    spec-plugins convert path/to/medusa --to vllm --target path/to/model --out medusa-vllm

    spec-plugins convert path/to/medusa --to tensorrt-llm --target path/to/checkpoint

    What a layout cannot hold is named, and then nothing is written.
    """
    require("torch", "transformers")
    require("safetensors", "transformers")
    from rich.text import Text

    from spec_plugins.checkpoints import Wanted, read_target, write_head
    from spec_plugins.checkpoints.files import check_free, read_folder
    from spec_plugins.checkpoints.layouts import check_layout, find_head, is_draft_model

    doing = ["reading", ""]
    with progress(not as_json, lambda: Text(" ".join(doing))):
        stored = read_folder(source)
        if is_draft_model(stored):
            raise ConfigError(
                f"{source} is a causal language model and needs no conversion: every engine loads it as it "
                "is, by the method draft_model"
            )
        folder = out or Path(f"{os.path.abspath(source)}-{to}")
        check_free(folder)
        if to == "tensorrt-llm" and target is not None:
            _into_checkpoint(stored, folder, target, num_speculative_tokens, as_json, doing)
            return
        wanted = Wanted(read_target(target) if target else None, num_speculative_tokens)

        def step(verb: str, name: str) -> None:
            doing[:] = verb, name

        found = find_head(stored, lambda name: step("checking", name))
        check_layout(to, found.head.config.method)
        doing[:] = "comparing with the target", ""
        write_head(found.head, folder, to, wanted, lambda name: step("writing", name))
        written = find_head(read_folder(folder), lambda name: step("reading back", name))
    flags, notes = _flags(written, folder, wanted)
    if as_json:
        layouts = {"from": found.layout.name, "to": to}
        show_json({"method": found.head.config.method, **layouts, "folder": str(folder), "flags": flags})
        return
    console().print(
        f"{found.head.config.method}, {found.layout.name} to {to}: {len(written.stored.tensors)} tensors in "
        f"{folder}",
        markup=False,
        soft_wrap=True,
    )
    for engine, words in flags.items():
        typer.echo(f"{engine}: {shlex.join(words)}")
    for note in notes:
        show_warning(note)


def _into_checkpoint(
    stored: Stored, folder: Path, target: Path, num_speculative_tokens: int, as_json: bool, doing: list[str]
) -> None:
    """Write a head into its target's checkpoint, for TensorRT-LLM's engine builder."""
    from spec_plugins.adapters.tensorrt_llm import building
    from spec_plugins.adapters.tensorrt_llm.base import read_base
    from spec_plugins.adapters.tensorrt_llm.checkpoint import write_checkpoint
    from spec_plugins.adapters.tensorrt_llm.trees import chain
    from spec_plugins.checkpoints.layouts import find_head

    def step(verb: str, name: str) -> None:
        doing[:] = verb, name

    found, base = find_head(stored, lambda name: step("checking", name)), read_base(target)
    write_checkpoint(
        found.head, base, folder, chain(num_speculative_tokens), lambda name: step("writing", name)
    )
    method = found.head.config.method
    sizes = {"speculative_decoding_mode": method, "max_draft_len": num_speculative_tokens}
    engine = folder.with_name(f"{folder.name}-engine")
    command = building.command(base, folder, engine, building.USUAL_REQUESTS, sizes)
    if as_json:
        layouts = {"from": found.layout.name, "to": "tensorrt-llm"}
        show_json({"method": method, **layouts, "folder": str(folder), "flags": {"tensorrt-llm": command}})
        return
    ranks = f"{base.tp_size} rank{'s' if base.tp_size > 1 else ''}"
    console().print(
        f"{method}, {found.layout.name} to tensorrt-llm: with the target, {ranks}, in {folder}",
        markup=False,
        soft_wrap=True,
    )
    typer.echo(f"tensorrt-llm: {shlex.join(command)}")
    show_warning(
        "`spec-plugins build tensorrt-llm` does this and more: trees, and what the engine is run with"
    )


def _flags(written: Found, folder: Path, wanted: object) -> tuple[dict[str, list[str]], list[str]]:
    """For each engine that loads the folder by itself, the flags that do so; and why an engine does not."""
    from spec_plugins.checkpoints import Wanted
    from spec_plugins.launch import prepare

    assert isinstance(wanted, Wanted)
    flags, notes = {}, []
    for engine in written.layout.engines:
        if written.obstacles(engine, wanted):
            continue
        config = {
            "proposer": written.head.config.method,
            "route": "native",
            "num_speculative_tokens": wanted.num_speculative_tokens,
            "options": {"model": str(folder.resolve())},
        }
        try:
            flags[engine] = prepare(engine, config).flags
        except UnsupportedError as error:
            notes.append(str(error))
    return flags, notes
