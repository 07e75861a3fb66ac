"""Folders of weights: read without running anything in them, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Stored",
    "check_free",
    "has_weights",
    "new_folder",
    "read_config",
    "read_folder",
    "read_json",
    "weights_digest",
    "write_folder",
    "write_json",
]

WEIGHTS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights are looked for, in this order."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder as it was read."""

    folder: Path
    config: dict[str, Any]
    """Of ``config.json``."""
    weights: str
    """The file that the tensors are of, one of :data:`WEIGHTS`."""
    tensors: dict[str, torch.Tensor]
    """Mapped from the files where their format allows, so that what is not looked at costs no memory."""


def read_folder(folder: str | Path) -> Stored:
    """Read ``config.json`` and the weights beside it. Nothing is checked but that they can be read.

    Raises:
        ConfigError: no such folder or file; a file that is cut off or broken; a pickle with anything but
            tensors in it, of which nothing is run.
    """
    path = Path(folder)
    config = read_config(path)
    weights = next((name for name in WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{path}: no weights; one of these must be there: {', '.join(WEIGHTS)}")
    tensors: dict[str, torch.Tensor] = {}
    for name in _shards(path, weights):
        tensors.update(
            _read_safetensors(path / name) if name.endswith(".safetensors") else _read_pickle(path / name)
        )
    return Stored(path, config, weights, tensors)


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds weights beside its configuration."""
    return any((Path(folder) / name).is_file() for name in WEIGHTS)


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a folder; raises :class:`ConfigError` where there is none that can be read."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; give one that holds config.json and weights, and download what is on "
            "the Hugging Face Hub first"
        )
    return read_json(path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; raises :class:`ConfigError` where there is none that can be read."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must hold an object, and holds a {type(data).__name__}")
    return data


def _shards(folder: Path, weights: str) -> list[str]:
    """The files that hold the tensors, all of which are there and in the folder."""
    if not weights.endswith(".json"):
        return [weights]
    index = folder / weights
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(n, str) for n in found.values()):
        raise ConfigError(f"{index}: must hold a weight_map of tensors' names and files")
    names = sorted(set(found.values()))
    for name in names:
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise ConfigError(f"{index}: {name!r} is no file of weights in that folder")
        if not (folder / name).is_file():
            raise ConfigError(f"{index}: names {name}, which is not there; download it too")
    return names


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file}: cut off, or no safetensors file ({error}); download it again") from None


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    import torch

    def load(mapped: bool) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)

    try:
        try:
            found = load(True)
        except RuntimeError:  # files of torch 1.5 and older cannot be mapped
            found = load(False)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise ConfigError(
            f"{file}: holds something other than tensors, and loading that could run code; nothing of it was "
            f"run. Ask for safetensors. ({_first_line(reason)})"
        ) from None
    except Exception as error:  # whatever a broken file makes of the reader
        raise ConfigError(
            f"{file}: cut off, or no file of torch.save ({_first_line(error)}); download it again"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{file}: must hold tensors by name, and holds a {type(found).__name__}")
    tensors = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            raise ConfigError(f"{file}: {name} is no plain tensor but a {type(value).__name__}")
        if value.nbytes > value.untyped_storage().nbytes():
            raise ConfigError(f"{file}: {name} has more elements than the file holds")
        tensors[name] = value.detach()
    return tensors


def _first_line(what: object) -> str:
    return str(what).strip().partition("\n")[0] or type(what).__name__


def check_free(folder: str | Path) -> None:
    """Raise :class:`ConfigError` where a folder cannot be written because something is there."""
    path = Path(folder)
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path}: is there already, and not empty; name another folder, or remove it")


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    weights: str = "model.safetensors",
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write ``config.json`` and weights into a folder that is new or empty, and appears when it is whole.

    ``on_tensor`` is told each tensor's name when its turn comes.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_free(folder)
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        on_tensor(name)
        storage = tensor.untyped_storage()
        # safetensors takes no memory under two names.
        shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        apart[name] = tensor.detach().contiguous()
        if shared:
            apart[name] = apart[name].clone()
    with new_folder(folder) as temporary:
        write_json(temporary / "config.json", config)
        try:
            save_file(apart, temporary / weights, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(f"{folder}: cannot be written: {error}") from None
        # safetensors lets the owner alone read it; a server may be another user's.
        (temporary / weights).chmod((temporary / "config.json").stat().st_mode)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to be filled in the ``with`` block, which gets its name, new or empty, when that is done.

    Where the block does not end, nothing is left of it.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    path = Path(folder).absolute()
    check_free(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write an object as this project's files have it, to be read by people too."""
    file.write_text(f"{json.dumps(data, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def weights_digest(folder: Path) -> str:
    """A digest of a model's weights: of names and sizes, and of each file's first and last megabyte."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()
