"""The page of a recommendation: it says what the JSON says, loads nothing, runs nothing, and fits a phone."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'spec-plugins[evaluate]'")
pytest.importorskip("jinja2", reason="needs jinja2: pip install 'spec-plugins[evaluate]'")

from test_recommendation import (
    NGRAM,
    SUFFIX,
    Drafts,
    compute,
    gather,
    read_weights,
    replayed,
    step_times,
)
from typer.testing import CliRunner

from spec_plugins.cli import app
from spec_plugins.evaluation import recommendation_charts as charts
from spec_plugins.evaluation.recommendation import recommend
from spec_plugins.evaluation.recommendation_page import page
from spec_plugins.evaluation.recommendation_report import pasted
from spec_plugins.evaluation.recommended import NONE, Crossover, Interval, Recommendation

ASKED = (1, 4, 8, 32)
EVIL = "<script>alert(1)</script>"


def traffic_text(evil: str = "") -> list[dict[str, Any]]:
    pieces = [
        ("target", "def add(a, b):\n    "), ("accepted", "return a"), ("rejected", " - b\n\n"),
        ("target", " +"), ("accepted", " b\n"), ("target", "#" * 120 + evil),
    ]  # fmt: skip
    return [
        {
            "request": 3, "tags": ["code", evil], "draft_tokens": 6, "steps": 9, "tokens": 30,
            "pieces": [{"kind": kind, "text": text, "tokens": 2} for kind, text in pieces],
        }
    ]  # fmt: skip


def data(n: int = 60, evil: str = "", proposers: Any = (NGRAM, SUFFIX)) -> dict[str, Any]:
    """A replay with all that a page shows."""
    made = replayed(proposers, n)
    for k, proposer in enumerate(made["proposers"].values()):
        shares = 0.6 * (0.8 - 0.2 * k) ** np.arange(6)
        proposer["all"] = {
            "by_position": [
                {"position": i + 1, "survival": s, "survival_interval": [0.9 * s, 1.1 * s]}
                for i, s in enumerate(shares.tolist())
            ]
        }
        proposer["examples"] = traffic_text(evil)
    return made


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], Recommendation, str]:
    """A replay as JSON, what is recommended, and the page."""
    replay = data()
    found = recommend(gather([replay]), step_times(read_weights), ASKED, draws=200)
    return replay, found, page(found, gather([replay]))


class Parsed(HTMLParser):
    """A page: its elements, its tables by class, and its text; tags must be closed where they have to be."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.text: list[str] = []
        self._open: list[str] = []
        self._table: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self._open == []
        for row in (row for tables in self.tables.values() for table in tables for row in table):
            row[:] = [cell.strip() for cell in row]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            self._table = []
            self.tables.setdefault(dict(attrs).get("class") or "", []).append(self._table)
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if "style" in self._open or "svg" in self._open:
            return
        self.text.append(text)
        if any(tag in self._open for tag in ("td", "th")):
            self._table[-1][-1] += re.sub(r"\s+", " ", text)


def shown(interval: Interval, digits: int = 2, scale: float = 1) -> str:
    low, value, high = (scale * (x or 0) for x in (interval.low, interval.value, interval.high))
    return f"{value:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


# ------------------------------------------------------------------------------------------ what it says


