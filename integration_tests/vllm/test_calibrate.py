"""Step times of vLLM's own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated import check_calibration
from offline import MakeEngine, greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_cells_and_answers(
    tiny_model: Path, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    flags = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
    waves = check_calibration("vllm", tiny_model, tmp_path, monkeypatch, *flags)
    with make_engine() as plain:
        for prompts, answers in waves:
            assert greedy(plain, prompts, len(answers[0])) == answers
