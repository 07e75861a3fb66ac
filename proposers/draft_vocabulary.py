"""A draft's vocabulary beside the target's: the same, shared in part, or with only text in common.

Each class says what the draft model is fed for a target's tokens, and what its drafts are in the target's.
"""

from __future__ import annotations

import codecs
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.proposer import IntArray, Packed
from spec_plugins.token_store import TokenStore

__all__ = [
    "Intersection", "OneVocabulary", "Text", "Tokens", "Vocabulary", "check_same", "make_vocabulary",
    "read_tokens",
]  # fmt: skip

logger = logging.getLogger("spec_plugins")

UNSETTLED = 32  # tokens at the end of a text that may still be encoded anew
_NONE: IntArray = np.empty(0, np.int32)


class Tokens:
    """What a tokenizer's tokens stand for, in bytes, so that those of two tokenizers can be compared."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """
        Args:
            tokenizer: one of transformers'.
            size: of the model's vocabulary; ids past the tokenizer's stand for nothing.
        """
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.tokenizer, self.size = tokenizer, size
        self.names: dict[int, str] = {i: token for token, i in tokenizer.get_vocab().items()}
        added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self.special = {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = list(self.names.values())
        # Either each byte is written as a letter of its own, or a space as one and odd bytes as <0x0A>.
        byte_level = sum("Ġ" in name for name in names) > sum("▁" in name for name in names)
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}

        def spelled(i: int, name: str) -> bytes:
            if i in added:
                return added[i].encode()
            if byte_level and all(letter in byte_of for letter in name):
                return bytes(byte_of[letter] for letter in name)
            if not byte_level and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
                return bytes([int(name[3:5], 16)])
            return (name if byte_level else name.replace("▁", " ")).encode()

        self.spellings = [b""] * max(size, 1 + max(self.names, default=0))
        for i, name in self.names.items():
            self.spellings[i] = spelled(i, name)
        self.first: list[int] = [i for i in tokenizer("")["input_ids"][:1] if i == tokenizer.bos_token_id]
        """What the tokenizer begins every text with."""

    @cached_property
    def by_spelling(self) -> dict[bytes, int]:
        """Ids of tokens that are no special ones, a written-out token before a byte's."""
        found: dict[bytes, int] = {}
        order = sorted(self.names, key=lambda i: (self.names[i].startswith("<0x"), i))
        for i in order:
            if i < self.size and i not in self.special and self.spellings[i]:
                found.setdefault(self.spellings[i], i)
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.by_spelling), default=1)

    @cached_property
    def _bytes(self) -> Packed[Any]:
        """The spellings in one array."""
        return _pack([np.frombuffer(s, np.uint8) for s in self.spellings], np.uint8)

    def spell(self, ids: IntArray) -> bytes:
        """What tokens stand for together. O(tokens), not in Python."""
        return _gather(self._bytes, ids).tobytes()

    def lengths(self, ids: IntArray) -> npt.NDArray[np.int64]:
        """Bytes of each token."""
        offsets = self._bytes.offsets
        return (offsets[ids + 1] - offsets[ids]).astype(np.int64)

    def encode(self, text: str) -> IntArray:
        """Tokens of a part of a text, without any that mark a beginning."""
        ids = self._encode(text)
        if text.startswith(" ") and self.spell(ids) == b" " + text.encode():
            ids = self._encode(text[1:])  # the tokenizer adds a space of its own
        return ids

    def encode_exactly(self, text: str) -> IntArray:
        """The same, with no byte more or less, or none where that cannot be."""
        ids, wanted = self.encode(text), text.encode()
        return ids if self.spell(ids) == wanted else np.array(self.split(wanted), np.int32)

    def split(self, spelling: bytes) -> list[int]:
        """Tokens that spell something, the longest first; what none spells is left out."""
        found, at = [], 0
        while at < len(spelling):
            for end in range(min(len(spelling), at + self._longest), at, -1):
                i = self.by_spelling.get(spelling[at:end])
                if i is not None:
                    found.append(i)
                    break
            else:
                end = at + 1
            at = end
        return found

    def _encode(self, text: str) -> IntArray:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def read_tokens(folder: str | None, size: int) -> Tokens | None:
    """The tokenizer in a model's folder; ``None`` where there is none that can be read."""
    from transformers import AutoTokenizer

    if folder is None:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return Tokens(tokenizer, size) if len(tokenizer.get_vocab()) > 1 else None
    except Exception:  # none, of another kind, broken: there is an error for each
        return None


