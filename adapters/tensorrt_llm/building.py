"""TensorRT-LLM's compiled engines, up to 1.2: from a configuration to ``trtllm-build``. Imports no engine."""

from __future__ import annotations

import json
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_plugins.adapters.tensorrt_llm.base import Base, read_base
from spec_plugins.adapters.tensorrt_llm.checkpoint import check_joined, write_checkpoint
from spec_plugins.adapters.tensorrt_llm.compiled import COMPILED, EXTERNAL
from spec_plugins.adapters.tensorrt_llm.engine import RUNTIME, check_engine, choices_in, runtime_of
from spec_plugins.adapters.tensorrt_llm.flags import (
    EXAMPLES,
    LAST_COMPILED,
    MODES,
    compiled_only,
    option,
    release_of,
    text_of,
)
from spec_plugins.checkpoints import Head, MedusaConfig
from spec_plugins.checkpoints.files import check_free, new_folder, read_folder, write_json
from spec_plugins.checkpoints.layouts import find_head
from spec_plugins.config import Config, load_config, read_config
from spec_plugins.errors import ConfigError, SpecPluginsError, UnsupportedError

__all__ = ["Plan", "build", "check", "command", "configured", "prepare", "write"]

USUAL_REQUESTS = 64
"""Requests at once, where nothing is said. Its own usual number is 2048, which it refuses with EAGLE."""
MOST_EAGLE_REQUESTS = 512
"""What the builder asserts for EAGLE."""
_RESERVED = {
    "checkpoint_dir": "--checkpoint", "output_dir": "--out", "max_batch_size": "--max-batch-size",
    "speculative_decoding_mode": "the configuration", "max_draft_len": "the configuration",
}  # fmt: skip
_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written and run for a configuration."""

    config: Config
    base: Base
    """The target's checkpoint."""
    out: Path
    """The folder of everything: :data:`RUNTIME`, ``checkpoint`` where there is a head, ``engine``."""
    checkpoint: Path
    """What ``trtllm-build`` reads: the target with the head, or the target."""
    runtime: dict[str, Any]
    commands: Mapping[str, list[str]]
    """``trtllm-build`` for each folder in ``out`` that it is to write, not quoted."""
    notes: tuple[str, ...] = ()
    head: Head | None = field(default=None, repr=False)


def configured(source: Config | Mapping[str, Any] | str | Path, version: str | None) -> Config:
    """A configuration for the builder, checked.

    Args:
        source: as :func:`spec_plugins.config.load_config` takes it.
        version: TensorRT-LLM's; ``None``: one that has the builder.

    Raises:
        ConfigError, UnknownProposerError: as :func:`spec_plugins.config.load_config`.
        UnsupportedError: the builder, or this version, does not have the method; names what does.
    """
    fields = read_config(source, COMPILED)
    method = str(fields.get("proposer", "the default"))
    if method not in COMPILED:
        raise UnsupportedError(
            f"TensorRT-LLM's engine builder has {', '.join(COMPILED)}, not {method!r}: "
            "`spec-plugins explain tensorrt-llm` says how that runs"
        )
    if fields.get("route", "auto") == "plugin":
        raise UnsupportedError(
            "route: 'plugin' runs a proposer, which needs no engine built for it: `spec-plugins serve "
            "tensorrt-llm`. Leave route out to build one"
        )
    release = LAST_COMPILED if version is None else release_of(version)
    if release > LAST_COMPILED:
        raise UnsupportedError(_no_builder(method, release))
    return load_config({**fields, "route": "native"}, native=COMPILED)


def _no_builder(method: str, release: tuple[int, int]) -> str:
    if method in MODES:
        return compiled_only(method, release)
    shown = json.dumps({"proposer": method, **EXAMPLES[method]})
    return (
        f"TensorRT-LLM {text_of(release)} has no engine builder: {text_of(LAST_COMPILED)} was the last. "
        f"Nearest: {method} on tensorrt-llm (native), {shown}"
    )


