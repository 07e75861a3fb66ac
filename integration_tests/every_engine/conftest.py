"""Every engine that is installed, each in its own environment: the tests start them as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plugged_in import plug_in
from tiny_heads import begun_head
from tiny_model import save_tiny_model
from trained_drafts import HEADS

ENGINES = ("transformers", "vllm", "sglang")
HERE = Path(__file__).parent


def python_of(engine: str) -> Path:
    """The engine's Python, as the Makefile's environments have it; the embedded engine's is this one."""
    if engine == "transformers":
        return Path(sys.executable)
    cache = Path(os.environ.get("SPEC_PLUGINS_CACHE", "~/.cache/spec-plugins")).expanduser()
    return cache / "venvs" / engine / "bin" / "python"


@dataclass(frozen=True)
class Recorded:
    """What an engine answered, and what its proposers saw and drafted."""

    answers: list[list[list[int]]]
    seen: dict[tuple[int, ...], dict[str, Any]]
    """By the tokens committed so far."""


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recorded]:
    """Asks one engine everything, once; skips where it is not installed."""
    folder = tmp_path_factory.mktemp("every_engine")
    model = save_tiny_model(folder / "model")
    kept: dict[str, Recorded] = {}
    for method in ("medusa", "eagle", "eagle3"):
        begun_head(folder / "heads" / method, method, model)
    (folder / "heads" / "draft").symlink_to(model)
    (folder / "installed").mkdir()
    plug_in(folder / "installed", HERE / "recording.py")

    def ask(engine: str) -> Recorded:
        import recording
        from questions import BATCHES

        if engine not in kept:
            python, log = python_of(engine), folder / f"{engine}.jsonl"
            if not python.exists():
                pytest.skip(f"needs {engine}: make environment-{engine}")
            done = subprocess.run(
                [python, HERE / "answering.py", engine, model], input=json.dumps(BATCHES), text=True,
                capture_output=True, timeout=900, check=False, cwd=folder,
                env={
                    **os.environ, recording.LOG: str(log), HEADS: str(folder / "heads"),
                    "OMP_NUM_THREADS": "1",
                },
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            seen = {tuple(line["tokens"]): line for line in lines}
            assert len(seen) == len(lines), "a step was shown twice"
            kept[engine] = Recorded(json.loads(done.stdout), seen)
        return kept[engine]

    return ask