def check_same(
    model: str, draft: Tokens | None, target: Tokens | None, draft_size: int, target_size: int
) -> None:
    """See that a draft has its target's vocabulary, token for token. The LM heads may be padded.

    Raises:
        UnsupportedError: it has another; names the first token that differs.
    """
    fix = "use a draft of the target's family, or set vocabulary to 'intersection' or 'text'"
    if draft is None or target is None:
        if draft_size != target_size:
            raise UnsupportedError(
                f"options.model: {model!r} has {draft_size} tokens and the target {target_size}; {fix}"
            )
        which = "target" if target is None else "draft"
        logger.warning(
            "draft_model: the %s's tokenizer cannot be read, so that only the sizes of the vocabularies are "
            "known to be equal: %d", which, target_size,
        )  # fmt: skip
        return
    if draft.names != target.names:
        i = min(i for i, _ in draft.names.items() ^ target.names.items())
        theirs, ours = (f"{t.names[i]!r}" if i in t.names else "none" for t in (target, draft))
        raise UnsupportedError(
            f"options.model: {model!r} has another vocabulary than the target: token {i} is {theirs} in the "
            f"target and {ours} in the draft; {fix}"
        )


class Vocabulary(ABC):
    """What the draft model reads and writes, for a target with tokens of its own."""

    choices: IntArray | None = None
    """Draft's ids of what may be drafted, ``[size]``, ascending; ``None``: the first ``size``."""
    targets: IntArray | None = None
    """The target's ids of those; ``None``: the same."""
    size: int

    @abstractmethod
    def read(self, request_id: str, tokens: IntArray) -> tuple[IntArray, int]:
        """All of a request's text in the draft's tokens, and how many of them are as they were last time.

        Args:
            request_id: whose.
            tokens: its committed tokens, those of the last time and what came since.
        """

    def write(self, request_id: str, chosen: IntArray) -> IntArray:
        """Drafted tokens in the target's, one for one where drafts are sampled."""
        if self.choices is None or self.targets is None:
            return chosen
        return self.targets[np.searchsorted(self.choices, chosen)]

    def forget(self, request_id: str) -> None:  # noqa: B027
        """Drop what is kept of a request."""


class OneVocabulary(Vocabulary):
    """Draft and target have the same tokens."""

    def __init__(self, draft_size: int, target_size: int) -> None:
        self.size = min(draft_size, target_size)

    def read(self, request_id: str, tokens: IntArray) -> tuple[IntArray, int]:
        return tokens, len(tokens)


class _Kept(Vocabulary):
    """Keeps each request's text in the draft's tokens."""

    def __init__(self, draft: Tokens, target: Tokens) -> None:
        self.draft, self.target = draft, target
        self._store = TokenStore(1, 64)

    def forget(self, request_id: str) -> None:
        self._store.discard(request_id)


class Intersection(_Kept):
    """Drafts only tokens that both vocabularies have; the text is read token by token.

    A token of the target that the draft lacks is fed as the longest tokens of the draft that spell it.
    """

    def __init__(self, model: str, draft: Tokens, target: Tokens) -> None:
        """Raises :class:`UnsupportedError` where they have too little in common."""
        super().__init__(draft, target)
        pairs = {target.by_spelling[s]: i for s, i in draft.by_spelling.items() if s in target.by_spelling}
        special = {draft.spellings[i]: i for i in draft.special}
        for i in target.special:
            if i < target.size and target.spellings[i] in special:
                pairs[i] = special[target.spellings[i]]
        for role in ("bos_token_id", "eos_token_id"):
            theirs, ours = getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
            if theirs is not None and ours is not None and ours not in pairs.values():
                pairs.setdefault(theirs, ours)
        if len(pairs) < 2:
            raise UnsupportedError(
                f"options.vocabulary: {model!r} and the target have {len(pairs)} tokens in common; set it to "
                "'text'"
            )
        by_draft = sorted((ours, theirs) for theirs, ours in pairs.items())
        self.choices, self.targets = (np.array(ids, np.int32) for ids in zip(*by_draft, strict=True))
        self.size = len(pairs)
        self._fed = _pack(
            [[pairs[i]] if i in pairs else draft.split(s) for i, s in enumerate(target.spellings)], np.int32
        )
        self._seen: dict[str, int] = {}

    def read(self, request_id: str, tokens: IntArray) -> tuple[IntArray, int]:
        same = self._store.length(request_id)
        fed = _gather(self._fed, tokens[self._seen.get(request_id, 0) :])
        if request_id not in self._seen:
            first = self.draft.first
            self._store.append(request_id, first if fed[: len(first)].tolist() != first else [])
        self._store.append(request_id, fed)
        self._seen[request_id] = len(tokens)
        return self._store.tokens(request_id), same

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._seen.pop(request_id, None)


