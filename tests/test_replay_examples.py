"""Examples of a replay: what was accepted and rejected, in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_replay import CHAINS, TARGET, TREES, VOCAB, record, texts
from typer.testing import CliRunner

from spec_plugins import Draft, Proposer, Step
from spec_plugins.cli import app
from spec_plugins.config import Config, load_config
from spec_plugins.evaluation import replay_report
from spec_plugins.evaluation.replay import KEPT_TOKENS, Replayed, replay
from spec_plugins.evaluation.replay_examples import examples, shown_requests
from spec_plugins.registry import registry
from spec_plugins.traffic.formats import parse

LETTERS = "abcdefghijklmnopqrstuvwxyzABCD"


def letters(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[t] for t in tokens)


class Says(Proposer):
    """Drafts the same tokens, or the same tree, in every step."""

    bounded = nested = True
    depends_on = "text"

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.tokens = np.array(tokens, np.int32)
        self.parents = None if parents is None else np.array(parents, np.int32)

    def propose(self, step: Step) -> list[Draft]:
        drafts = []
        for most in np.minimum(step.budgets, step.depths).tolist():
            n = len(self.tokens) if self.parents is not None else most
            whole = most >= 2 or self.parents is None
            drafts.append(
                Draft(self.tokens[:n], None if self.parents is None else self.parents[:n])
                if whole
                else Draft(self.tokens[:0])
            )
        return drafts


def replayed(
    monkeypatch: pytest.MonkeyPatch, proposer: Proposer, said: str, mode: Any = "positions", most: int = 3
) -> Replayed:
    monkeypatch.setattr(Config, "create_proposer", lambda self: proposer)
    pairs = [([0], [LETTERS.index(c) for c in said])]
    return replay(record(pairs), Config(num_speculative_tokens=most), TARGET, mode=mode, keep=[0])


@pytest.mark.parametrize("mode", ["positions", "steps"])
def test_accepted_rejected_and_the_targets_own(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    result = replayed(monkeypatch, Says([1, 2, 3]), "xbcybzzzzzzzzbcd", mode)
    (example,) = examples(result, letters)
    # x | bc, d rejected, y | b, cd rejected, z | …; the last draft is right to the end.
    shown = [(p.kind, p.text) for p in example.pieces]
    assert shown[:6] == [
        ("target", "x"), ("accepted", "bc"), ("rejected", "d"), ("target", "y"),
        ("accepted", "b"), ("rejected", "cd"),
    ]  # fmt: skip
    assert shown[-1][0] == "target" if mode == "steps" else shown[-1][0] in ("accepted", "target")
    assert "".join(text for kind, text in shown if kind != "rejected") == "xbcybzzzzzzzzbcd"
    accepted = sum(p.tokens for p in example.pieces if p.kind == "accepted")
    counts = result.counts()
    assert (accepted, example.steps) == (counts.accepted_tokens.sum(), counts.steps.sum())
    assert example.tokens == 16


def test_of_a_tree_the_likeliest_branch_after_what_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    #     b ── d
    #     c ── e
    tree = Says([1, 2, 3, 4], [-1, -1, 0, 1])
    monkeypatch.setattr(Config, "create_proposer", lambda self: tree)
    pairs = [([0], [LETTERS.index(c) for c in "xcyzbdzz"])]
    config = Config(num_speculative_tokens=2, max_draft_nodes=4)
    (example,) = examples(replay(record(pairs), config, TARGET, provides=TREES, keep=[0]), letters)
    shown = [(p.kind, p.text) for p in example.pieces]
    assert shown[:6] == [
        ("target", "x"), ("accepted", "c"), ("rejected", "e"), ("target", "y"), ("rejected", "bd"),
        ("target", "z"),
    ]  # fmt: skip
    assert ("accepted", "bd") in shown


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead"])
def test_they_are_what_was_said_and_counted(name: str) -> None:
    pairs = texts(12)
    config = load_config({"proposer": name, "num_speculative_tokens": 5})
    recorded = record(pairs)
    result = replay(recorded, config, TARGET, provides=CHAINS, keep=range(12))
    counts, found = result.counts(), examples(result, letters)
    assert [e.request for e in found] == [i for i, (_, said) in enumerate(pairs) if len(said) > 1]
    for e in found:
        assert "".join(p.text for p in e.pieces if p.kind != "rejected") == letters(pairs[e.request][1])
        by_kind = {k: sum(p.tokens for p in e.pieces if p.kind == k) for k in ("accepted", "rejected")}
        assert by_kind["accepted"] == counts.accepted_tokens[e.request]
        assert e.steps == counts.steps[e.request]
        # Without what is behind the end of the record.
        drafted = counts.draft_tokens[e.request] - counts.past_end[e.request].sum()
        assert sum(by_kind.values()) == drafted
    assert any(p.kind == "rejected" for e in found for p in e.pieces)
    assert not examples(replay(recorded, config, TARGET), letters)


def test_characters_of_several_tokens_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aéa日本a🎉a"
    tokens = list(text.encode())
    place = {byte: i for i, byte in enumerate(dict.fromkeys(tokens))}
    assert len(place) <= VOCAB
    back = list(place)
    proposer = Says([place[b] for b in "日".encode()])
    monkeypatch.setattr(Config, "create_proposer", lambda self: proposer)
    pairs = [([0], [place[t] for t in tokens])]
    result = replay(record(pairs), Config(num_speculative_tokens=3), TARGET, keep=[0])
    (example,) = examples(result, lambda found: bytes(back[t] for t in found).decode(errors="replace"))
    assert "".join(p.text for p in example.pieces if p.kind != "rejected") == text
    assert "日" in [p.text for p in example.pieces if p.kind == "accepted"]
    assert not any("\ufffd" in p.text for p in example.pieces if p.kind != "rejected")


def test_few_and_not_long() -> None:
    pairs = [([1, 2, 3], [4, 5, 6] * 100) for _ in range(20)]
    recorded = record(pairs)
    shown = shown_requests(recorded)
    assert len(shown) == 3
    assert {recorded.tags[i] for i in shown} == {("a",), ("b",)}
    assert min(shown) > 5
    result = replay(recorded, load_config("ngram", num_speculative_tokens=8), TARGET, keep=shown)
    for example in examples(result, letters):
        assert KEPT_TOKENS <= example.tokens <= KEPT_TOKENS + 9
    data = replay_report.as_json({"ngram": result}, {}, letters)
    assert len(json.dumps(data["proposers"]["ngram"]["examples"])) < 20_000
    assert replay_report.as_json({"ngram": result}, {})["proposers"]["ngram"]["examples"] == []


def test_from_the_command_line_redacted_or_left_out(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, secret = tmp_path / "traffic.jsonl", "that cat"
    line = {"prompt": "the cat sat", "response": "on the mat and that cat sat on the mat and that cat"}
    assert parse(line, 1).answered
    traffic.write_text("\n".join([json.dumps(line)] * 6))
    command = ["replay", str(tiny_model_dir), "--traffic", str(traffic), "--spec", "ngram"]

    def kept(*more: str) -> str:
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), *more])
        assert done.exit_code == 0, done.output
        data = json.loads((tmp_path / "out" / "replay.json").read_text())
        return "".join(
            p["text"] for e in data["proposers"]["ngram"]["examples"] for p in e["pieces"]
            if p["kind"] != "rejected"
        )  # fmt: skip

    assert secret in kept()
    assert kept("--no-examples") == ""
    monkeypatch.setattr(registry(), "redactors", [lambda text: text.replace(secret, "a dog")])
    redacted = kept()
    assert secret not in redacted
    assert "a dog" in redacted
