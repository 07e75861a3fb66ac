"""One configuration schema for every engine.

Given as JSON on an engine's flag, as a ``.json``, ``.yaml`` or ``.toml`` file, as a mapping, or as a bare
proposer name. A configuration names registered proposers, never an import path.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
import typing
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from spec_plugins.errors import ConfigError, SpecPluginsError, UnknownProposerError, UnsupportedError
from spec_plugins.proposer import Proposer
from spec_plugins.registry import registry, suggest

__all__ = [
    "Config",
    "Containment",
    "ProposerConfig",
    "check_native",
    "check_options",
    "json_schema",
    "load_config",
    "options_model",
    "read_config",
    "validated",
]

ProposerT = TypeVar("ProposerT", bound=Proposer)
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class ProposerConfig(BaseModel):
    """A proposer by name, with its options."""

    model_config = _STRICT
    name: Annotated[str, Field(description="Registered name; `spec-plugins list` shows them.")]
    options: Annotated[dict[str, Any], Field(description="The proposer's own options.")] = {}

    def create(self) -> Proposer:
        """Make the proposer; raises as :meth:`Registry.create` does."""
        return registry().create(self.name, self.options)


class Containment(BaseModel):
    """When a proposer is put to rest, and for how long."""

    model_config = _STRICT
    time_allowance_ms: Annotated[
        float, Field(gt=0, le=600_000, description="A step's drafting that takes longer is late: a fault.")
    ] = 250.0
    max_faults: Annotated[
        int, Field(ge=1, le=1000, description="Faulty steps in a row until the proposer rests.")
    ] = 3
    rest_seconds: Annotated[
        float, Field(gt=0, le=86_400, description="The first rest; doubles while the retry after it fails.")
    ] = 10.0
    longest_rest_seconds: Annotated[
        float, Field(gt=0, le=86_400, description="Where the doubling stops.")
    ] = 600.0


class Config(BaseModel):
    """What to draft with, and how much."""

    model_config = _STRICT
    proposer: Annotated[str, Field(description="Registered name; `spec-plugins list` shows them.")] = "suffix"
    options: Annotated[dict[str, Any], Field(description="The proposer's own options.")] = {}
    num_speculative_tokens: Annotated[
        int, Field(ge=1, le=256, description="The deepest draft position: the longest chain of draft tokens.")
    ] = 8
    max_draft_nodes: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="The most draft tokens of a request in one step over all branches of a tree, where "
            "the engine verifies trees. Default: the proposer's own, at least num_speculative_tokens.",
        ),
    ] = None
    policy: Annotated[
        Literal["fixed"], Field(description="How many tokens to draft: `fixed` asks for the most every time.")
    ] = "fixed"
    route: Annotated[
        Literal["auto", "native", "plugin"],
        Field(
            description="The engine's own implementation of a method, or this project's inside the engine."
        ),
    ] = "auto"
    containment: Containment = Containment()

    @pydantic.model_validator(mode="after")
    def _nodes_hold_a_chain(self) -> Config:
        if self.max_draft_nodes is not None and self.max_draft_nodes < self.num_speculative_tokens:
            raise ValueError(
                f"max_draft_nodes {self.max_draft_nodes} is less than num_speculative_tokens "
                f"{self.num_speculative_tokens}: a chain would not fit; raise the first or lower the second"
            )
        return self

    def draft_nodes(self, proposer: Proposer) -> int:
        """:attr:`max_draft_nodes`, or what the proposer suggests, but no less than the longest chain."""
        return self.max_draft_nodes or max(self.num_speculative_tokens, min(1024, proposer.draft_nodes))

    def create_proposer(self) -> Proposer:
        """Make the proposer; raises as :meth:`Registry.create` does."""
        return registry().create(self.proposer, self.options)


def load_config(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    native: Mapping[str, type[BaseModel]] | None = None,
    **overrides: Any,
) -> Config:
    """Read a configuration and check it, options included.

    Args:
        source: a configuration, a mapping, JSON text, the path of a JSON, YAML or TOML file, a proposer's
            name, or ``None`` for the defaults.
        native: for an engine: the methods that it implements itself, with the schemas of their options.
        overrides: fields that replace the source's; ``None`` leaves a field alone.

    Raises:
        ConfigError: names the field, the value and the fix.
        UnknownProposerError, UnavailableError: the proposer cannot be had.
        UnsupportedError: the plugin route is asked for, and only the engine itself has the method.
    """
    data = read_config(source, native or ())
    data.update({k: v for k, v in overrides.items() if v is not None})
    config = validated(Config, data)
    if not (native and _is_native(config, native)):
        check_options(registry().find(config.proposer).load(), config.options, config.proposer)
    return config


def _is_native(config: Config, native: Mapping[str, type[BaseModel]]) -> bool:
    """Whether the engine's own method is meant; then its options are checked too."""
    name, known = config.proposer, registry().proposers
    if name not in known and name not in native:
        raise UnknownProposerError(
            f"{name!r} is neither a registered proposer nor the engine's own method"
            f"{suggest(name, [*known, *native])} Registered: {', '.join(sorted(known))}. The engine's own: "
            f"{', '.join(sorted(native))}"
        )
    if name not in native or (name in known and config.route != "native"):
        return False
    if config.route == "plugin":
        raise UnsupportedError(
            f"route: 'plugin' needs a registered proposer, and {name!r} is only the engine's own; set route "
            f"to 'native' or 'auto', or proposer to one of {', '.join(sorted(known))}"
        )
    check_native(name, config.options, native[name])
    return True


