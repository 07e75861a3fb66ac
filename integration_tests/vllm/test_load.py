"""vLLM's own benchmark client, on its own server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_closed_and_an_open_loop(tiny_model: Path) -> None:
    """In a process of its own: vLLM's in-process engines do not start where numba was there before them."""
    shared = Path(__file__).parents[1] / "shared"
    done = subprocess.run(
        [sys.executable, __file__, tiny_model], capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "PYTHONPATH": str(shared), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    from put_under_load import check_load

    flags = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
    check_load("vllm", Path(sys.argv[1]), flags)
