"""What the embedded engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union

import torch
from pydantic import BaseModel, ConfigDict, Field

from spec_plugins.config import validated
from spec_plugins.statistics import RequestStatistics

__all__ = ["Completion", "Delta", "Detokenizer", "Prompt", "Request", "SamplingParams"]

Prompt = Union[str, Sequence[int], Sequence[dict[str, str]]]  # noqa: UP007 (an alias, evaluated on Python 3.10)
"""Text, token ids, or chat messages to which the model's chat template is applied."""


class SamplingParams(BaseModel):
    """How one request is decoded. The defaults are greedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_new_tokens: Annotated[int, Field(ge=1, description="The most tokens to generate.")] = 128
    temperature: Annotated[float, Field(ge=0, description="0 is greedy.")] = 0.0
    top_k: Annotated[int, Field(ge=0, description="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="Keep the smallest set with this mass.")] = 1.0
    min_p: Annotated[
        float, Field(ge=0, le=1, description="Keep tokens at least this likely, relative to the best.")
    ] = 0.0
    seed: Annotated[int | None, Field(description="Makes a sampled request repeatable.")] = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(description="Strings that end the text; left out of it."),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(description="Tokens that end the text; kept.")] = ()
    ignore_eos: Annotated[bool, Field(description="Go on past the end token.")] = False
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=0, description="Caps the draft length of this request; 0 opts out of speculation."),
    ] = None

    @classmethod
    def of(cls, **fields: Any) -> SamplingParams:
        """Make settings; raises :class:`ConfigError`, which names the field, the value and the fix."""
        return validated(cls, fields)


@dataclass(slots=True)
class Delta:
    """What one step added to one request."""

    index: int
    """The prompt's place in the list that was given."""
    token_ids: list[int]
    text: str
    """Empty where the engine has no tokenizer."""
    finish_reason: Literal["stop", "length"] | None


@dataclass(slots=True)
class Completion:
    """A finished request."""

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The generated ones, the end token included."""
    text: str
    finish_reason: Literal["stop", "length"]
    statistics: RequestStatistics


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine."""

    index: int
    request_id: str
    prompt: list[int]
    params: SamplingParams
    tenant: str = ""
    output: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    generator: torch.Generator | None = None
    detokenizer: Detokenizer | None = None
    stop_when: Callable[[list[int]], bool] | None = None
    """Asked after every committed token, with the output so far."""
    statistics: RequestStatistics = field(default_factory=RequestStatistics)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.output)


class Detokenizer:
    """Text of a growing list of tokens, in O(new tokens), and the search for stop strings in it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._start = self._read = 0
        self.text = ""

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def add(self, token: int) -> bool:
        """Take in a token; True where a stop string is complete, which is then cut from the text."""
        self._tokens.append(token)
        # Decoded together with tokens already read, since some decode differently at a beginning.
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if after.endswith("\ufffd"):
            return False  # part of a character
        new = after[len(before) :]
        self._start, self._read = self._read, len(self._tokens)
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += new
        ends = [at for at in (self.text.find(s, searched_from) for s in self._stop) if at >= 0]
        if ends:
            self.text = self.text[: min(ends)]
        return bool(ends)

    def finish(self) -> None:
        """Give up waiting for the rest of a character; harmless where a stop string has cut the text."""
        if self._read < len(self._tokens):
            before = self._decode(self._tokens[self._start : self._read])
            self.text += self._decode(self._tokens[self._start :])[len(before) :]
            self._start = self._read = len(self._tokens)
