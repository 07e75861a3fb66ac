"""Predicted beside measured: with a stand-in of servers and their client whose times are known."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_recommendation import NGRAM, SUFFIX, Truth, read_weights, replays, step_times
from typer.testing import CliRunner

from spec_plugins.cli import app
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError, SpecPluginsError, UnavailableError, UnsupportedError
from spec_plugins.evaluation import confirmation_report as report
from spec_plugins.evaluation import load as loads_of
from spec_plugins.evaluation.confirmation import Asked, confirm, loads
from spec_plugins.evaluation.confirmed import Confirmation
from spec_plugins.evaluation.load import Load, Served
from spec_plugins.traffic.conversations import Conversation
from spec_plugins.traffic.record import Record

PROMPT_SECONDS = 0.03
"""Of a prompt, for which all others wait."""


class Letters:
    """A tokenizer: a token a letter."""

    bos_token = None

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, tokens))

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def spoken(n: int, arrived: bool = False, answer: int = 40) -> list[Conversation]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(n):
        tokens = rng.integers(97, 123, 20 + answer).astype(np.int32)
        record = Record(i, arrived=0.25 * i if arrived else None)
        found.append(Conversation(tokens, np.arange(len(tokens)) >= 20, record))
    return found


class ServesAsTold:
    """A stand-in of an adapter's ``load_runner``: servers whose steps take what ``truth`` says."""

    CLIENT = "a stand-in"

    def __init__(
        self, truth: Truth, gains: dict[str, float], later: float = 1.0, failing: int = -1, slow: str = ""
    ) -> None:
        self.truth, self.gains, self.later, self.failing, self.slow = truth, gains, later, failing, slow
        self.started: list[tuple[str, str, tuple[str, ...]]] = []
        self.seen: list[tuple[str, Load]] = []

    def server(self, model: str, config: Config | None, dtype: str, arguments: Sequence[str]) -> Any:
        self.started.append((config.proposer if config else "none", dtype, tuple(arguments)))

        @contextmanager
        def post(path: str, body: Any) -> Iterator[Any]:
            assert path == "/v1/completions"
            yield io.BytesIO(b"{}")

        server = SimpleNamespace(get=lambda path: (200, json.dumps({"data": [{"id": "m"}]})), post=post)

        @contextmanager
        def up() -> Iterator[Any]:
            yield server

        found: Any = up()
        return found

    def run(self, server: Any, model: str, load: Load) -> Served:
        name = self.started[-1][0]
        self.seen.append((name, load))
        n, c = len(load.requests), load.concurrency or 4
        gain = self.gains.get(name, 1.0)
        drift = self.later if len(self.started) > 1 and name == "none" else 1.0
        rng = np.random.default_rng(len(self.seen))
        tokens = np.array([r.max_tokens for r in load.requests])
        # While a request decodes, each other user's slot has one prompt come in.
        waits = (c - 1) * PROMPT_SECONDS
        token = self.truth(c, 1) * drift / gain * rng.normal(1, 0.05, n)
        tokens = np.where(np.arange(n) == self.failing, 0, tokens)
        return Served(
            seconds=float((token * tokens).sum() / c),
            first_token=PROMPT_SECONDS * (1.5 if name == self.slow else 1.0) * rng.normal(1, 0.02, n),
            decoding=token * (tokens - 1).clip(0) + waits,
            tokens=tokens,
            texts=[f"answer to {r.prompt}" for r in load.requests],
            failures=["timed out"] if self.failing >= 0 else [],
        )


def predicted(c: int) -> dict[str, float]:
    found = replays([NGRAM, SUFFIX], 200)
    asked = Asked("m", [c])
    runner = ServesAsTold(read_weights, {})
    result = confirm(found, step_times(read_weights), spoken(400), Letters(), asked, runner=runner)
    return {p.method: p.predicted.value for p in result.at[0].points if p.predicted is not None}


