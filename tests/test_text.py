"""Text out of the embedded engine: stop strings, streams, characters of several tokens, chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from spec_plugins import ConfigError  # noqa: E402
from spec_plugins.adapters.transformers import Engine, SamplingParams, load_model  # noqa: E402
from spec_plugins.adapters.transformers.requests import Detokenizer  # noqa: E402

SPECS = [None, "ngram", {"proposer": "suffix", "max_draft_nodes": 16}]
PROMPTS = ["the cat sat on the mat and", "that was that was", "a"]
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> tuple[Any, Any]:
    return load_model(tiny_model_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def texts(loaded: tuple[Any, Any]) -> list[str]:
    return [c.text for c in Engine(*loaded).generate(PROMPTS, PARAMS)]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_characters_of_several_tokens_come_whole() -> None:
    text = "naïve → 日本 👩‍💻 end"
    detokenizer = Detokenizer(Bytes(), ())
    seen = []
    for byte in text.encode():
        detokenizer.add(byte)
        seen.append(detokenizer.text)
    assert detokenizer.text == text
    assert all(text.startswith(s) for s in seen)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(Bytes(), ())
    for byte in "ab日".encode()[:-1]:
        detokenizer.add(byte)
    assert detokenizer.text == "ab"
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"


@pytest.mark.parametrize("stop", ["cd", "d", "cdef", "c"])
def test_stop_strings_across_tokens(stop: str) -> None:
    detokenizer = Detokenizer(Bytes(), (stop, "zz"))
    stopped = [detokenizer.add(byte) for byte in b"abcdef"]
    assert stopped.index(True) == "abcdef".index(stop) + len(stop) - 1
    detokenizer = Detokenizer(Bytes(), (stop,))
    assert any(detokenizer.add(byte) for byte in b"abcdef")
    assert detokenizer.text == "abcdef"[: "abcdef".index(stop)]


@pytest.mark.parametrize("spec", SPECS)
def test_stop_strings_end_at_the_same_token(loaded: tuple[Any, Any], texts: list[str], spec: Any) -> None:
    stop = texts[0][7:10]
    assert stop.strip()
    params = PARAMS.model_copy(update={"stop": (stop,)})
    want = Engine(*loaded).generate(PROMPTS, params)
    got = Engine(*loaded, spec, max_num_seqs=2).generate(PROMPTS, params)
    assert [(c.text, c.token_ids, c.finish_reason) for c in got] == [
        (c.text, c.token_ids, c.finish_reason) for c in want
    ]
    assert got[0].finish_reason == "stop"
    assert got[0].text == texts[0][: texts[0].index(stop)]


@pytest.mark.parametrize("spec", SPECS)
def test_streams_add_up(loaded: tuple[Any, Any], texts: list[str], spec: Any) -> None:
    streamed = ["", "", ""]
    for delta in Engine(*loaded, spec, max_num_seqs=2).stream(PROMPTS, PARAMS):
        streamed[delta.index] += delta.text
    assert [s.strip() for s in streamed] == [t.strip() for t in texts]


def test_streams_hold_back_what_may_be_a_stop_string(loaded: tuple[Any, Any], texts: list[str]) -> None:
    stop = texts[0][7:12]
    params = PARAMS.model_copy(update={"stop": (stop,)})
    so_far = ""
    for delta in Engine(*loaded, "suffix").stream(PROMPTS[:1], params):
        so_far += delta.text
        assert stop not in so_far
    assert so_far == texts[0][: texts[0].index(stop)]


def test_chat_messages_take_the_template(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    engine = Engine(model, tokenizer)
    tokens = engine.encode([{"role": "user", "content": "the cat"}])
    assert tokenizer.decode(tokens).replace(" ", "") == "<|user|>thecat<|assistant|>"
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(ConfigError, match="chat template"):
            engine.encode([{"role": "user", "content": "x"}])
    finally:
        tokenizer.chat_template = template


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        SamplingParams.of(stop=("",))
