"""SGLang's own benchmark client, on its own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from put_under_load import check_load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_closed_and_an_open_loop(tiny_model: Path) -> None:
    flags = ["--context-length", "256", "--max-total-tokens", "8192", "--skip-server-warmup"]
    flags += ["--random-seed", "0", "--disable-overlap-schedule"]
    check_load("sglang", tiny_model, flags)