def test_its_figures_are_those_of_the_json(made: tuple[dict[str, Any], Recommendation, str]) -> None:
    replay, found, text = made
    found = Recommendation.model_validate_json(found.model_dump_json())
    parsed = Parsed(text)
    for at, (_, *rows), (_, *answers) in zip(
        found.at, parsed.tables["ranking"], itertools.repeat(parsed.tables["answer"][0]), strict=False
    ):
        assert len(rows) == len(at.options)
        for o, row in zip(at.options, rows, strict=True):
            assert row[0].startswith(o.method)
            assert o.effort in row[0]
            if o.method != NONE:
                assert o.verdict in row[0]
                assert row[1:3] == [str(o.draft_tokens), shown(o.speed_up)]
            assert row[3] == shown(o.tokens_per_second, 0)
        answer = next(row for row in answers if row[0] == str(at.concurrency))
        chosen = next(o for o in at.options if o.method == at.choice)
        if at.choice == NONE:
            assert answer[1:] == ["none: decode plainly", "1"]
        else:
            assert answer[1].startswith(f"{at.choice}, {chosen.draft_tokens} draft token")
            assert answer[2] == shown(chosen.speed_up).replace(" (", " × (")
            assert at.started is not None
            for line in pasted(at.started, found.engine, "m"):
                assert " ".join(line.split()) in parsed.words
        for reason in at.reasons:
            assert " ".join(reason.split()) in parsed.words
    points = [
        (c.method, str(n), str(length), shown(s))
        for c in found.crossovers
        for n, length, s in c.curve
        if n in ASKED
    ]
    assert [row[-3:] for row in parsed.tables["curves"][0][1:]] == [[*p[1:]] for p in points]
    survival = [
        shown(Interval.of(p["survival"], *p["survival_interval"]), 1, 100)
        for proposer in replay["proposers"].values()
        for p in proposer["all"]["by_position"]
    ]
    assert [row[-1] for row in parsed.tables["positions"][0][1:]] == survival
    bars = [(at, o) for at in found.at for o in at.options if o.method != NONE]
    for row, (at, o) in zip(parsed.tables["parts"][0][1:], bars, strict=True):
        plain = 1e3 * at.plain_step.value
        parts = [plain, (o.step_ratio - 1) * plain, 1e3 * (o.draft_seconds or 0), o.tokens_per_step.value]
        assert row[0] == f"{o.method}, {at.concurrency}"
        assert [float(cell) for cell in row[1:]] == pytest.approx(parts, abs=0.0051)
    for sentence in (*found.reasons, *found.notes):
        assert " ".join(sentence.split()) in parsed.words
    assert "60 recorded requests of t.jsonl for m" in parsed.words


def test_none_and_cannot_tell_as_plainly() -> None:
    poor = data(100, proposers=[Drafts("ngram", 0.6, 0.3)])
    nothing = Parsed(page(recommend(gather([poor]), step_times(compute), (1, 8)), gather([poor]))).words
    assert nothing.count("None: decode plainly") == 2
    assert "Nothing pays: the best is ngram" in nothing
    few = data(3, proposers=[SUFFIX])
    unsure = Parsed(page(recommend(gather([few]), step_times(read_weights), (1,)), gather([few]))).words
    assert "Cannot tell The data do not show what pays here" in unsure
    assert "cannot tell without 27 more requests" in unsure
    assert "decode plainly" not in unsure


def test_a_replay_of_an_older_version_has_a_page_too() -> None:
    old = replayed([NGRAM])
    found = recommend(gather([old]), step_times(read_weights), (1,), curve=False)
    parsed = Parsed(page(found, gather([old])))
    assert "What is accepted" not in parsed.words
    assert "In the text" not in parsed.words
    assert "Where each step's time goes" in parsed.words


# -------------------------------------------------------------------------------------------- its charts


def drawn(svg: str, variable: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The points of a line."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg)
    line = next(
        d
        for d, style in paths
        if f"stroke: var(--{variable})" in style and "fill: none" in style and "L" in d
    )
    return np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line), np.float64)


