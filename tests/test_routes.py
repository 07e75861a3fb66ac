"""Which route `auto` takes where a proposer and the engine's own method bear one name."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from spec_plugins import ConfigError, support
from spec_plugins.cli import app
from spec_plugins.launch import prepare
from spec_plugins.registry import registry

DRAFT: dict[str, Any] = {
    "proposer": "draft_model", "num_speculative_tokens": 3, "options": {"model": "DRAFT"},
}  # fmt: skip
FIRST = ("draft_model", "eagle", "eagle3")


@pytest.mark.parametrize(
    ("engine", "method", "own"),
    [
        *(("vllm", method, f'"method": "{method}"') for method in FIRST),
        *zip(["sglang"] * 3, FIRST, (" STANDALONE ", " EAGLE ", " EAGLE3 "), strict=True),
    ],
)
def test_some_are_the_engines_own_unless_the_plugin_is_asked_for(engine: str, method: str, own: str) -> None:
    draft = {**DRAFT, "proposer": method}
    for source in (draft, json.dumps(draft), {**draft, "route": "native"}):
        found = prepare(engine, source)
        assert found.route == "native"
        assert own in " ".join(found.flags)
    plugged = prepare(engine, {**draft, "route": "plugin"})
    assert plugged.route == "plugin"
    assert own not in " ".join(plugged.flags)


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.32.0"), ("vllm", "0.33.0"), ("sglang", "0.5.23")]
)
def test_medusa_is_the_proposer_everywhere(engine: str, version: str) -> None:
    for route in ("auto", "plugin"):
        source = {**DRAFT, "proposer": "medusa", "route": route}
        assert prepare(engine, source, version).route == "plugin"
    assert support.explain("transformers", "medusa").route == "plugin"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_options_of_the_proposer_alone_come_with_the_way_to_it(engine: str) -> None:
    text = {**DRAFT, "options": {"model": "DRAFT", "vocabulary": "text"}}
    with pytest.raises(ConfigError, match=r"(?s)options\.vocabulary: unknown field.*set route to 'plugin'"):
        prepare(engine, text)
    assert prepare(engine, {**text, "route": "plugin"}).route == "plugin"


@pytest.mark.parametrize("method", FIRST)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_explain_says_why(engine: str, method: str) -> None:
    found = support.explain(engine, method)
    assert found.route == "native"
    assert found.native.endswith(support.OWN_FIRST_WHY)
    assert f"proposer {method!r}" in found.plugin
    shown = CliRunner().invoke(app, ["explain", engine, method]).stdout
    assert support.OWN_FIRST_WHY in " ".join(shown.split())


def test_other_methods_are_the_proposers() -> None:
    assert support.ENGINES["vllm"].own_first == support.ENGINES["sglang"].own_first == set(FIRST)
    for engine, about in support.ENGINES.items():
        assert about.own_first <= set(about.native)
        for name in set(registry().proposers) - about.own_first:
            if support.runs_as_plugin(engine, name):
                found = support.explain(engine, name)
                assert found.route == "plugin"
                assert support.OWN_FIRST_WHY not in found.native
    assert support.explain("transformers", "draft_model").route == "plugin"
    assert support.explain("tensorrt-llm", "draft_model").route == "native"


def test_the_matrix_says_every_route_and_what_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = support.matrix()
    assert set(cells) == set(support.METHODS), "and no instruments, such as calibration"
    for method, row in cells.items():
        for engine, cell in row.items():
            found = support.explain(engine, method)
            assert cell.partition(",")[0].partition(" ")[0] == (found.route or ""), (method, engine)
    assert cells["mtp"]["vllm"] == "native (written)"
    assert cells["suffix"]["tensorrt-llm"] == "plugin (stand-in)"
    assert cells["eagle3"]["sglang"] == "native, plugin"
    for about in support.ENGINES.values():
        assert about.ran <= about.native.keys()
    shown = CliRunner().invoke(app, ["explain"]).stdout
    assert "native (written), plugin (stand-in)" in " ".join(shown.split())
    assert json.loads(CliRunner().invoke(app, ["explain", "--json"]).stdout) == cells
    monkeypatch.setitem(
        registry().proposers, "theirs", replace(registry().proposers["ngram"], name="theirs", provider="acme")
    )
    assert support.matrix()["theirs"]["vllm"] == "plugin"


@pytest.mark.parametrize("method", support.ENGINES["transformers"].native)
def test_transformers_has_what_the_table_says(method: str) -> None:
    generation = pytest.importorskip(
        "transformers.generation", reason="needs transformers: pip install 'spec-plugins[transformers]'"
    )
    found = re.search(r"(\w+)=", support.ENGINES["transformers"].native[method])
    assert found
    if found[1] == "assistant_model":
        assert found[1] in inspect.signature(generation.GenerationMixin.generate).parameters
    else:
        assert hasattr(generation.GenerationConfig(), found[1])