def run(
    runner: ServesAsTold, concurrencies: Sequence[int] = (8,), n: int = 400, **fields: Any
) -> Confirmation:
    asked = Asked("m", concurrencies, **fields)
    found = replays([NGRAM, SUFFIX], 200)
    return confirm(found, step_times(read_weights), spoken(n), Letters(), asked, runner=runner)


def test_what_is_measured_and_how_far_the_prediction_is_off() -> None:
    gains = predicted(8)
    result = run(ServesAsTold(read_weights, gains))
    of = result.at[0]
    assert [p.method for p in of.points] == ["none", *sorted(gains, key=lambda m: -gains[m])]
    for p in of.points[1:]:
        assert p.measured is not None
        assert p.expected is not None
        assert p.predicted is not None
        # The prompts of others, here as long as the decoding, leave less of the gain than is predicted of
        # decoding alone, and the expected figure knows.
        assert p.predicted.value / p.measured.value > 1.1
        assert abs(p.error or 1) < 0.03
        assert p.measured.low is not None
        assert p.measured.low < p.measured.value < (p.measured.high or 0) < p.predicted.value
        assert p.same_answers == p.requests
    assert of.as_predicted
    assert any("is the fastest, as expected" in s for s in report.sentences(result))


def test_a_prediction_that_is_wrong_is_seen() -> None:
    """The control: what was predicted to be the best is served at half of its speed."""
    gains = predicted(8)
    best, other = sorted(gains, key=lambda m: -gains[m])
    result = run(ServesAsTold(read_weights, {best: gains[best] / 2, other: gains[other]}))
    of = result.at[0]
    wrong = next(p for p in of.points if p.method == best)
    assert (wrong.error or 0) > 0.2
    assert wrong.measured is not None
    assert (wrong.measured.high or 9) < (wrong.expected or 0)
    assert not of.as_predicted
    assert of.best(predicted=True).method == best
    assert of.best(predicted=False).method == other
    assert any("slower" in s for s in report.sentences(result))


def test_the_first_token_drift_and_failures_are_told() -> None:
    result = run(ServesAsTold(read_weights, predicted(8), later=1.2, failing=3, slow="suffix"))
    of = result.at[0]
    assert of.plain_again == pytest.approx(1.1, abs=0.1)
    by_name = {p.method: p for p in of.points}
    assert by_name["suffix"].worsens_first_token
    assert not by_name["ngram"].worsens_first_token
    told = " ".join(report.sentences(result))
    for part in (
        "with suffix the first token takes 1.5",
        "the machine drifts",
        "1 requests failed",
        "timed out",
    ):
        assert part in told
    steady = run(ServesAsTold(read_weights, predicted(8)))
    assert "drifts" not in " ".join(report.sentences(steady))


def test_servers_are_as_calibrated_and_loads_have_requests_of_their_own() -> None:
    runner = ServesAsTold(read_weights, {})
    run(runner, (2, 8), methods=["suffix"])
    assert runner.started == [(name, "float32", ()) for name in ("none", "suffix", "none")]
    by_server = [[load for _, load in runner.seen[i : i + 2]] for i in (0, 2, 4)]
    assert by_server[0] == by_server[1] == by_server[2]
    two, eight = by_server[0]
    assert (two.concurrency, len(two.requests)) == (2, 12)
    assert (eight.concurrency, len(eight.requests)) == (8, 48)
    assert not {r.prompt for r in two.requests} & {r.prompt for r in eight.requests}
    assert {r.max_tokens for r in eight.requests} == {40}
    assert all(len(r.prompt) == 20 and len(r.response) == 40 for r in eight.requests)


def test_few_requests_are_shared_and_too_few_refused() -> None:
    found, _ = loads(spoken(50), Letters(), Asked("m", (2, 8)))
    assert [len(load.requests) for load in found] == [10, 39]
    with pytest.raises(ConfigError, match=r"23 requests .* too few to keep 2, 8 users busy.*give 24"):
        loads(spoken(23), Letters(), Asked("m", (2, 8)))


