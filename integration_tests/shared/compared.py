"""What every engine's comparison runners must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_plugins.config import load_config
from spec_plugins.evaluation.comparison import compare, open_runners
from spec_plugins.evaluation.prompts import TaggedPrompt


def check_runners(engine: str, model: Path) -> None:
    """Without speculation and with: the same output, in fewer forwards, all of them counted."""
    config = load_config({"proposer": "suffix", "containment": {"time_allowance_ms": 60_000.0}})
    said: list[str] = []
    texts = ["say it again, say it again, say it", "to be, to be, to be or not"]
    prompts = [TaggedPrompt("toy", ({"role": "user", "content": text},)) for text in texts]
    with open_runners(engine, model, {"suffix": config}, said.append) as runners:
        found = compare(runners, prompts, max_new_tokens=60, seconds=600.0)
    plain, ours = found["none"], found["suffix"]
    assert len(said) == 2
    assert ours.identical == [True, True]
    assert plain.forwards == [tokens - 1 for tokens in plain.tokens]
    figures: Any = ours.statistics
    assert figures["accepted_tokens"] > 10
    assert not figures["faults"]
    # The first prompt was run once more, for four tokens.
    accepted = sum(tokens - 1 - forwards for tokens, forwards in zip(ours.tokens, ours.forwards, strict=True))
    assert 0 <= figures["accepted_tokens"] - accepted <= 3
