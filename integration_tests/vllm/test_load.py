"""vLLM's own benchmark client, on its own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from put_under_load import check_load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_closed_and_an_open_loop(tiny_model: Path) -> None:
    check_load("vllm", tiny_model, ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"])
