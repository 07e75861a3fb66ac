"""Configuration: one schema, every way of giving it, and errors that name field, value and fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest
from pydantic import Field

from spec_plugins import config as config_module
from spec_plugins.config import (
    Config,
    Containment,
    ProposerConfig,
    check_options,
    json_schema,
    load_config,
    options_model,
)
from spec_plugins.errors import ConfigError, UnavailableError, UnknownProposerError, UnsupportedError
from spec_plugins.proposer import Proposer, Step
from spec_plugins.registry import Registration, Registry

if TYPE_CHECKING:
    from nonesuch import Thing  # type: ignore[import-not-found]


class Options(Proposer):
    """Options of every kind."""

    def __init__(
        self,
        width: Annotated[int, Field(ge=1, le=9, description="How wide.")] = 2,
        *,
        ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
        mode: Literal["near", "far"] = "near",
        names: tuple[str, ...] = (),
        deep: bool = False,
    ) -> None:
        if deep and width > 5:
            raise ValueError(f"width {width} is more than 5, which deep does not allow; lower it")
        self.given = (width, ratio, mode, names, deep)

    def propose(self, step: Step) -> Any:
        return []


class Plain(Proposer):
    """No constructor."""

    def propose(self, step: Step) -> Any:
        return []


class Free(Plain):
    """Anything goes."""

    def __init__(self, size: int = 1, **more: Any) -> None:
        self.given = (size, more)


class Required(Plain):
    def __init__(self, path: str, *nothing: str) -> None:
        self.path = path


class Bare(Plain):
    """No annotations."""

    def __init__(self, size=1, copy=None):  # type: ignore[no-untyped-def]
        self.given = (size, copy)


class Hidden(Plain):
    """An annotation that only type checkers can resolve."""

    def __init__(self, thing: Thing = None, size: Annotated[int, Field(ge=1)] = 1) -> None:
        self.given = (thing, size)


class Refusing(Plain):
    def __init__(self) -> None:
        raise UnsupportedError("not on a Tuesday")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of this module's proposers, beside a name or two that cannot be had."""
    classes = {"options": Options, "plain": Plain, "free": Free, "required": Required}
    classes |= {"bare": Bare, "hidden": Hidden, "refusing": Refusing}
    found = Registry()
    for name, cls in classes.items():
        found.add(Registration(name, f"{__name__}:{cls.__name__}", "acme"))
    found.add(Registration("suffix", f"{__name__}:Options", "acme"))
    found.add(Registration("gone", "nonesuch_module:Gone", "acme"))
    monkeypatch.setattr(config_module, "registry", lambda: found)
    return found


# ---------------------------------------------------------------------------------------------------
# Every way of giving it

