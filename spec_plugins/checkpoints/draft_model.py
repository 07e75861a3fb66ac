"""Draft models: whole causal language models, which need no layout of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_plugins.checkpoints.files import Stored
from spec_plugins.checkpoints.target_model import TargetModel, read_target

__all__ = ["describe", "vocabulary_misfits"]


def describe(stored: Stored) -> dict[str, Any]:
    """What a draft model is; raises :class:`ConfigError` where its configuration does not say its sizes."""
    sizes = read_target(stored.folder)
    return {
        "method": f"draft_model: a causal language model of {sizes.vocab_size} tokens",
        "layout": f"{', '.join(sizes.architectures)}, which needs no conversion",
        "hidden_size": sizes.hidden_size,
        "vocabulary": sizes.vocab_size,
        "layers": sizes.num_layers,
    }


def vocabulary_misfits(stored: Stored, target: TargetModel) -> list[str]:
    """Why a draft model's tokens are not the target's, a sentence each.

    Compares ``tokenizer.json``, where both have one, and the sizes of the vocabularies, which may differ by
    what only pads the larger one.
    """
    draft = read_target(stored.folder)
    ours, theirs = (_tokens(folder) for folder in (stored.folder, target.folder))
    if ours is None or theirs is None:
        if draft.vocab_size == target.vocab_size:
            return []
        return [
            f"it has {draft.vocab_size} tokens, the target {target.vocab_size}, and without tokenizer.json "
            "in both folders it cannot be told whether only padding differs"
        ]
    other = {token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)}
    if not other:
        return []
    shown = ", ".join(repr(token) for token in sorted(other)[:3])
    return [f"its tokenizer is not the target's: {len(other)} tokens differ, such as {shown}"]


def _tokens(folder: Path) -> dict[str, int] | None:
    """Each token's id, by ``tokenizer.json``."""
    try:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = data["model"]["vocab"]
        # Unigram models list tokens with their scores.
        if isinstance(vocabulary, list):
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