def test_an_open_loop_comes_as_the_traffic_did() -> None:
    found, notes = loads(spoken(100, arrived=True), Letters(), Asked("m", (2,)))
    assert [(load.concurrency, load.rate) for load in found] == [(2, None), (None, 4.0)]
    assert found[1].burstiness == 100  # at even gaps
    assert not notes
    assert len(loads(spoken(100, arrived=True), Letters(), Asked("m", (2,), open_loop=False))[0]) == 1
    runner = ServesAsTold(read_weights, {})
    asked = Asked("m", (2,))
    result = confirm(
        replays([NGRAM], 200), step_times(read_weights), spoken(100, arrived=True), Letters(), asked,
        runner=runner,
    )  # fmt: skip
    last = result.at[-1]
    assert (last.concurrency, last.rate) == (None, 4.0)
    assert all(p.predicted is None for p in last.points)
    assert last.points[1].measured is not None


def test_temperatures_are_the_traffics() -> None:
    said = [Conversation(c.tokens, c.answered, Record(i, temperature=t)) for i, (c, t) in enumerate(
        zip(spoken(40), [0.0, 0.7, 0.7, 1.0] * 10, strict=True)
    )]  # fmt: skip
    found, notes = loads(said, Letters(), Asked("m", (2,)))
    assert {load.temperature for load in found} == {0.7}
    assert "several temperatures" in notes[0]


def test_a_method_that_was_not_replayed() -> None:
    with pytest.raises(ConfigError, match=r"'eagle3' was not replayed.*there are"):
        run(ServesAsTold(read_weights, {}), methods=["eagle3"])


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    result = run(ServesAsTold(read_weights, predicted(8)), (1, 8))
    names = [path.name for path in report.write(result, tmp_path)]
    assert names == ["confirmation.json", "confirmation.md"]
    assert Confirmation.model_validate_json((tmp_path / names[0]).read_text()) == result
    words = (tmp_path / names[1]).read_text()
    for part in ("## 1 at once", "## 8 at once, 48 requests", "| none | - | - |", "a stand-in"):
        assert part in words


def test_what_serves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no server to put load on"):
        loads_of.load_runner("transformers")
    (tmp_path / "t.jsonl").write_text('"a"\n')
    words = [
        "evaluate",
        str(tmp_path),
        "--traffic",
        str(tmp_path / "t.jsonl"),
        "--report",
        str(tmp_path / "o"),
    ]
    refused = CliRunner().invoke(app, [*words, "--confirm"])
    assert refused.exit_code == 2
    assert "nothing can be confirmed in transformers" in refused.output
    assert not (tmp_path / "o").exists()


# -------------------------------------------------------------------------------------------- clients

WRITES = """
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
json.dump({"duration": 2.0, "output_lens": [3, 9], "ttfts": [0.1, 0.2], "itls": [[0.1, 0.3], []],
           "generated_texts": ["ab", ""], "errors": ["", "refused"], "lines": lines}, open(sys.argv[2], "w"))
"""


def client(code: str, python: str) -> Served:
    command = [python, "-c", code, "{requests}", "{folder}/out.json"]
    return loads_of.run_client("client", [{"prompt": "a"}], command, "out.json", "pip install it", {})


def test_what_a_client_writes() -> None:
    import sys

    served = client(WRITES, sys.executable)
    assert served.tokens.tolist() == [3, 0]  # what failed has none
    assert served.decoding.tolist() == pytest.approx([0.4, 0])
    assert served.per_token.tolist() == pytest.approx([0.2])
    assert served.tokens_per_second == 1.5
    assert served.failures == ["refused"]


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("import no_such_module", UnavailableError, "pip install it"),
        ("print('out of luck'); raise SystemExit(3)", SpecPluginsError, "ended with 3:\nout of luck"),
        ("print('nothing to do')", SpecPluginsError, "nothing that this version can read"),
        ("import sys; open(sys.argv[2], 'w').write('{}')", SpecPluginsError, "KeyError"),
    ],
)
def test_a_client_that_fails(code: str, kind: type[Exception], says: str) -> None:
    import sys

    with pytest.raises(kind) as failed:
        client(code, sys.executable)
    assert says in str(failed.value)