def check_native(name: str, options: Mapping[str, Any], model: type[ModelT]) -> ModelT:
    """Check options against the schema of an engine's own method.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    try:
        return validated(model, options, "options")
    except ConfigError as error:
        if name not in registry().proposers:
            raise
        # A proposer of the same name may have that very option.
        raise ConfigError(
            f"{error}\nThese are the options of the engine's own {name!r}; for those of the proposer "
            f"{name!r}, set route to 'plugin'"
        ) from None


def read_config(
    source: Config | Mapping[str, Any] | str | Path | None = None, names: Collection[str] = ()
) -> dict[str, Any]:
    """The fields that a source sets, unchecked; takes what :func:`load_config` takes.

    Args:
        source: as there.
        names: what may be given as a bare name beside a registered proposer.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(source, Config):
        return source.model_dump(exclude_unset=True)
    if isinstance(source, Mapping):
        return dict(source)
    return {} if source is None else _read(source, names)


def _read(source: str | Path, names: Collection[str]) -> dict[str, Any]:
    text = str(source)
    if text.lstrip().startswith("{"):
        return _parse(text, "json", "the configuration")
    known = sorted({*registry().proposers, *names})
    if text in known:
        return {"proposer": text}
    path = Path(text).expanduser()
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("json", "yaml", "yml", "toml"):
        raise ConfigError(
            f"{text!r} is no configuration: give JSON text, the path of a .json, .yaml or .toml file, or a "
            f"proposer's name{suggest(text, known)} `spec-plugins list` shows the names."
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {text!r}: {error}") from error
    return _parse(content, kind, repr(text))


def _parse(content: str, kind: str, where: str) -> dict[str, Any]:
    data: object
    try:
        if kind == "json":
            data = json.loads(content)
        elif kind == "toml":
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib
            data = tomllib.loads(content)
        else:
            import yaml

            data = yaml.safe_load(content)
    except ModuleNotFoundError as error:
        fix = "pip install 'spec-plugins[yaml]'" if error.name == "yaml" else f"pip install {error.name}"
        raise ConfigError(f"reading {where} needs {error.name}: {fix}, or write it as JSON") from error
    except Exception as error:  # each parser has its own error
        raise ConfigError(f"{where} is not valid {kind.upper()}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold a mapping of fields, not {type(data).__name__}")
    return data


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model: type[ModelT], data: Mapping[str, Any], prefix: str = "") -> ModelT:
    """Check data against a schema; raises :class:`ConfigError`, a line for each fault."""
    try:
        return model.model_validate(dict(data))
    except pydantic.ValidationError as error:
        lines = [_explain(dict(item), model, prefix) for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _explain(item: dict[str, Any], model: type[BaseModel], prefix: str) -> str:
    """One sentence: field, value, fix."""
    path = ".".join([prefix, *(str(part) for part in item["loc"])]).strip(".")
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields_at(model, item["loc"][:-1])
        return (
            f"{path}: unknown field{suggest(str(item['loc'][-1]), known)} Known: {', '.join(known) or 'none'}"
        )
    if kind == "value_error":
        return f"{path}: {context['error']}".lstrip(": ")
    if kind == "missing":
        return f"{path}: missing; set it"
    bound = {
        "greater_than_equal": "ge",
        "less_than_equal": "le",
        "greater_than": "gt",
        "less_than": "lt",
    }.get(kind)
    if bound:
        word = {"ge": "at least", "le": "at most", "gt": "more than", "lt": "less than"}[bound]
        limit = context[bound]
        limit = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        return f"{path}: {item['input']!r} is out of range; set it to {word} {limit}"
    if kind == "literal_error":
        return f"{path}: {item['input']!r} is not known; set it to {context['expected']}"
    return f"{path}: {item['input']!r} cannot be used; {item['msg'][0].lower()}{item['msg'][1:]}"


def _fields_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        known = model.model_fields.get(str(part))
        annotation = known.annotation if known else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


@functools.cache
def options_model(cls: type[Proposer]) -> type[BaseModel]:
    """A schema made from the keyword arguments of a proposer's constructor and their annotations."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    fields: dict[str, Any] = {
        p.name: (_hint(cls, p), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    # A bare object.__init__ shows *args and **kwargs, yet takes nothing.
    free = cls.__init__ is not object.__init__ and any(p.kind is p.VAR_KEYWORD for p in parameters)
    config = ConfigDict(
        extra="allow" if free else "forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )
    with warnings.catch_warnings():  # an option may be called like a method of pydantic's, "copy" say
        warnings.simplefilter("ignore", UserWarning)
        return pydantic.create_model(f"{cls.__name__}Options", __config__=config, **fields)


def _hint(cls: type[Proposer], parameter: inspect.Parameter) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    scope = getattr(cls.__init__, "__globals__", {})
    try:
        return (
            Any
            if parameter.annotation is parameter.empty
            else (typing.get_type_hints(holder, scope, include_extras=True)["it"])
        )
    except Exception:  # imported for type checkers only, say; then the constructor alone checks
        return Any


def check_options(cls: type[ProposerT], options: Mapping[str, Any], name: str) -> ProposerT:
    """Make a proposer from checked options.

    Raises:
        ConfigError: an option is unknown, out of range, or does not go with another.
    """
    checked = validated(options_model(cls), options, "options")
    arguments = {field: getattr(checked, field) for field in checked.model_fields_set}
    try:
        return cls(**arguments)
    except SpecPluginsError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"options of proposer {name!r}: {error}") from error


def json_schema() -> dict[str, Any]:
    """JSON schema of :class:`Config`, with the options of every proposer that can be imported."""
    schema = Config.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    rules = []
    for name, registration in sorted(registry().proposers.items()):
        try:
            model = options_model(registration.load())
            options = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        except (ImportError, pydantic.errors.PydanticInvalidForJsonSchema):
            continue
        # Names of models are unique within a proposer only.
        inner = options.pop("$defs", {})
        definitions.update({f"{name}.{key}": value for key, value in inner.items()})
        definitions[f"{name}.options"] = options
        chosen: dict[str, Any] = {"properties": {"proposer": {"const": name}}}
        if name != Config.model_fields["proposer"].default:
            chosen["required"] = ["proposer"]
        rules.append(
            {
                "if": chosen,
                "then": {"properties": {"options": {"$ref": f"#/$defs/{name}.options"}}},
            }
        )
    schema["allOf"] = rules
    schema["properties"]["proposer"]["examples"] = sorted(registry().proposers)
    return schema
