"""The evaluation's runners in vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared import check_runners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_runners(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugins.adapters.vllm import comparison_runner

    monkeypatch.setattr(comparison_runner, "MAX_MODEL_LEN", 512)
    check_runners("vllm", tiny_model)