class Text(_Kept):
    """Reads the target's text and writes text; each side in the tokens of its own tokenizer.

    Only the last ``UNSETTLED`` to twice as many tokens are encoded again when text is added.
    """

    def __init__(self, draft: Tokens, target: Tokens) -> None:
        super().__init__(draft, target)
        self.size = len(draft.spellings)
        self._settled: dict[str, tuple[int, int]] = {}
        """Of each request: how many tokens of the target's, and of the draft's, stay as they are."""
        self._rest: dict[str, bytes] = {}
        """The beginning of a character at the end of a text."""
        self._ends = np.array(sorted(draft.special), np.int32)

    def read(self, request_id: str, tokens: IntArray) -> tuple[IntArray, int]:
        store = self._store
        if request_id not in self._settled:
            store.append(request_id, self.draft.first)
            self._settled[request_id] = 0, len(self.draft.first)
        theirs, ours = self._settled[request_id]
        tail = tokens[theirs:]
        spelled = self.target.spell(tail)
        text, rest = _whole_characters(spelled)
        self._rest[request_id] = rest
        new = self.draft.encode(text)
        before = store.tokens(request_id)[ours:]
        same = ours + _common(before, new)
        store.shorten(request_id, ours)
        store.append(request_id, new)
        if len(tail) > 2 * UNSETTLED:
            self._settle(request_id, tail, new, spelled[: len(spelled) - len(rest)])
        return store.tokens(request_id), same

    def _settle(self, request_id: str, tail: IntArray, new: IntArray, spelled: bytes) -> None:
        """Move on to where a token of the one side and one of the other end together."""
        theirs, ours = self._settled[request_id]
        size = len(spelled)
        ends, own_ends = np.cumsum(self.target.lengths(tail)), np.cumsum(self.draft.lengths(new))
        extra = int(own_ends[-1]) - size if len(new) else 0
        if extra in (0, 1):  # 1: a space that the tokenizer adds
            both, i, j = np.intersect1d(ends[:-UNSETTLED], own_ends - extra, return_indices=True)
            letters = np.frombuffer(spelled, np.uint8)
            whole = np.flatnonzero(letters[both] & 0xC0 != 0x80)  # not within a character
            if len(whole):
                last = whole[-1]
                self._settled[request_id] = theirs + int(i[last]) + 1, ours + int(j[last]) + 1
                return
        # They never end together, or the draft's text is not the target's letter by letter.
        self._settled[request_id] = theirs + int(np.searchsorted(ends, size, "right")), ours + len(new)

    def write(self, request_id: str, chosen: IntArray) -> IntArray:
        special = np.flatnonzero(np.isin(chosen, self._ends))
        ended = len(special) > 0 and int(chosen[special[0]]) == self.draft.tokenizer.eos_token_id
        spelled = self.draft.spell(chosen[: special[0]] if len(special) else chosen)
        rest = self._rest.get(request_id, b"")
        if not spelled.startswith(rest):
            return _NONE
        spelled = spelled[len(rest) :]
        n = next((n for n, byte in enumerate(spelled) if byte & 0xC0 != 0x80), len(spelled))
        text, _, _ = _whole_characters(spelled[n:])[0].partition("\ufffd")
        # The end of a character whose beginning is there, then what is text by itself.
        ids = np.append(np.array(self.target.split(spelled[:n]), np.int32), self.target.encode_exactly(text))
        ids = ids[: _common(ids, np.minimum(ids, self.target.size - 1))]  # the LM head may have fewer
        eos = self.target.tokenizer.eos_token_id
        return np.append(ids, np.int32(eos)) if ended and eos is not None else ids

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._settled.pop(request_id, None)
        self._rest.pop(request_id, None)


def make_vocabulary(
    kind: str, model: str, draft: Tokens | None, target: Tokens | None, draft_size: int, target_size: int
) -> Vocabulary:
    """The way from one vocabulary to the other that is asked for.

    Raises:
        UnsupportedError: the two do not allow it.
        ConfigError: it needs a tokenizer that cannot be read.
    """
    if kind == "same":
        check_same(model, draft, target, draft_size, target_size)
        if draft is not None:
            _check_head(model, draft)
        return OneVocabulary(draft_size, target_size)
    for tokens, whose in ((draft, f"of {model!r}"), (target, "of the target")):
        if tokens is None:
            raise ConfigError(
                f"options.vocabulary: {kind!r} needs the tokenizer {whose}, which cannot be read from its "
                "folder; put it there, or set vocabulary to 'same'"
            )
    assert draft is not None
    assert target is not None
    _check_head(model, draft)
    return Intersection(model, draft, target) if kind == "intersection" else Text(draft, target)


def _check_head(model: str, draft: Tokens) -> None:
    most = max(draft.names, default=-1)
    if draft.size <= most:
        raise UnsupportedError(
            f"options.model: {model!r} has an LM head of {draft.size} tokens, and token {most} of its "
            "tokenizer is not among them; its files do not belong together"
        )


def _whole_characters(spelled: bytes) -> tuple[str, bytes]:
    """Text, and the bytes at its end that only begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(spelled)
    return text, decoder.getstate()[0]


def _common(a: IntArray, b: IntArray) -> int:
    """How many elements are the same from the first on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _pack(parts: Sequence[Any], dtype: Any) -> Packed[Any]:
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    return Packed(np.concatenate([np.empty(0, dtype), *(np.asarray(p, dtype) for p in parts)]), offsets)


def _gather(packed: Packed[Any], ids: IntArray) -> npt.NDArray[Any]:
    """The parts that ids name, one after the other."""
    starts = packed.offsets[ids].astype(np.int64)
    counts = packed.offsets[ids + 1] - starts
    shift = starts - (np.cumsum(counts) - counts)
    found: npt.NDArray[Any] = packed.values[np.repeat(shift, counts) + np.arange(int(counts.sum()))]
    return found
