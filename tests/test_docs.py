"""The documentation holds: its code runs, its commands exist, its links lead somewhere, its tables are true.

Code blocks of a page run in order, in one namespace and one empty folder, with a tiny random model in the
place of ``path/to/model``. What stands after the language says how a block is taken:

=================== ===========================================================================
``python``          is run
``python no-run``   is compiled only
``console``         lines after ``$ spec-plugins`` are run, ``make`` must name targets
``console no-run``  the commands and options of ``spec-plugins`` must exist
``LANGUAGE FILE``   is written to that file, for the blocks after it
``text output``     is what the block before printed
=================== ===========================================================================
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import logging
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pydantic
import pytest
from typer.testing import CliRunner

from spec_plugins import Draft, Need, Step, Target, support
from spec_plugins.adapters.sglang import flags as sglang_flags
from spec_plugins.adapters.tensorrt_llm import compiled
from spec_plugins.adapters.tensorrt_llm import flags as tensorrt_flags
from spec_plugins.cli import app
from spec_plugins.config import Config, Containment, options_model
from spec_plugins.driver import Driver
from spec_plugins.metrics import COUNTERS, GAUGES, PREFIX
from spec_plugins.registry import BUILTIN, registry
from spec_plugins.statistics import Statistics
from spec_plugins.validation import Fault

CHECKOUT = Path(__file__).resolve().parent.parent
if not (CHECKOUT / "setup.cfg").is_file():
    pytest.skip("needs the checkout: the documentation is not in the wheel", allow_module_level=True)

RUN = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
LINKED = [*RUN, CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "CHANGELOG.md"]
LINKED += sorted((CHECKOUT / "examples").glob("*/*.md"))
MODEL = "path/to/model"
NEEDS_TORCH = re.compile(
    rf"import torch|from transformers|adapters\.transformers|spec_plugins\.verification|{MODEL}"
)
FENCE = re.compile(r"^ *(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^ *(?P=fence) *$", re.M | re.S)


def named(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=[str(p.relative_to(CHECKOUT)) for p in pages])


@dataclasses.dataclass
class Block:
    """A fenced block."""

    info: list[str]
    text: str
    where: str
    line: int

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def runs(self) -> bool:
        return "no-run" not in self.info


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        info, body = found["info"].split(), textwrap.dedent(found["body"])
        yield Block(info, body, f"{page.relative_to(CHECKOUT)}:{line}", line)


def commands_of(block: Block) -> list[str]:
    """What a reader types: lines after ``$``, continued ones as one."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


# ------------------------------------------------------------------------------------- code and commands


@named(RUN)
def test_code_and_commands_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed: str | None = ""
    for block in blocks_of(page):
        if block.runs and NEEDS_TORCH.search(block.text) and not importable("torch", "transformers"):
            if len(namespace) == 1:
                pytest.skip(f"{block.where} needs torch and transformers")
            printed = None  # later blocks of such a page do not build on this one
            continue
        if block.runs and MODEL in block.text:
            block.text = block.text.replace(MODEL, str(request.getfixturevalue("tiny_model_dir")))
        if block.language == "python":
            printed = run_python(block, namespace)
        elif block.language == "console":
            printed = "".join(run_command(command, block) for command in commands_of(block))
        elif block.info == ["text", "output"]:
            assert printed is None or printed.strip() == block.text.strip(), block.where
        elif len(block.info) == 2:
            (tmp_path / block.info[1]).write_text(block.text, encoding="utf-8")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A page may quieten the log; the next test wants it."""
    logger = logging.getLogger("spec_plugins")
    before = logger.level
    yield
    logger.setLevel(before)


def importable(*modules: str) -> bool:
    try:
        return all(importlib.import_module(module) for module in modules)
    except ModuleNotFoundError:
        return False


def run_python(block: Block, namespace: dict[str, Any]) -> str:
    """Compile, and run where it is meant to run, with line numbers of the page in any traceback."""
    tree = ast.parse(block.text, block.where)
    ast.increment_lineno(tree, block.line - 1)
    code = compile(tree, block.where, "exec", dont_inherit=True)
    out = io.StringIO()
    if block.runs:
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
    return out.getvalue()


def run_command(command: str, block: Block) -> str:
    words = shlex.split(command, comments=True)
    assert words, block.where
    for word in words:
        if re.match(r"(\./)?(tests|integration_tests|examples|docs|scripts)/", word):
            assert (CHECKOUT / word.partition("::")[0]).exists(), f"{block.where}: there is no {word}"
    if words[0] == "make":
        lost = [w for w in words[1:] if "=" not in w and not {w, re.sub(r"-\w+$", "-%", w)} & targets()]
        assert not lost, f"{block.where}: no target of the Makefile: {', '.join(lost)}"
    if words[0] != "spec-plugins":
        return ""
    assert not {"|", "<", ">", "&&", ";"} & set(words), f"{block.where}: give each command a line of its own"
    # With --help, options are parsed, and then nothing is done.
    done = CliRunner().invoke(app, words[1:] if block.runs else [*words[1:], "--help"])
    assert done.exit_code == 0, f"{block.where}: {command}\n{done.output}\n{done.exception!r}"
    return done.stdout


def targets() -> set[str]:
    """The Makefile's."""
    rules = re.findall(r"^([\w%][\w% -]*):(?!=)", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.M)
    return {target for rule in rules for target in rule.split()}


