"""A log whose responses repeat their prompts, with a slip now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["write_traffic"]


def write_traffic(path: Path, requests: int = 12, **fields: Any) -> list[dict[str, Any]]:
    """Write it, as tokens of a vocabulary of 128, and return its lines."""
    rng, lines = np.random.default_rng(0), []
    for i in range(requests):
        phrase = rng.integers(10, 120, 6).tolist()
        said = [token for _ in range(6) for token in phrase if rng.random() > 0.05]
        lines.append({"prompt_token_ids": phrase * 2, "token_ids": said, "arrived": i, **fields})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return lines
