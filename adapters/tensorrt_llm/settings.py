"""What travels from the process that configures the engine to the one that drafts: plain values, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_plugins.config import Config
from spec_plugins.errors import ConfigError
from spec_plugins.proposer import Proposer, Target
from spec_plugins.support import ENGINES

__all__ = ["MAX_BATCH_SIZE", "Settings", "model_sizes"]

MAX_BATCH_SIZE = 2048
"""The engine's default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a drafter is made from."""

    config: Config
    vocab_size: int
    max_model_len: int
    max_num_seqs: int = MAX_BATCH_SIZE
    model: str | None = None
    max_concurrency: int | None = None
    """Requests in a batch above which the engine does not ask for drafts."""
    draft_len_schedule: Mapping[int, int] | None = None
    """The engine's, by batch size; what it means differs between versions."""
    tensor_parallel_size: int = 1
    """The engine's."""

    def to_json(self) -> str:
        """Inverse of :meth:`from_json`."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["config"] = self.config.model_dump(mode="json", exclude_unset=True)
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Inverse of :meth:`to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["config"] = Config.model_validate(fields["config"])
        if fields["draft_len_schedule"] is not None:  # JSON has no keys but text
            fields["draft_len_schedule"] = {int(k): n for k, n in fields["draft_len_schedule"].items()}
        return cls(**fields)

    def target(self, proposer: Proposer) -> Target:
        """What the proposer is told. Its weights stay on the CPU: the engine has taken the GPU's memory."""
        return Target(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            provides=ENGINES["tensorrt-llm"].provides or frozenset(),
            num_speculative_tokens=self.config.num_speculative_tokens,
            max_draft_nodes=self.config.draft_nodes(proposer),
            model=self.model,
        )


def model_sizes(model: str) -> tuple[int, int]:
    """Vocabulary size and longest context of a model, from its ``config.json``.

    Args:
        model: its folder, or its name on the Hugging Face Hub.

    Raises:
        ConfigError: they cannot be read there; says what to give instead.
    """
    ask = "give vocab_size and max_seq_len"
    file = Path(model) / "config.json"
    try:
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model, "config.json"))
        found = json.loads(file.read_text(encoding="utf-8"))
    except Exception as error:  # the hub's client has many of its own
        raise ConfigError(f"model: no config.json of {model!r} can be read ({error}); {ask}") from error
    text = found.get("text_config") or found
    sizes = text.get("vocab_size"), text.get("max_position_embeddings")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"model: {str(file)!r} holds no vocab_size and max_position_embeddings, but {sizes}; {ask}"
        )
    return sizes