DATA: dict[str, Any] = {
    "proposer": "options",
    "options": {"width": 3, "mode": "far", "names": ["a", "b"]},
    "num_speculative_tokens": 5,
    "max_draft_nodes": 12,
    "policy": "fixed",
    "route": "plugin",
    "containment": {"max_faults": 7, "rest_seconds": 2.5},
}
YAML = """
proposer: options
options: {width: 3, mode: far, names: [a, b]}
num_speculative_tokens: 5
max_draft_nodes: 12
policy: fixed
route: plugin
containment:
  max_faults: 7
  rest_seconds: 2.5
"""
TOML = """
proposer = "options"
num_speculative_tokens = 5
max_draft_nodes = 12
policy = "fixed"
route = "plugin"
[options]
width = 3
mode = "far"
names = ["a", "b"]
[containment]
max_faults = 7
rest_seconds = 2.5
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", json.dumps(DATA)),
        ("c.yaml", YAML),
        ("c.yml", YAML),
        ("c.toml", TOML),
        ("C.JSON", json.dumps(DATA)),
    ],
)
def test_every_format_gives_the_same(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    expected = Config.model_validate(DATA)
    assert load_config(path) == load_config(str(path)) == expected
    assert load_config(DATA) == load_config(expected) == expected
    assert load_config(json.dumps(DATA)) == load_config("\n " + json.dumps(DATA)) == expected
    assert expected.containment == Containment(max_faults=7, rest_seconds=2.5)


def test_a_name_is_that_proposer_with_defaults() -> None:
    assert load_config("plain") == Config(proposer="plain")


def test_nothing_is_the_defaults() -> None:
    config = load_config()
    assert config == load_config({}) == load_config("{}") == Config()
    assert config.proposer == "suffix"
    registered = Registry.discover()
    assert config.draft_nodes(registered.create("ngram")) == config.num_speculative_tokens == 8
    assert config.draft_nodes(registered.create("lookahead")) == 24
    assert load_config({"max_draft_nodes": 12}).draft_nodes(registered.create("lookahead")) == 12


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.json").write_text(json.dumps(DATA))
    assert load_config("~/c.json").proposer == "options"


def test_overrides_replace_fields_and_none_leaves_them() -> None:
    config = load_config(DATA, num_speculative_tokens=2, max_draft_nodes=None, options={"width": 4})
    assert (config.num_speculative_tokens, config.max_draft_nodes) == (2, 12)
    assert config.options == {"width": 4}
    assert config.route == "plugin"
    assert load_config("plain", proposer="free", options={"size": 3}).options == {"size": 3}
    assert load_config(Config(num_speculative_tokens=3), route="native").num_speculative_tokens == 3
    assert DATA["num_speculative_tokens"] == 5


def test_a_configuration_is_frozen_and_makes_its_proposer(known: Registry) -> None:
    config = load_config(DATA)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.route = "auto"
    proposer = config.create_proposer()
    assert isinstance(proposer, known.find("options").load())
    assert proposer.name == "options"
    assert proposer.given == (3, 0.5, "far", ("a", "b"), False)  # type: ignore[attr-defined]
    part = ProposerConfig(name="free", options={"size": 2, "x": 1}).create()
    assert part.given == (2, {"x": 1})  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------
# Errors


def opts(name: str, **options: Any) -> dict[str, Any]:
    return {"proposer": name, "options": options}


ERRORS: list[tuple[Any, list[str]]] = [
    # unknown fields
    ({"propser": "plain"}, ["propser: unknown field; did you mean 'proposer'?", "Known: proposer, options"]),
    ({"zebra": 1}, ["zebra: unknown field. Known: proposer, options, num_speculative_tokens"]),
    (
        {"containment": {"max_fault": 3}},
        ["containment.max_fault: unknown field; did you mean 'max_faults'?", "Known: time_allowance_ms, "],
    ),
    (opts("options", widht=3), ["options.widht: unknown field; did you mean 'width'?", "Known: width, "]),
    (opts("plain", width=3), ["options.width: unknown field. Known: none"]),
    ({1: 2}, ["1", "keys should be strings"]),
    # out of range
    ({"num_speculative_tokens": 0}, ["num_speculative_tokens: 0 is out of range; set it to at least 1"]),
    ({"num_speculative_tokens": 257}, ["num_speculative_tokens: 257 is out of range; set it to at most 256"]),
    ({"max_draft_nodes": 0}, ["max_draft_nodes: 0 is out of range; set it to at least 1"]),
    ({"max_draft_nodes": 5000}, ["max_draft_nodes: 5000 is out of range; set it to at most 1024"]),
    ({"containment": {"max_faults": 0}}, ["containment.max_faults: 0 is out of range; set it to at least 1"]),
    (
        {"containment": {"time_allowance_ms": 0}},
        ["containment.time_allowance_ms: 0 is out of range; set it to more than 0"],
    ),
    ({"containment": {"rest_seconds": float("nan")}}, ["containment.rest_seconds: nan", "out of range"]),
    ({"containment": {"rest_seconds": float("inf")}}, ["containment.rest_seconds: inf", "at most 86400"]),
    (opts("options", width=10), ["options.width: 10 is out of range; set it to at most 9"]),
    (opts("options", ratio=1), ["options.ratio: 1 is out of range; set it to less than 1"]),
    (opts("hidden", size=0), ["options.size: 0 is out of range; set it to at least 1"]),
    # of the wrong type
    ({"num_speculative_tokens": "many"}, ["num_speculative_tokens: 'many' cannot be used", "valid integer"]),
    ({"num_speculative_tokens": "8"}, ["num_speculative_tokens: '8' cannot be used", "valid integer"]),
    ({"num_speculative_tokens": True}, ["num_speculative_tokens: True cannot be used", "valid integer"]),
    ({"num_speculative_tokens": 2.5}, ["num_speculative_tokens: 2.5 cannot be used", "valid integer"]),
    ({"num_speculative_tokens": None}, ["num_speculative_tokens: None cannot be used", "valid integer"]),
    ({"proposer": 7}, ["proposer: 7 cannot be used", "valid string"]),
    ({"options": ["width"]}, ["options: ['width'] cannot be used", "valid dictionary"]),
    ({"containment": 3}, ["containment: 3 cannot be used"]),
    (opts("options", width="wide"), ["options.width: 'wide' cannot be used", "valid integer"]),
    (opts("options", names="ab"), ["options.names: 'ab' cannot be used", "valid tuple"]),
    (opts("options", names=["a", 1]), ["options.names.1: 1 cannot be used", "valid string"]),
    # not one of those known
    ({"policy": "adaptive"}, ["policy: 'adaptive' is not known; set it to 'fixed'"]),
    ({"route": "fast"}, ["route: 'fast' is not known; set it to 'auto', 'native' or 'plugin'"]),
    (opts("options", mode="nar"), ["options.mode: 'nar' is not known; set it to 'near' or 'far'"]),
    # missing
    (opts("required"), ["options.path: missing; set it"]),
    # impossible together
    (
        {"num_speculative_tokens": 8, "max_draft_nodes": 4},
        ["max_draft_nodes 4 is less than num_speculative_tokens 8", "raise the first or lower the second"],
    ),
    (opts("options", width=7, deep=True), ["options of proposer 'options': width 7 is more than 5", "lower"]),
    # several at once
    (
        {"propser": 1, "route": "fast", "num_speculative_tokens": 0},
        ["propser: unknown", "route: 'fast'", "num_speculative_tokens: 0"],
    ),
    # not a configuration
    ("sufix", ["'sufix' is no configuration", "did you mean 'suffix'?", "`spec-plugins list`"]),
    ("", ["'' is no configuration: give JSON text"]),
    ("config.ini", ["'config.ini' is no configuration", ".json, .yaml or .toml"]),
    ("[1]", ["'[1]' is no configuration: give JSON text"]),
    ("nonesuch.json", ["cannot read the configuration 'nonesuch.json'", "No such file"]),
    ('{"proposer": }', ["the configuration is not valid JSON", "line 1"]),
    ("{" * 100_000, ["the configuration is not valid JSON"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "says"), ERRORS, ids=lambda x: str(x)[:60] if not isinstance(x, list) else ""
)
def test_an_error_names_field_value_and_fix(source: Any, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    for part in says:
        assert part in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_options_of_another_proposer_are_named() -> None:
    with pytest.raises(ConfigError, match=r"options\.width: unknown field\. Known: size, copy"):
        load_config(DATA, proposer="bare")


def test_a_bad_override_is_named_as_a_bad_field_is() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens: 0 is out of range"):
        load_config("plain", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="nonesuch: unknown field"):
        load_config("plain", nonesuch=1)


FILES = [
    ("c.json", b"{", "'{path}' is not valid JSON"),
    ("c.yaml", b"a: [", "'{path}' is not valid YAML"),
    ("c.toml", b"a = ", "'{path}' is not valid TOML"),
    ("c.json", b"[1]", "'{path}' must hold a mapping of fields, not list"),
    ("c.json", b"null", "'{path}' must hold a mapping of fields, not NoneType"),
    ("c.yaml", b"- 1", "'{path}' must hold a mapping of fields, not list"),
    ("c.yaml", b"", "'{path}' must hold a mapping of fields, not NoneType"),
    ("c.yaml", b"!!python/object/apply:os.getcwd []", "'{path}' is not valid YAML"),
    ("c.json", b"\xff\xfe{", "cannot read the configuration '{path}'"),
]


@pytest.mark.parametrize(("name", "content", "says"), FILES)
def test_a_bad_file_is_named(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(says.format(path=path))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "c.json"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(folder)


def test_yaml_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ConfigError, match=r"needs yaml: pip install 'spec-plugins\[yaml\]', or write it as JSON"
    ):
        load_config(path)


def test_a_proposer_that_cannot_be_had_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownProposerError, match="'optoins'; did you mean 'options'"):
        load_config({"proposer": "optoins"})
    with pytest.raises(UnavailableError, match=r"'gone'.*force-reinstall acme"):
        load_config("gone")
    with pytest.raises(UnsupportedError, match="Tuesday"):
        load_config("refusing")


# ---------------------------------------------------------------------------------------------------
# Options from constructors


def test_options_come_from_the_constructors_annotations() -> None:
    schema = options_model(Options).model_json_schema()
    assert list(schema["properties"]) == ["width", "ratio", "mode", "names", "deep"]
    width = schema["properties"]["width"]
    assert (width["minimum"], width["maximum"], width["default"]) == (1, 9, 2)
    assert width["description"] == "How wide."
    assert schema["properties"]["mode"]["enum"] == ["near", "far"]
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert options_model(Required).model_json_schema()["required"] == ["path"]
    assert options_model(Options) is options_model(Options)


def test_only_given_options_are_passed_and_they_are_converted() -> None:
    assert check_options(Options, {}, "options").given == (2, 0.5, "near", (), False)
    proposer = check_options(Options, {"names": ["a"], "ratio": 0.25}, "options")
    assert proposer.given == (2, 0.25, "near", ("a",), False)


def test_a_class_without_a_constructor_has_no_options() -> None:
    assert options_model(Plain).model_fields == {}
    assert isinstance(check_options(Plain, {}, "plain"), Plain)
    with pytest.raises(ConfigError, match="unknown field"):
        check_options(Plain, {"args": 1}, "plain")


def test_keyword_arguments_are_passed_on() -> None:
    assert check_options(Free, {"size": 2, "x": [1], "y": None}, "free").given == (2, {"x": [1], "y": None})


def test_options_without_annotations_are_taken_as_they_are() -> None:
    value = object()
    assert check_options(Bare, {"size": "big", "copy": value}, "bare").given == ("big", value)


def test_an_annotation_that_does_not_resolve_checks_nothing_and_the_others_do() -> None:
    assert check_options(Hidden, {"thing": [1], "size": 2}, "hidden").given == ([1], 2)
    with pytest.raises(ConfigError, match=r"options\.size"):
        check_options(Hidden, {"size": 0}, "hidden")


# ---------------------------------------------------------------------------------------------------
# The JSON schema


def test_the_schema_describes_every_field_and_the_options_of_every_proposer() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == set(Config.model_fields)
    assert all(
        "description" in schema["properties"][name] for name in Config.model_fields if name != "containment"
    )
    rules = {r["if"]["properties"]["proposer"]["const"]: r for r in schema["allOf"]}
    assert set(rules) == {"suffix", "options", "plain", "free", "required", "bare", "hidden", "refusing"}
    assert rules["options"]["then"]["properties"]["options"] == {"$ref": "#/$defs/options.options"}
    assert schema["$defs"]["options.options"]["properties"]["width"]["maximum"] == 9
    assert "gone" in schema["properties"]["proposer"]["examples"]


def test_proposers_of_the_same_class_name_keep_their_own_options(known: Registry, monkeypatch: Any) -> None:
    class Inner(pydantic.BaseModel):
        x: int = 1

    def make(kind: type) -> type[Proposer]:
        class Same(Plain):
            def __init__(self, inner: Any = None) -> None: ...

        Same.__init__.__annotations__["inner"] = kind
        return Same

    classes = {"one": make(Inner), "two": make(pydantic.create_model("Inner", y=(str, "")))}
    for name in classes:
        known.add(Registration(name, "m:C", "acme"))
    load = Registration.load
    monkeypatch.setattr(Registration, "load", lambda self: classes.get(self.name) or load(self))
    definitions = json_schema()["$defs"]
    assert definitions["one.options"]["properties"]["inner"]["$ref"] == "#/$defs/one.Inner"
    assert list(definitions["one.Inner"]["properties"]) == ["x"]
    assert list(definitions["two.Inner"]["properties"]) == ["y"]


def test_a_proposer_whose_options_no_schema_can_tell_is_left_out(known: Registry, monkeypatch: Any) -> None:
    class Odd(Plain):
        def __init__(self, thing: Any = None) -> None: ...

    class Thing:
        """Nothing that JSON could hold."""

    Odd.__init__.__annotations__["thing"] = Thing
    known.add(Registration("odd", "m:C", "acme"))
    load = Registration.load
    monkeypatch.setattr(Registration, "load", lambda self: Odd if self.name == "odd" else load(self))
    assert "odd.options" not in json_schema()["$defs"]


def test_the_schema_agrees_with_loading() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(DATA)
    assert validator.is_valid({})
    for source, _ in ERRORS:
        together = isinstance(source, dict) and (
            {"max_draft_nodes", "deep"} & {*source, *source.get("options", ())}
        )
        finite = "nan" not in str(source) and "inf" not in str(source)
        if isinstance(source, dict) and finite and not together and all(isinstance(k, str) for k in source):
            assert not validator.is_valid(source), source


# ---------------------------------------------------------------------------------------------------
# For an engine that implements methods itself


class HeadOptions(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    model: str


class OwnOptions(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    depth: Annotated[int, Field(ge=1)] = 3


OWN = {"head": HeadOptions, "options": OwnOptions}


@pytest.mark.parametrize("route", ["auto", "native"])
def test_the_engines_own_method_can_be_named(route: str) -> None:
    data = {"proposer": "head", "options": {"model": "x"}, "route": route, "num_speculative_tokens": 3}
    config = load_config(data, native=OWN)
    assert config.options == {"model": "x"}
    assert load_config(json.dumps(data), native=OWN) == load_config(config, native=OWN) == config
    with pytest.raises(UnknownProposerError, match="no proposer is registered as 'head'"):
        load_config(data)


def test_the_engines_own_method_can_be_a_bare_name() -> None:
    assert load_config("bare_head", native={"bare_head": OwnOptions}).proposer == "bare_head"
    with pytest.raises(ConfigError, match="did you mean 'bare_head'"):
        load_config("bare_heed", native={"bare_head": OwnOptions})
    with pytest.raises(ConfigError, match="is no configuration"):
        load_config("bare_head")


def test_the_route_says_whose_options_are_meant() -> None:
    mine, its = opts("options", width=3), opts("options", depth=2)
    assert load_config(mine, native=OWN) == load_config(mine)
    assert load_config(mine, native=OWN, route="plugin").options == {"width": 3}
    assert load_config(its, native=OWN, route="native").options == {"depth": 2}
    with pytest.raises(ConfigError, match=r"options\.depth: unknown field"):
        load_config(its, native=OWN)
    with pytest.raises(ConfigError, match=r"(?s)options\.width: unknown .*the engine's own 'options'"):
        load_config(mine, native=OWN, route="native")
    with pytest.raises(ConfigError, match=r"options\.depth: 0 is out of range; set it to at least 1"):
        load_config(opts("options", depth=0), native=OWN, route="native")


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ({"proposer": "heed"}, UnknownProposerError, ["did you mean 'head'?", "plain", "own: head, options"]),
        ({"proposer": "head"}, ConfigError, ["options.model: missing; set it"]),
        ({"proposer": "head", "options": {"model": 1}}, ConfigError, ["options.model: 1 cannot be used"]),
        (
            {"proposer": "head", "options": {"model": "x"}, "route": "plugin"},
            UnsupportedError,
            ["'head' is only the engine's own", "set route to 'native' or 'auto'"],
        ),
    ],
)
def test_an_engines_refusal_names_what_there_is(source: Any, error: type[Exception], says: list[str]) -> None:
    with pytest.raises(error) as refused:
        load_config(source, native=OWN)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_a_method_that_the_engine_has_not_is_checked_as_a_proposer() -> None:
    assert load_config(opts("plain"), native=OWN, route="native").proposer == "plain"
    with pytest.raises(ConfigError, match=r"options\.width: unknown field"):
        load_config(opts("plain", width=1), native=OWN, route="native")
