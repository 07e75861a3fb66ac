"""A baseline: how much of each request's drafts a target accepted, kept for comparing an updated one.

A bundle is one JSON file, with what was measured, on what and how, and its own sha256. It holds counts and
digests, and no text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import Field

from spec_plugins.config import Config
from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.gate import REQUESTS_AT_LEAST

__all__ = [
    "Acceptance", "Baseline", "Provenance", "Requests", "Settings", "check_new", "files_digest", "heads_of",
    "placed", "read", "write",
]  # fmt: skip

Counts = list[Annotated[int, Field(ge=0)]]

_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja",
)  # fmt: skip


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Settings(_Strict):
    """How it was measured; a check measures in the same way."""

    engine: str = "transformers"
    """Whose abilities count: trees, or chains only."""
    dtype: str = "float32"
    max_model_len: Annotated[int, Field(ge=2)]
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the sample, and of each response where they are sampled."""
    concurrency: Annotated[int, Field(ge=1)] = 32
    mode: Literal["auto", "positions", "steps"] = "auto"


class Provenance(_Strict):
    """What it was measured on."""

    model: str
    """The target's folder, without where that lies."""
    model_sha256: str
    """See :func:`files_digest`."""
    traffic: str
    """As it was named."""
    traffic_sha256: str
    spec_plugins: str
    engine_version: str | None
    machine: dict[str, Any]
    """Processor, versions, date; see :func:`spec_plugins.evaluation.comparison.machine`."""


class Requests(_Strict):
    """The prompts, and what the target said; in each list, a request in the same place."""

    lines: Counts
    """Of the traffic file, from 1."""
    prompts: list[str]
    """Digests of token ids."""
    responses: list[str]
    response_tokens: Counts


class Acceptance(_Strict):
    """What one proposer would have counted on them."""

    config: dict[str, Any]
    heads: dict[str, str] = {}
    """Digests of the folders that its options name."""
    exact: str
    """How far it is what an engine counts, in words."""
    steps: Counts
    accepted: Counts

    @property
    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Steps and accepted draft tokens, ``[n]`` each."""
        return np.array(self.steps, np.int64), np.array(self.accepted, np.int64)


class Baseline(_Strict):
    """All of it."""

    format: Literal["spec-plugins baseline 1"] = "spec-plugins baseline 1"
    provenance: Provenance
    settings: Settings
    requests: Requests
    proposers: Annotated[dict[str, Acceptance], Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _alike(self) -> Baseline:
        said, n = self.requests, len(self.requests.lines)
        lists: list[Sequence[Any]] = [said.prompts, said.responses, said.response_tokens]
        lists += [of for p in self.proposers.values() for of in (p.steps, p.accepted)]
        if n < REQUESTS_AT_LEAST or len(set(said.lines)) < n or any(len(of) != n for of in lists):
            raise ValueError(f"{n} requests, and not as many of everything, or fewer than a test needs")
        return self

    @property
    def sha256(self) -> str:
        """Of everything."""
        data = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(data.encode()).hexdigest()


# ----------------------------------------------------------------------------------------------- files


def check_new(path: Path) -> None:
    """Raise :class:`ConfigError` where something is there already: a baseline is not written over."""
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"baseline: {str(path)!r} is there already, and a baseline is never overwritten; "
            "name another file, or remove it"
        )


def write(baseline: Baseline, path: Path) -> None:
    """Write a bundle, whole or not at all, for reading only.

    Raises:
        ConfigError: something is there already, or it cannot be written.
    """
    check_new(path)
    text = json.dumps({"sha256": baseline.sha256, **baseline.model_dump(mode="json")}, indent=1)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.chmod(0o444)
        try:
            os.link(unfinished, path)  # unlike a rename, never over what came meanwhile
        except FileExistsError:
            check_new(path)
        except OSError:  # a file system without links
            os.rename(unfinished, path)
    except OSError as error:
        raise ConfigError(f"baseline: {str(path)!r} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read(path: Path) -> Baseline:
    """Read a bundle.

    Raises:
        ConfigError: it cannot be read, is of another format, or was changed after it was saved.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        digest = data.pop("sha256")
        found = Baseline.model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ConfigError(
            f"baseline: {str(path)!r} is no baseline of this version ({where}: {first['msg']}); "
            "save a new one"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"baseline: {str(path)!r} cannot be read as one ({error}); give a file that "
            "`spec-plugins baseline save` wrote"
        ) from error
    if digest != found.sha256:
        raise ConfigError(
            f"baseline: {str(path)!r} was changed after it was saved: its sha256 is not the one it names; "
            "bring back the file as it was, or save a new baseline"
        )
    return found


def files_digest(folder: Path) -> str:
    """Of a model's or head's weights, configuration and tokenizer, every byte; some seconds a gigabyte."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in _FILES for p in folder.glob(pattern) if p.is_file()}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------- heads


def _models(options: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where options, also those of proposers that are combined, name a folder with weights."""
    if isinstance(options, dict):
        if isinstance(named := options.get("model"), str):
            yield options, named
        for inside in options.values():
            yield from _models(inside)
    elif isinstance(options, list):
        for inside in options:
            yield from _models(inside)


def heads_of(config: Config) -> dict[str, str]:
    """Folders that a configuration drafts with, and their digests.

    Raises:
        ConfigError: there is no such folder.
    """
    found = {}
    for _, named in _models(config.options):
        if not Path(named).expanduser().is_dir():
            raise ConfigError(f"options.model: {named!r} is no folder; give one that holds the head or draft")
        found[named] = files_digest(Path(named).expanduser())
    return found


def placed(name: str, acceptance: Acceptance, folders: Sequence[Path]) -> Config:
    """A proposer's configuration with the very heads of the baseline, where those lie now.

    Args:
        name: the proposer's, for messages.
        acceptance: what the bundle holds of it.
        folders: where to look besides where they were, by digest.

    Raises:
        ConfigError: a head is missing, or is another by now.
    """
    here = {files_digest(folder): folder for folder in folders}
    data = json.loads(json.dumps(acceptance.config))
    for options, named in _models(data["options"]):
        wanted, before = acceptance.heads.get(named), Path(named).expanduser()
        if wanted in here:
            options["model"] = str(here[wanted])
        elif not before.is_dir():
            raise ConfigError(
                f"baseline: the head {named!r} of {name!r} is missing; say where it lies now with "
                "--head FOLDER"
            )
        elif files_digest(before) != wanted:
            raise ConfigError(
                f"baseline: the head {named!r} of {name!r} is not the one that the baseline was saved with; "
                "bring that back, or save a new baseline"
            )
    return Config.model_validate(data)
