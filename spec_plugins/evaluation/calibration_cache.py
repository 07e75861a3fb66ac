"""What step times hold for, and the files that keep them, one for each setting."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from spec_plugins import __version__
from spec_plugins.checkpoints.files import weights_digest
from spec_plugins.errors import ConfigError, SpecPluginsError
from spec_plugins.evaluation.comparison import machine
from spec_plugins.evaluation.step_times import Setting, StepTimes
from spec_plugins.launch import installed_version

__all__ = [
    "cache_folder", "file_of", "keep", "kept", "model_config", "model_digest", "model_folder",
    "setting_of",
]  # fmt: skip

_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ATTENTION_BACKEND", "SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE",
)  # fmt: skip


def cache_folder() -> Path:
    """Where measured step times are kept."""
    return Path(os.environ.get("SPEC_PLUGINS_CACHE", "~/.cache/spec-plugins")).expanduser() / "calibrations"


def model_digest(folder: Path) -> str:
    """Of a model's configuration and weights, and of nothing that says where it lies."""
    weights = weights_digest(folder).encode()
    return hashlib.sha256((folder / "config.json").read_bytes() + weights).hexdigest()


def setting_of(engine: str, folder: Path, dtype: str, flags: Sequence[str]) -> Setting:
    """What step times hold for, on this machine: of a model in a folder, with an engine's flags."""
    here = machine()
    return Setting(
        engine=engine,
        engine_version=installed_version(engine),
        spec_plugins_version=__version__,
        model=model_digest(folder),
        dtype=dtype,
        flags=tuple(flags),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        hardware={**{k: here[k] for k in ("processor", "cores", "torch_threads", "torch")}, "gpus": _gpus()},
    )


def _gpus() -> list[str]:
    """Names, without waking a driver in this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def model_folder(model: str) -> Path:
    """Where a model lies; raises :class:`ConfigError` where it is not on this machine."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # not installed, no such name, not downloaded
        raise ConfigError(
            f"model: {model!r} is neither a folder nor the name of a model that was downloaded"
        ) from error


def model_config(folder: Path) -> dict[str, Any]:
    """A model's configuration, of its text part where it has several; raises :class:`ConfigError`."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = found.get("text_config", found)
        int(found["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model: {str(folder)!r} has no config.json that says vocab_size") from error
    return found


def file_of(setting: Setting, folder: Path) -> Path:
    """Where the step times of a setting are kept."""
    digest = hashlib.sha256(setting.model_dump_json().encode()).hexdigest()
    return folder / f"{setting.engine}-{digest[:20]}.json"


def kept(path: Path, setting: Setting) -> StepTimes | None:
    """What a file keeps; ``None`` where it is not there, cannot be read, or is of another setting."""
    try:
        found = StepTimes.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, pydantic.ValidationError):
        return None  # none, or of another version
    return found if found.setting == setting else None


def keep(path: Path, times: StepTimes) -> None:
    """Write a file; raises :class:`SpecPluginsError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text(times.model_dump_json(indent=1), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise SpecPluginsError(f"step times cannot be kept in {str(path)!r}: {error}") from error