def prepare(
    config: Config,
    target: str | Path,
    out: str | Path,
    max_batch_size: int,
    arguments: Sequence[str] = (),
    on_tensor: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Read and check everything that an engine is built of, and write nothing.

    Args:
        config: of :func:`configured`.
        target: the target's checkpoint, of TensorRT-LLM's own converter.
        out: the folder that is to hold everything, new or empty.
        max_batch_size: requests at once that the engine is built for.
        arguments: the user's own, for ``trtllm-build``.
        on_tensor: told each tensor's name when it is checked.

    Raises:
        ConfigError: something does not go together.
        UnsupportedError: TensorRT-LLM cannot run it.
    """
    out, base = Path(out).absolute(), read_base(Path(target).absolute())
    check_free(out)
    for word in arguments:
        if option(word) in _RESERVED:
            raise ConfigError(
                f"{word.partition('=')[0]}: {_RESERVED[option(word)]} says it here; leave it out"
            )
    method, head, notes = config.proposer, None, []
    if method in ("medusa", "eagle"):
        head = _head(config, on_tensor)
    heads = head.config if head and isinstance(head.config, MedusaConfig) else None
    runtime = runtime_of(config, heads)
    if heads is not None and config.options.get("choices") is None:
        notes.append(_how_chosen(heads, runtime["max_draft_len"]))
    if head is not None:
        check_joined(head, base, choices_in(runtime) or [])
        if dtypes := sorted({str(t.dtype) for t in head.tensors.values()} - {str(base.dtype)}):
            notes.append(
                f"weights are converted from {', '.join(dtypes)} to {base.dtype}, the target's dtype."
            )
    if method == "eagle" and max_batch_size > MOST_EAGLE_REQUESTS:
        raise ConfigError(
            f"--max-batch-size: {max_batch_size}, and with EAGLE TensorRT-LLM takes {MOST_EAGLE_REQUESTS} at "
            "most"
        )
    if config.options.get("posterior_threshold") is not None:
        notes.append("typical acceptance (posterior_threshold) does not keep the target's distribution.")
    notes += _unused(
        config, heads is not None and bool(heads.accuracies) and not config.options.get("choices")
    )
    checkpoint = out / "checkpoint" if head else base.folder
    commands = {"engine": command(base, checkpoint, out / "engine", max_batch_size, runtime, arguments)}
    if method == "draft_model":
        draft, folder = _draft(config, base), out / "draft-engine"
        commands[folder.name] = command(
            draft, draft.folder, folder, max_batch_size, runtime, arguments, drafts=True
        )
    return Plan(config, base, out, checkpoint, runtime, commands, tuple(notes), head)


def _head(config: Config, on_tensor: Callable[[str], None] = lambda name: None) -> Head:
    """The head that a configuration names, read and checked."""
    folder = config.options["model"]
    head = find_head(read_folder(folder), on_tensor).head
    if head.config.method != config.proposer:
        raise ConfigError(
            f"options.model: {folder} is a head of {head.config.method}, not of {config.proposer}"
        )
    return head


def _how_chosen(heads: MedusaConfig, nodes: int) -> str:
    if heads.accuracies:
        return (
            f"the tree of {nodes} draft tokens was chosen by the accuracies that the head's files record; "
            "options.choices takes another, max_draft_nodes another size."
        )
    return (
        f"the head's files record no accuracies to choose a tree by, so a chain of {nodes} is drafted; "
        "`spec-plugins train` records them, options.choices takes a tree."
    )


def check(engine: str | Path, config: Config) -> None:
    """Compare an engine that is built with a configuration.

    Raises:
        ConfigError: they do not fit; or the tree depends on the head, and that cannot be read.
    """
    heads = None
    if config.proposer == "medusa" and config.options.get("choices") is None:
        found = _head(config).config
        assert isinstance(found, MedusaConfig)
        heads = found
    check_engine(engine, runtime_of(config, heads))


def _unused(config: Config, tree_is_chosen: bool) -> Iterator[str]:
    said = config.model_dump(exclude_defaults=True)
    names: list[str] = [name for name in ("max_draft_nodes", "containment") if name in said]
    if tree_is_chosen and "max_draft_nodes" in names:
        names.remove("max_draft_nodes")
    elsewhere = config.proposer == "lookahead" or config.options.get("choices")
    if elsewhere and "num_speculative_tokens" in config.model_fields_set:
        names.append("num_speculative_tokens")
    if names:
        yield f"{' and '.join(names)}: no effect on this engine; its options say how much it drafts."


def command(
    base: Base,
    checkpoint: Path,
    engine: Path,
    max_batch_size: int,
    runtime: Mapping[str, Any],
    arguments: Sequence[str] = (),
    drafts: bool = False,
) -> list[str]:
    """``trtllm-build`` for a checkpoint, not quoted.

    Args:
        base: what the checkpoint is of.
        checkpoint: the folder that is read.
        engine: the folder that is written.
        max_batch_size: requests at once.
        runtime: what the engine is to be run with.
        arguments: the user's own.
        drafts: whether it is the engine of a draft model, and not the one that verifies.
    """
    mode = runtime["speculative_decoding_mode"]
    words = [
        "trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine),
        "--gemm_plugin", base.config["dtype"], "--max_batch_size", str(max_batch_size),
    ]  # fmt: skip
    if not drafts:
        words += ["--speculative_decoding_mode", mode, "--max_draft_len", str(runtime["max_draft_len"])]
    # EAGLE's plug-ins need it; a draft engine and its target keep their caches from step to step by it.
    if mode in ("eagle", EXTERNAL):
        words += ["--use_paged_context_fmha", "enable"]
    return [*words, *arguments]


def _draft(config: Config, base: Base) -> Base:
    """The checkpoint of a draft model."""
    draft = read_base(Path(config.options["model"]).absolute())
    if draft.target.vocab_size != base.target.vocab_size:
        raise ConfigError(
            f"options.model: the draft has {draft.target.vocab_size} tokens, and the target "
            f"{base.target.vocab_size}; take a draft with the target's tokenizer"
        )
    return draft


def write(plan: Plan, on_tensor: Callable[[str], None] = lambda name: None) -> None:
    """Write what ``trtllm-build`` reads, and :data:`RUNTIME`; the folder appears when it is whole.

    Raises as :func:`spec_plugins.adapters.tensorrt_llm.checkpoint.write_checkpoint`.
    """
    with new_folder(plan.out) as temporary:
        if plan.head is not None:
            choices = choices_in(plan.runtime) or []
            write_checkpoint(plan.head, plan.base, temporary / "checkpoint", choices, on_tensor)
        write_json(temporary / RUNTIME, plan.runtime)


def build(
    plan: Plan, program: str, on_line: Callable[[str, str, int], None] = lambda folder, line, done: None
) -> None:
    """Run ``trtllm-build`` for every engine of a plan that is written; each folder appears when it is whole.

    What it prints is kept in ``{folder}.log``. An interruption ends it too, and leaves the checkpoint.

    Args:
        plan: written by :func:`write`.
        program: path of ``trtllm-build``.
        on_line: told each line, the engine's folder, and how many of its ranks are built.

    Raises:
        SpecPluginsError: it failed; with its last lines.
        ConfigError: what it built is not what the configuration asks for.
    """
    for folder, asked in plan.commands.items():
        with new_folder(plan.out / folder) as temporary:
            words = [program, *asked[1:]]
            words[words.index("--output_dir") + 1] = str(temporary)
            last: deque[str] = deque(maxlen=_LAST_LINES)
            with _running(words) as process, (plan.out / f"{folder}.log").open("w") as log:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    last.append(line)
                    on_line(folder, line.strip(), len(list(temporary.glob("rank*.engine"))))
            if process.returncode:
                raise SpecPluginsError(
                    f"trtllm-build ended with exit code {process.returncode}. What it reads stays in "
                    f"{plan.checkpoint}, all that it said in {plan.out / folder}.log, which ends with\n"
                    f"{''.join(last)}"
                )
            if folder == "engine":
                check_engine(temporary, plan.runtime)


@contextmanager
def _running(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
