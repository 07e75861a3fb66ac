"""The evaluation's runners in vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compared import check_runners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_runners(tiny_model: Path) -> None:
    """In a process of its own: vLLM's in-process engines do not start where numba was there before them."""
    shared = Path(__file__).parents[1] / "shared"
    done = subprocess.run(
        [sys.executable, __file__, tiny_model], capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "PYTHONPATH": str(shared), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    from spec_plugins.adapters.vllm import comparison_runner

    comparison_runner.MAX_MODEL_LEN = 512
    check_runners("vllm", Path(sys.argv[1]))