@named([p for p in LINKED if p not in RUN])
def test_commands_elsewhere_name_targets_and_options(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "console":
            for command in commands_of(block):
                run_command(command, dataclasses.replace(block, info=["console", "no-run"]))


# ------------------------------------------------------------------------------------------------ links


def prose_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors_of(page: Path) -> set[str]:
    """Anchors of headings, made as GitHub makes them."""
    anchors: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?)#*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        n = anchors[anchor] = anchors.get(anchor, -1) + 1
        if n:
            anchors[f"{anchor}-{n}"] = 0
    return set(anchors)


@named(LINKED)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(CHECKOUT):
            lost.append(f"{link}: no such file")
        elif anchor and anchor not in anchors_of(target):
            lost.append(f"{link}: no such heading; there are {', '.join(sorted(anchors_of(target)))}")
    assert not lost


def test_every_page_is_on_the_map() -> None:
    index = (CHECKOUT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (CHECKOUT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


# ----------------------------------------------------------------------------------------------- tables


def allowed(field: dict[str, Any]) -> str:
    """The range of a field of a JSON schema, in words."""
    if "anyOf" in field:
        return " or ".join(allowed(f) for f in field["anyOf"])
    if "$ref" in field:
        return f"see {field['$ref'].rpartition('/')[2]}"
    if "const" in field or "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    if kind == "array":
        low, high = field.get("minItems"), field.get("maxItems")
        return f"list of {low} to {high}" if high else "list"
    words = {"boolean": "`true`, `false`", "null": "`null`", "string": "text", "object": "mapping"}
    if kind in words:
        return words[kind]
    name = {"integer": "integer", "number": "number"}[kind]
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f"{name}, {low:,} to {high:,}"
    bounds = []
    if low is not None:
        bounds.append(f"at least {low:,}")
    if (above := field.get("exclusiveMinimum")) is not None:
        bounds.append(f"more than {above:,}")
    if high is not None:
        bounds.append(f"at most {high:,}")
    return ", ".join([name, *bounds])


def table_of(model: type[pydantic.BaseModel]) -> str:
    """The fields of a model as Markdown, to be pasted into the page that describes it."""
    schema = model.model_json_schema()
    rows = ["| name | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else f"`{json.dumps(field['default'])}`"
        if "$ref" in field:
            default = "its own defaults"
        rows.append(f"| `{name}` | {default} | {allowed(field)} | {field.get('description', '')} |")
    return "\n".join(rows)


def assert_holds(page: str, table: str) -> None:
    text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    assert table in text, f"docs/{page} must hold this table:\n\n{table}\n"


def sections_of(page: str) -> dict[str, str]:
    parts = re.split(r"^##+ +(.*)$", (CHECKOUT / "docs" / page).read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


BUILT_IN = sorted(name for name, r in registry().proposers.items() if r.provider == BUILTIN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_options_are_those_of_the_schema(name: str) -> None:
    table = table_of(options_model(registry().find(name).load()))
    assert table in sections_of("proposers.md")[name], f"section {name!r} must hold this table:\n\n{table}\n"


def test_methods_and_engines_are_those_of_the_table() -> None:
    cells, engines = support.matrix(), support.ENGINES.values()
    rows = [f"| method | {' | '.join(e.title for e in engines)} |", "|---" * (1 + len(engines)) + "|"]
    rows += [f"| `{method}` | {' | '.join(row.values())} |" for method, row in cells.items()]
    assert_holds("support.md", "\n".join(rows))
    assert_holds("support.md", "\n".join(f"| {e.title} | {e.seen} |" for e in engines))


MEASURE = re.compile(r"[\d.]+(?: to [\d.]+)? (?:µs|ms|bytes)")


@pytest.mark.parametrize("name", BUILT_IN)
def test_costs_are_those_of_the_docstring(name: str) -> None:
    said = inspect.getdoc(registry().find(name).load()) or ""
    # Tables are compared above.
    section = re.sub(r"^\|.*$", "", sections_of("proposers.md")[name], flags=re.M)
    shown = MEASURE.findall(" ".join(section.split()))
    claimed = MEASURE.findall(" ".join(said.split()))
    # A combination costs what its parts cost and claims no figure of its own.
    assert bool(shown) == bool(claimed) == (name != "combine")
    assert set(shown) <= set(claimed)


@pytest.mark.parametrize("model", [Config, Containment])
def test_fields_are_those_of_the_schema(model: type[pydantic.BaseModel]) -> None:
    assert_holds("configuration.md", table_of(model))


def test_options_of_sglangs_own_methods_are_those_of_the_schema() -> None:
    for model in (sglang_flags.NgramOptions, sglang_flags.EagleOptions):
        assert_holds("sglang.md", table_of(model))
    heads, own = set(sglang_flags.EagleOptions.model_fields), {"draft_sample_method", "token_map"}
    assert set(sglang_flags.DraftOptions.model_fields) == heads - own
    assert set(sglang_flags.MtpOptions.model_fields) == heads
    told = sections_of("sglang.md")["SGLang's own methods"]
    for method in sglang_flags.NATIVE:
        assert f"| `{method}` | `{support.ENGINES['sglang'].native[method].split()[1]}` |" in told


def test_options_of_tensorrt_llms_own_methods_are_those_of_the_schema() -> None:
    for model in (tensorrt_flags.NgramOptions, tensorrt_flags.EagleOptions):
        assert_holds("tensorrt_llm.md", table_of(model))
    built = sections_of("tensorrt_llm.md")["Compiled engines, up to 1.2"]
    for options in (compiled.EagleOptions, compiled.LookaheadOptions):
        assert table_of(options) in built
    assert set(compiled.MedusaOptions.model_fields) == {*compiled.EagleOptions.model_fields} - {
        "posterior_threshold"
    }
    for method, mode in compiled.MODES.items():
        assert f"| `{method}` | `{mode}` |" in built
    told = sections_of("tensorrt_llm.md")["TensorRT-LLM's own methods"]
    for method, types in tensorrt_flags._TYPES.items():
        assert f"| `{method}` | " + ", from 1.2 ".join(f"`{t}`" for t in dict.fromkeys(types)) in told


def test_sampling_parameters_are_those_of_the_schema() -> None:
    pytest.importorskip("transformers")
    from spec_plugins.adapters.transformers import SamplingParams

    assert_holds("embedded_engine.md", table_of(SamplingParams))


def first_column(section: str) -> list[str]:
    """Names in the first column of a section's tables."""
    return re.findall(r"^\| `([^`]+)` \|", section, re.M)


def test_every_fault_is_described() -> None:
    assert first_column(sections_of("driver.md")["Validation"]) == [fault.value for fault in Fault]


def test_every_figure_is_described() -> None:
    assert first_column(sections_of("driver.md")["Statistics"]) == list(Statistics(1).snapshot())


def test_metrics_are_those_of_the_code() -> None:
    rows = ["| metric | label | |", "|---|---|---|"]
    for table, end in ((COUNTERS, "_total"), (GAUGES, "")):
        for name, (label, text) in table.items():
            shown = f"`{label}`" if label else ""
            meaning = text[0].lower() + text[1:].rstrip(".")
            rows.append(f"| `{PREFIX}{name}{end}` | {shown} | {meaning} |")
    assert_holds("vllm.md", "\n".join(rows))


@pytest.mark.parametrize(
    ("section", "cls"),
    [("What a step holds", Step), ("What a draft is", Draft), ("What a target says", Target)],
)
def test_every_field_of_the_contract_is_described(section: str, cls: Any) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    assert first_column(sections_of("writing_a_proposer.md")[section]) == names


def test_every_need_is_described() -> None:
    names = first_column(sections_of("writing_a_proposer.md")["Needs and uses"])
    assert names == [need.value for need in Need]


def test_every_argument_of_the_driver_is_described() -> None:
    sections = sections_of("adding_an_engine.md")
    given, told = (first_column(sections[s]) for s in ("What the driver is given", "What it is told"))
    assert given == [*inspect.signature(Driver.propose).parameters][1:]
    assert told == [*inspect.signature(Driver.observe).parameters][1:]
