"""What the target asks for verifying more tokens at once."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from benchmarks.case import Context, Result, alternate, case, spread
from spec_plugins.adapters.transformers import load_model
from spec_plugins.adapters.transformers.target_model import TargetModel
from spec_plugins.proposer import Drafts

CONTEXT = 200


@case("verify-width")
def verify_width(context: Context) -> Result:
    """ms of one forward pass over 1 to 25 tokens of one request, float32, in turn."""
    model, tokenizer = load_model(context.model, dtype="float32")
    target = TargetModel(model, tokenizer, 1)
    lengths = np.array([CONTEXT])

    def run(width: int) -> None:
        draft = np.arange(1, width, dtype=np.int32)[None]
        with torch.inference_mode():
            target.verify([1], lengths, Drafts(draft, np.array([width - 1], np.int32)))

    with torch.inference_mode():
        target.prefill(0, list(range(1, CONTEXT + 1)))
    seconds = alternate(
        {str(width): lambda w=width: run(w) for width in (1, 2, 3, 5, 9, 17, 25)},  # type: ignore[misc]
        3 if context.quick else 15,
    )
    result = Result(["tokens", "ms", "times one token"])
    one = statistics.median(seconds["1"])
    for width, values in seconds.items():
        result.rows.append(
            [width, spread([v * 1e3 for v in values], 0), f"{statistics.median(values) / one:.2f}"]
        )
    return result
