"""Step times of the embedded engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from calibrated import check_calibration
from tiny_model import save_tiny_model

from spec_plugins.adapters.transformers import Engine, SamplingParams
from spec_plugins.adapters.transformers.target_model import TargetModel
from spec_plugins.evaluation.calibration import Plan, calibrate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def test_cells_and_answers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(str(model), max_num_seqs=3, dtype="float32")
    for prompts, answers in check_calibration("transformers", model, tmp_path, monkeypatch):
        params = SamplingParams(max_new_tokens=len(answers[0]), ignore_eos=True)
        assert [done.token_ids for done in plain.generate(prompts, params)] == answers


def test_cells_are_the_forwards_that_were_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As counted where the target runs, which knows nothing of the proposer's notes."""
    ran: Counter[tuple[int, int]] = Counter()
    verify = TargetModel.verify

    def counted(self: Any, last: Any, lengths: Any, drafts: Any) -> Any:
        if len(set(drafts.counts.tolist())) == 1:
            ran[len(drafts), 1 + int(drafts.counts[0])] += 1
        return verify(self, last, lengths, drafts)

    monkeypatch.setattr(TargetModel, "verify", counted)
    times = calibrate(
        Plan(str(model), "transformers", (2, 5), (1, 4), (64,), "float32", steps=12), cache=tmp_path
    )
    for cell in times.cells:
        assert 0.6 * ran[cell.batch, cell.q] < cell.steps <= ran[cell.batch, cell.q]
