"""The evaluation's runners in SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared import check_runners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_runners(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugins.adapters.sglang import comparison_runner

    monkeypatch.setattr(comparison_runner, "CONTEXT_LENGTH", 512)
    check_runners("sglang", tiny_model)
