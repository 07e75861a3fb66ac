"""A card beside a trained head: for which target, on what, how well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_card"]


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``README.md`` for people and ``training.json`` for programs."""
    (folder / "training.json").write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
    accuracy = " | ".join(f"{a:.3f}" for a in facts["held_out_accuracy"])
    numbers = range(1, len(facts["held_out_accuracy"]) + 1)
    most = facts["schedule"]["epochs"]
    epochs = "1 epoch" if most == 1 else f"{most} epochs"
    before = facts.get("begun_with")
    begun = f", begun with the head of digest `{before[:16]}…`" if before else ""
    text = f"""# {facts["method"]} for {facts["target"]}

Drafts for that target only: its weights have the digest `{facts["target_weights"][:16]}…`. The target's
licence governs what is made from its output.

Trained with `spec-plugins train {facts["method"]}` (version {facts["spec_plugins"]}) on
{facts["answered_tokens"]:,} tokens that the target itself said in {facts["conversations"]:,} conversations
(data sha256 `{facts["data_sha256"][:16]}…`), {epochs} at most{begun}. Its draft
vocabulary holds {facts["draft_vocab_coverage"]:.1%} of them.

On conversations held out of training, how often each draft position's likeliest token is the text's, given
the text before it:

| position | {" | ".join(map(str, numbers))} |
|---|{"---|" * len(facts["held_out_accuracy"])}
| accuracy | {accuracy} |

Acceptance length of such chains there: {facts["held_out_acceptance_length"]:.2f} tokens a verify step, the
target's own included. Measure your own traffic before you rely on it.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
