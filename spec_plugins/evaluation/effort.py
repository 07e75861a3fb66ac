"""What each method asks of a person, as data: to have it, and to keep it after the target changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EFFORTS", "PUBLISHED_BY", "SMALL_MODELS", "Effort", "SmallModel", "effort_of", "small_model"]


@dataclass(frozen=True, slots=True)
class Effort:
    """What a method takes."""

    rank: int
    """Of two that gain the same, the one with the lower rank is the better."""
    make: str
    """What has to be there before it runs."""
    retest: str
    """What to do after the target was updated."""
    runs_a_model: bool = False
    """Whether one forward drafts for all requests, so that its time hardly grows with them."""
    forward_a_token: bool = False
    """Whether it is a forward for each draft position."""
    published: float | None = None
    """Tokens a step that :data:`PUBLISHED_BY` found; of none that nothing is made for."""


PUBLISHED_BY = "Spec-Bench, Vicuna-7B at batch size 1"
_COUNT = "replay new responses of the target: what repeats may have changed"
_HEAD = "replay it on responses of the new target, and train it again where it lost"
EFFORTS: dict[str, Effort] = {
    "none": Effort(0, "nothing", "nothing"),
    "ngram": Effort(1, "a flag", _COUNT),
    "suffix": Effort(1, "a flag", _COUNT),
    "lookahead": Effort(1, "a flag", _COUNT),
    "mtp": Effort(
        1, "a flag: the layers came with the target", _HEAD, runs_a_model=True, forward_a_token=True
    ),
    "draft_model": Effort(
        2,
        "a small model of the target's family, and memory for it",
        "replay it on responses of the new target",
        runs_a_model=True,
        forward_a_token=True,
        published=2.28,
    ),
    "medusa": Effort(3, "heads trained for this very target", _HEAD, runs_a_model=True, published=2.31),
    "eagle": Effort(
        3, "a head trained for this very target", _HEAD, runs_a_model=True, forward_a_token=True,
        published=3.58,
    ),
    "eagle3": Effort(
        3, "a head trained for this very target", _HEAD, runs_a_model=True, forward_a_token=True
    ),
}  # fmt: skip
_OTHER = Effort(2, "what its package asks for", _COUNT)


def effort_of(config: Mapping[str, Any]) -> Effort:
    """That of a configuration; of a combination, the part's that asks for the most."""
    name = config.get("proposer", "")
    if name == "combine":
        parts = config.get("options", {}).get("proposers") or ["suffix", "ngram"]
        names = [part if isinstance(part, str) else part.get("name", "") for part in parts]
        return max((EFFORTS.get(n, _OTHER) for n in names), key=lambda effort: effort.rank)
    return EFFORTS.get(name, _OTHER)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """The smallest model of a family, by what a target's ``config.json`` says."""

    model_types: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    name: str
    millions: int
    """Parameters."""


SMALL_MODELS = (
    SmallModel(("llama",), (128256,), "Llama-3.2-1B", 1236),
    SmallModel(("llama",), (32000,), "TinyLlama-1.1B", 1100),
    SmallModel(("llama",), (49152,), "SmolLM2-135M", 135),
    SmallModel(("qwen2",), (151936, 152064), "Qwen2.5-0.5B", 494),
    SmallModel(("qwen3", "qwen3_moe"), (151936,), "Qwen3-0.6B", 596),
    SmallModel(("gemma2",), (256000,), "gemma-2-2b", 2614),
    SmallModel(("gemma3", "gemma3_text"), (262144, 262208), "gemma-3-270m", 268),
)
_SMALLER = 5
"""So many times smaller than the target a draft must be to be worth its time."""


def small_model(about: Mapping[str, Any]) -> SmallModel | None:
    """One of the target's family that is much smaller, from what a replay says about the target."""
    layers, hidden = about.get("num_layers"), about.get("hidden_size")
    vocab = about.get("vocab_size")
    if not (layers and hidden and vocab):
        return None
    millions = (12 * layers * hidden**2 + vocab * hidden) / 1e6
    for small in SMALL_MODELS:
        known = about.get("model_type") in small.model_types and vocab in small.vocab_sizes
        if known and millions >= _SMALLER * small.millions:
            return small
    return None
