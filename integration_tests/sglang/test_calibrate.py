"""Step times of SGLang's own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated import check_calibration
from offline import MakeEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_cells_and_answers(
    tiny_model: Path, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        "--context-length",
        "256",
        "--max-total-tokens",
        "8192",
        "--skip-server-warmup",
        "--sleep-on-idle",
    ]
    flags += ["--random-seed", "0", "--disable-cuda-graph", "--disable-overlap-schedule"]
    waves = check_calibration("sglang", tiny_model, tmp_path, monkeypatch, *flags)
    with make_engine() as plain:
        for prompts, answers in waves:
            params = {"temperature": 0, "max_new_tokens": len(answers[0]), "ignore_eos": True}
            found = plain.generate(input_ids=prompts, sampling_params=params)
            assert [a["output_ids"] for a in found] == answers
