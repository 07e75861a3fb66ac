"""Logs of every form become the same records; what cannot be used is counted and never fatal."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_plugins.errors import ConfigError
from spec_plugins.registry import Registry
from spec_plugins.traffic.arrivals import littles_law, overlap
from spec_plugins.traffic.formats import parse
from spec_plugins.traffic.reading import TrafficFile
from spec_plugins.traffic.record import Record
from spec_plugins.traffic.sampling import sample
from spec_plugins.traffic.tags import tag_of

ASKED = [{"role": "user", "content": "Hello?"}]
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}
REQUEST = {"model": "m", "messages": ASKED, "temperature": 0.5, "max_tokens": 7}
RESPONSE = {"object": "chat.completion", "created": 1_700_000_000, "choices": [CHOICE]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*ASKED, {"role": "assistant", "content": "Hi."}]},
        {"prompt": "Hello?", "response": "Hi."},
        {"prompt": ASKED, "response": "Hi."},
        {"prompt": "Hello?", "response": "Hi.", "model": "m"},
        {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]},
        {"request": REQUEST, "response": RESPONSE},
        {"request": {"body": REQUEST}, "response": {"status_code": 200, "body": RESPONSE}},
        {"custom_id": "1", "method": "POST", "body": REQUEST, "response": {"body": RESPONSE}},
        {**REQUEST, "response": RESPONSE},
        {**REQUEST, **RESPONSE},
        {"request": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}]},
         "response": RESPONSE},
    ],
)  # fmt: skip
def test_every_form_says_who_asked_what_and_what_was_answered(row: Any) -> None:
    record = parse(row, 3)
    assert [dict(m) for m in record.messages] == ASKED
    assert (record.response, record.line, record.answered) == ("Hi.", 3, True)


@pytest.mark.parametrize(
    "row", ["Hello?", {"prompt": "Hello?"}, {"messages": ASKED}, {"body": REQUEST}, {"request": REQUEST}]
)
def test_a_line_may_have_no_answer(row: Any) -> None:
    record = parse(row, 1)
    assert ([dict(m) for m in record.messages], record.answered) == (ASKED, False)


def test_a_completion_is_of_a_text_as_it_is() -> None:
    for row in (
        {"request": {"prompt": "def f("}, "response": {"choices": [{"text": "x):"}]}},
        {"model": "m", "prompt": "def f(", "choices": [{"text": "x):", "finish_reason": "length"}]},
    ):
        record = parse(row, 1)
        assert (record.messages, record.prompt, record.response) == ((), "def f(", "x):")
    assert record.ended == "length"
    assert parse({"model": "m", "prompt": "def f("}, 1).prompt == "def f("
    assert parse({"model": "m", "prompt": [4, 5]}, 1).prompt_token_ids == (4, 5)


def test_token_ids_are_taken_as_they_are() -> None:
    record = parse({"prompt_token_ids": [1, 2], "token_ids": [3], "finish_reason": "length"}, 1)
    assert (record.prompt_token_ids, record.token_ids, record.ended) == ((1, 2), (3,), "length")
    said = {"choices": [{**CHOICE, "token_ids": [3, 4]}]}
    assert parse({"request": REQUEST, "response": said}, 1).token_ids == (3, 4)
    both = parse({"request": REQUEST, "response": {**said, "prompt_token_ids": [1, 2]}}, 1)
    assert (both.prompt_token_ids, both.token_ids) == ((1, 2), (3, 4))


def test_what_else_a_line_says_is_found_wherever_it_stands() -> None:
    record = parse({"request": REQUEST, "response": RESPONSE, "latency_ms": 1500, "tags": ["a", "b"]}, 1)
    assert (record.temperature, record.max_tokens, record.ended) == (0.5, 7, "stop")
    assert (record.arrived, record.seconds, record.tags) == (1.7e9, 1.5, ("a", "b"))
    for when in ("2023-11-14T22:13:20Z", "2023-11-14T22:13:20", 1_700_000_000_000, "1700000000"):
        assert parse({"prompt": "a", "timestamp": when}, 1).arrived == 1.7e9
    assert parse({"prompt": "a", "tag": "x", "duration": 2}, 1).seconds == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "it has no messages"),
        ([], "list instead of an object"),
        ({}, "'prompt'"),
        ({"messages": [{"role": "user"}]}, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url', which",
        ),
        ({"prompt": "a", "timestamp": "yesterday"}, "yesterday"),
    ],
)
def test_a_line_of_no_known_form_says_why(row: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        parse(row, 1)


def test_lines_that_cannot_be_used_are_counted_and_shown_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    lines = [b'{"prompt": "a"}', b"", b"nonsense", b"\xff", b"[" * 100_000, b'"b"', b"7"]
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    file = TrafficFile(path)
    assert [r.line for r in file] == [1, 6]
    assert file.left_out == 4
    assert [fault.partition(":")[0] for fault in file.faults] == ["line 3", "line 4", "line 5", "line 7"]
    assert file.sha256 == hashlib.sha256(b"\n".join(lines)).hexdigest()
    assert len(list(file)) == 2  # again, and counted anew
    assert file.left_out == 4


def test_a_list_over_several_lines_is_told_how_to_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text('[\n{"conversations": []}\n]\n')
    file = TrafficFile(path)
    assert not list(file)
    assert "jq -c '.[]'" in str(file.refuse())
    with pytest.raises(ConfigError, match="cannot read"):
        list(TrafficFile(tmp_path / "missing.jsonl"))


def test_a_large_file_needs_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for i in range(4000):
            file.write(json.dumps({"prompt": f"{i} " * 500, "response": "x" * 1000}) + "\n")
    tracemalloc.start()
    assert sum(1 for _ in TrafficFile(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 8


# ---------------------------------------------------------------------------------------------------
# Redaction


def test_every_text_is_redacted_before_anybody_sees_it(tmp_path: Path) -> None:
    secret = {
        "prompt": [{"role": "user", "content": "I am SECRET"}], "response": "Hi SECRET",
        "tools": [{"SECRET": ["SECRET"]}], "timestamp": "2023-11-14T22:13:20Z", "tag": "chat",
    }  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(secret)}\n{json.dumps({'prompt': 'a', 'latency': 'SECRET'})}\n")
    file = TrafficFile(path, lambda text: text.replace("SECRET", "#"))
    (record,) = file
    assert record.messages[0]["content"] == "I am #"
    assert record.response == "Hi #"
    assert record.arrived == 1.7e9
    assert "SECRET" not in f"{file.faults}"
    assert "#" in file.faults[0]
    assert "SECRET" in f"{next(iter(TrafficFile(path, str)))}"  # nothing is taken out by itself


def test_a_redaction_that_fails_leaves_the_line_out_and_shows_nothing_of_it(tmp_path: Path) -> None:
    def redact(text: str) -> str:
        raise LookupError(text)

    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "SECRET"}\n')
    file = TrafficFile(path, redact)
    assert not list(file)
    assert file.faults == ["line 1: the redaction failed with LookupError"]


def test_packages_redact_by_a_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, old, new in (("one", "a", "b"), ("two", "b", "c")):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[spec_plugins]\n{name} = redacts_{name}\n")
        (tmp_path / f"redacts_{name}.py").write_text(
            "from spec_plugins import hookimpl\n\n@hookimpl\ndef spec_plugins_redact(text):\n"
            f"    return text.replace({old!r}, {new!r})\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    found = Registry.discover()
    assert found.faults == []  # a package need not bring proposers
    assert len(found.redactors) == 2
    assert found.redact("a") in ("b", "c")
    assert Registry().redact is str


# ---------------------------------------------------------------------------------------------------
# Tags, samples, arrivals


@pytest.mark.parametrize(
    ("tag", "row"),
    [
        ("chat", {"prompt": "What is love?", "response": "A song; by Haddaway."}),
        ("chat", {"prompt_token_ids": [1], "token_ids": [2]}),
        ("code", {"prompt": "Sort a list", "response": "Sure:\n```python\nsorted(x)\n```"}),
        ("code", {"prompt": "def add(a, b):\n    return a + b\nExplain.", "response": "It adds."}),
        ("code", {"prompt": "Go on", "response": "int main() {\n  return 0;\n}"}),
        ("agent", {"messages": ASKED, "tools": [{"type": "function"}]}),
        ("agent", {"messages": [*ASKED, {"role": "tool", "content": "42"}]}),
        ("agent", {"messages": ASKED, "choices": [{"message": {"role": "assistant", "content": None,
                                                               "tool_calls": [{"id": "1"}]}}]}),
        ("agent", {"prompt": "Find it", "response": "I look.\nAction: search"}),
    ],
)  # fmt: skip
def test_tags_are_guessed(tag: str, row: Any) -> None:
    assert tag_of(parse(row, 1)) == tag


def test_a_tag_that_is_given_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "```", "tag": "mine"}\n{"prompt": "hello"}\n')
    assert [r.tags for r in TrafficFile(path)] == [("mine",), ("chat",)]


def records(n: int) -> list[Record]:
    """A tenth code, which is long; a tenth of the chat is long too."""
    rng = np.random.default_rng(3)
    made = []
    for line in range(n):
        code, long = rng.random() < 0.1, rng.random() < 0.1
        made.append(
            Record(line, prompt="x" * (4000 if code or long else 40), tags=("code" if code else "chat",))
        )
    return made


def test_a_sample_keeps_the_mix() -> None:
    whole = records(5000)
    chosen = sample(iter(whole), 100)
    assert len(chosen) == 100
    for share in (lambda r: r.tags == ("code",), lambda r: r.size > 500):
        assert abs(sum(map(share, chosen)) - 100 * sum(map(share, whole)) / 5000) <= 1
    lines = [r.line for r in chosen]
    assert lines == sorted(set(lines))
    assert lines == [r.line for r in sample(whole, 100)]
    assert lines != [r.line for r in sample(whole, 100, seed=1)]
    assert sample(whole[:50], 100) == whole[:50]
    assert np.mean(lines) == pytest.approx(2500, abs=600)  # from all over the file


def test_every_record_is_as_likely_as_another_of_its_kind() -> None:
    whole = [Record(i, prompt="x", tags=("chat",)) for i in range(20)]
    drawn = Counter(r.line for seed in range(2000) for r in sample(whole, 5, seed))
    assert all(abs(drawn[i] - 500) < 6 * (2000 * 0.25 * 0.75) ** 0.5 for i in range(20))


def test_concurrency_is_counted_exactly() -> None:
    # 0..10 one, 4..6 a second, idle to 20, 20..22 two at once
    found = overlap([0, 4, 20, 20], [10, 2, 2, 2])
    assert found.shares == pytest.approx(np.array([10, 8, 4]) / 22)
    assert found.mean == pytest.approx(16 / 22)
    assert [found.quantile(q) for q in (0.5, 0.6, 0.7, 1)] == [1, 1, 2, 2]
    assert overlap([0, 5], [5, 5]).shares == pytest.approx([0, 1])  # one after the other is not two at once
    assert overlap([3], [0]).quantile(0.9) == 0
    with pytest.raises(ConfigError, match="1 durations for 2 arrivals"):
        overlap([1, 2], [1])


def test_littles_law_agrees_with_counting() -> None:
    rng = np.random.default_rng(0)
    arrived = np.cumsum(rng.exponential(0.5, 20_000))
    seconds = rng.exponential(4.0, 20_000)
    counted = overlap(arrived, seconds)
    assert littles_law(arrived, 4.0) == pytest.approx(8, rel=0.05)
    assert counted.mean == pytest.approx(8, rel=0.05)
    assert counted.quantile(0.95) == pytest.approx(13, abs=1)  # Poisson's, with a mean of 8
    with pytest.raises(ConfigError, match="give two or more"):
        littles_law([5, 5], 1)