def test_lines_lie_where_their_figures_are() -> None:
    at = [1, 2, 4, 8, 16]
    values = {"a": [2.0, 1.9, 1.5, 0.9, 0.7], "b": [1.2, 1.3, 1.3, 1.25, 1.1]}
    curves = [
        Crossover(
            method=m, not_sure_from=None, expected_from=8 if m == "a" else None, sure_from=None,
            curve=[(n, 3, Interval(value=v, low=v - 0.1, high=v + 0.1)) for n, v in zip(at, of, strict=True)],
        )
        for m, of in values.items()
    ]  # fmt: skip
    lines = charts.styles(["a", "b"])
    svg = charts.speed_ups(curves, lines, at)
    points = np.concatenate([drawn(svg, lines[m].variable) for m in values])
    x, y = np.log2(at * 2), np.concatenate([*values.values()])
    for places, figures in ((points[:, 0], x), (-points[:, 1], y)):
        slope, offset = np.polyfit(figures, places, 1)
        assert slope > 0
        np.testing.assert_allclose(slope * figures + offset, places, atol=0.01)
    assert svg.count('href="#speed-up-') > 5  # dots and one cross
    assert ">8</text>" in svg
    assert len({(s.variable, s.dash) for s in charts.styles([str(i) for i in range(32)]).values()}) == 32


def test_bars_are_as_long_as_their_parts() -> None:
    bars = [charts.Bar(1, "a", 0.010, 0.004, 0.001, 2.0), charts.Bar(8, "b" * 50, 0.020, -0.001, None, 1.5)]
    svg = charts.step_parts(bars)
    widths = []
    for part in ("plain", "verify", "draft"):
        for d, _ in re.findall(rf'<path d="([^"]*)"[^>]*style="(fill: var\(--part-{part}\))', svg):
            xs = [float(x) for x in re.findall(r"[ML] ([-\d.]+) ", d)]
            widths.append(max(xs) - min(xs))
    scale = widths[0] / 10
    assert np.array(widths) / scale == pytest.approx([10, 20, 4, 0, 1, 0], abs=0.01)
    assert f"{'b' * 17}…, 8" in svg
    assert charts.step_parts(bars) == svg  # the same figures, the same file


# ------------------------------------------------------------------------------------------ what it is not


def contained(text: str) -> Parsed:
    """Asserts that a page loads nothing, runs nothing, and that its parts find each other."""
    parsed = Parsed(text)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {
        "script",
        "img",
        "image",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "foreignobject",
        "form",
    }
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "srcset", "action", "data", "xlink:href"):
                assert str(value)[:1] == "#"
                assert str(value)[1:] in ids
            assert all(target in ids for target in re.findall(r"url\(#([^)]*)\)", str(value)))
    assert not re.search(r"https?:|@import|url\((?!#)|javascript:", text)
    assert "default-src 'none'" in text
    return parsed


def test_nothing_is_loaded_and_nothing_runs(made: tuple[dict[str, Any], Recommendation, str]) -> None:
    *_, text = made
    parsed = contained(text)
    svgs = [a for tag, a in parsed.elements if tag == "svg" and "role" in a]
    assert len(svgs) == 3
    assert all(a["role"] == "img" and a["aria-label"] for a in svgs)
    assert {"curves", "positions", "parts"} < set(parsed.tables)  # one beside each
    assert ("html", {"lang": "en"}) in parsed.elements
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    with pytest.raises(AssertionError):
        contained(text.replace("</main>", f"{EVIL}</main>"))


def test_what_others_wrote_is_text() -> None:
    evil = f'"><img src=x onerror=alert(1)>{EVIL}{{{{ 7 * 7 }}}}$\\frac{{1}}{{2}}$'
    replay = data(evil=evil, proposers=[Drafts(evil, 1.0, 0.6), NGRAM])
    replay["about"]["model"] = replay["about"]["traffic"] = evil
    replay["proposers"][evil]["notes"] = [evil]
    replay["proposers"][evil]["config"]["proposer"] = "suffix"
    found = recommend(gather([replay]), step_times(read_weights, engine="transformers"), ASKED, draws=200)
    parsed = contained(page(found, gather([replay])))
    assert parsed.words.count(evil) > 10
    assert "49" not in parsed.words.split()
    assert not any(tag == "script" for tag, _ in parsed.elements)


