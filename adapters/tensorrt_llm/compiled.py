"""Methods of TensorRT-LLM's compiled engine builder, up to 1.2, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from spec_plugins.adapters.tensorrt_llm.flags import MODES as _MODES
from spec_plugins.adapters.tensorrt_llm.flags import DraftOptions

__all__ = ["COMPILED", "EXTERNAL", "MODES", "EagleOptions", "LookaheadOptions", "MedusaOptions"]

EXTERNAL = "draft_tokens_external"
MODES: Mapping[str, str] = {**_MODES, "draft_model": EXTERNAL}
"""Its names for them."""


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MedusaOptions(_Options):
    """Medusa in a compiled engine."""

    model: Annotated[str, Field(min_length=1, description="Folder of the head.")]
    choices: Annotated[
        list[list[int]] | None,
        Field(
            description="The tree: for each draft token the ranks on the way to it, such as [[0], [1], "
            "[0, 0]]. Default: chosen by the accuracies that the head's files record; where they record "
            "none, and for EAGLE, a chain of num_speculative_tokens."
        ),
    ] = None


class EagleOptions(MedusaOptions):
    """EAGLE in a compiled engine."""

    posterior_threshold: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Take what is at least so likely (typical acceptance), which changes outputs. "
            "Default: what the target would take itself.",
        ),
    ] = None


class LookaheadOptions(_Options):
    """Lookahead in a compiled engine; an alias is TensorRT-LLM's own name, and so is each default."""

    window: Annotated[
        int,
        Field(
            ge=2,
            le=64,
            serialization_alias="max_window_size",
            description="W: guesses side by side.",
        ),
    ] = 4
    ngram: Annotated[
        int,
        Field(ge=2, le=64, serialization_alias="max_ngram_size", description="N: tokens of an n-gram."),
    ] = 3
    verification_set: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            serialization_alias="max_verification_set_size",
            description="G: n-grams verified in a step.",
        ),
    ] = 4


COMPILED: Mapping[str, type[BaseModel]] = {
    "medusa": MedusaOptions,
    "eagle": EagleOptions,
    "lookahead": LookaheadOptions,
    "draft_model": DraftOptions,
}