# --------------------------------------------------------------------------------- from the command line


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "replay.json").write_text(json.dumps(data()))
    (tmp_path / "times.json").write_text(step_times(read_weights).model_dump_json())
    return [
        "recommend", str(tmp_path), "--times", str(tmp_path / "times.json"), "--concurrency", "1,32",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def test_it_stands_beside_json_and_markdown(command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    names = ["recommendation.json", "recommendation.md", "report.html"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    said = "drafted and rejected"
    assert said in (tmp_path / "out" / "report.html").read_text()
    assert CliRunner().invoke(app, [*command, "--no-examples"]).exit_code == 0
    without = (tmp_path / "out" / "report.html").read_text()
    assert said not in without
    assert "return a" not in without


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_its_libraries_the_rest_is_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "recommendation.json", "recommendation.md",
    ]  # fmt: skip
    assert done.stderr.count("pip install 'spec-plugins[evaluate]'") == 1
    assert f"report.html needs '{missing}'" in " ".join(done.stderr.split())


# ------------------------------------------------------------------------------------------ in a browser

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=5000",
)  # fmt: skip
PHONE, DESKTOP = 375, 1200
FRAMES = """<!DOCTYPE html><meta charset="utf-8"><ul></ul>
<script>addEventListener("message", e => {
  document.querySelector("ul").append(Object.assign(document.createElement("li"), {textContent: e.data}))
})</script>"""
MEASURED = """<script>addEventListener("load", () => {
  const name = location.pathname.split("/").pop(), whole = document.documentElement.scrollWidth
  parent.postMessage([name, innerWidth, whole].join(" "), "*")
})</script>"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs headless Chromium, with a profile of its own."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("SPEC_PLUGINS_CHROMIUM") or next((n for n in names if shutil.which(n)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or its path in SPEC_PLUGINS_CHROMIUM")

    def run(page: Path, *flags: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        done = subprocess.run(
            [found, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


def test_it_fits_a_phone(
    made: tuple[dict[str, Any], Recommendation, str], chromium: Any, tmp_path: Path
) -> None:
    """Nothing is wider than the screen. The control has one long line that may not be broken."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", made[2])
    text = text.replace("</body>", f"{MEASURED}</body>")
    wide = text.replace("</main>", f'<p style="white-space: nowrap">{"wide " * 100}</p></main>')
    frames, cases = FRAMES, {"page": (text, PHONE), "small": (text, 320), "wide": (wide, PHONE)}
    for name, (content, width) in cases.items():
        (tmp_path / f"{name}.html").write_text(content)
        frames += f'<iframe src="{name}.html" width="{width}" height="800" style="border: 0"></iframe>'
    (tmp_path / "frames.html").write_text(frames)
    told = re.findall(r"<li>(\w+).html (\d+) (\d+)</li>", chromium(tmp_path / "frames.html", "--dump-dom"))
    widths = {name: (int(inner), int(scrolled)) for name, inner, scrolled in told}
    assert widths["page"] == (PHONE, PHONE)
    assert widths["small"] == (320, 320)
    assert widths["wide"][1] > PHONE


@pytest.mark.parametrize(("name", "width"), [("phone", PHONE), ("desktop", DESKTOP)])
def test_it_is_seen(
    made: tuple[dict[str, Any], Recommendation, str], chromium: Any, tmp_path: Path, name: str, width: int
) -> None:
    """A screenshot, kept in the folder that SPEC_PLUGINS_SCREENSHOTS names."""
    from matplotlib.image import imread

    folder = Path(os.environ.get("SPEC_PLUGINS_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    shot = folder / f"report-{name}.png"
    (tmp_path / "report.html").write_text(made[2])
    chromium(tmp_path / "report.html", f"--window-size={width},8000", f"--screenshot={shot}")
    seen = (imread(shot)[..., :3] * 255).round().astype(np.uint8)
    assert seen.shape[1] == width
    # Of the text, what pays, both lines, bars, and examples.
    for colour in ("#1c2430", "#e2f4e9", "#0b62a8", "#b85c00", "#8a95a5", "#fce6e3"):
        assert (seen == list(bytes.fromhex(colour[1:]))).all(-1).any(), colour
    assert (seen[:, -8:] == 255).all()  # nothing runs into the edge
