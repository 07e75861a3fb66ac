"""TensorRT-LLM's own server, started with an object in its arguments: the launcher of `spec-plugins serve`.

    python -m spec_plugins.adapters.tensorrt_llm.server MODEL --spec CONFIG [--port N] [--NAME VALUE ...]

Every other ``--NAME VALUE`` is an argument of TensorRT-LLM's ``LLM``, its value read as YAML;
``--extra_llm_api_options FILE`` names a YAML file of more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_plugins.adapters.tensorrt_llm.drafter import engine_part
from spec_plugins.adapters.tensorrt_llm.flags import RESERVED, option
from spec_plugins.adapters.tensorrt_llm.hooks import LAUNCH_SERVER
from spec_plugins.adapters.tensorrt_llm.speculation import speculative_config
from spec_plugins.errors import ConfigError, SpecPluginsError, UnsupportedError
from spec_plugins.launch import resolve

__all__ = ["main", "server_arguments"]

_FILES = ("extra_llm_api_options", "config")
_APART: dict[str, Any] = {
    "pipeline_parallel_size": 1, "context_parallel_size": 1, "enable_attention_dp": False
}  # fmt: skip
"""Arguments under which ranks do not do the same side by side, and their values without."""


def server_arguments(words: Sequence[str]) -> tuple[str, int, dict[str, Any], str]:
    """Host, port, arguments of ``LLM`` and what drafts, from the command line.

    Raises:
        ConfigError: an argument cannot be used.
        UnsupportedError: a proposer of this project on ranks that do not share their drafts.
    """
    if not words or words[0].startswith("-"):
        raise ConfigError("the first argument is the model")
    model, given = words[0], _options(words[1:])
    spec = given.pop("spec", None)
    if spec is None:
        raise ConfigError("--spec: missing; say what drafts")
    host, port = given.pop("host", "localhost"), given.pop("port", "8000")
    if not port.isdigit():
        raise ConfigError(f"--port: {port!r} is no port; set it to a number such as 8000")
    llm: dict[str, Any] = {}
    for name in _FILES:
        if name in given:
            llm |= _file(given.pop(name))
    llm |= {name: _yaml(text, f"--{name}") for name, text in given.items()}
    for name, by in RESERVED.items():
        if name in llm:
            raise ConfigError(f"{name}: {by} already says it here; leave it out")
    parallel = [f"{name} {llm[name]}" for name, none in _APART.items() if llm.get(name, none) != none]
    if parallel and resolve("tensorrt-llm", spec).route == "plugin":
        raise UnsupportedError(
            f"{' and '.join(parallel)}: a proposer of this project drafts for ranks that are asked about the "
            "same requests in the same step, which is tensor parallelism alone. Leave it out, or take a "
            "method of TensorRT-LLM's own with route: native"
        )
    return host, int(port), {"model": model, "backend": "pytorch", **llm}, spec


def main(words: Sequence[str] | None = None) -> None:
    """Serve; ends with the server."""
    try:
        host, port, llm, spec = server_arguments(sys.argv[1:] if words is None else words)
        launch = engine_part(LAUNCH_SERVER)
        llm["speculative_config"] = speculative_config(
            spec, llm["model"], max_seq_len=llm.get("max_seq_len"), max_batch_size=llm.get("max_batch_size"),
            tensor_parallel_size=llm.get("tensor_parallel_size", 1),
        )  # fmt: skip
    except SpecPluginsError as error:
        sys.exit(f"Error: {error}")
    launch(host, port, llm)


def _options(words: Sequence[str]) -> dict[str, str]:
    """Names and values; a name alone is true."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, joined, value = option(word), *word.partition("=")[1:]
        if not name:
            raise ConfigError(f"{word!r} is no option; give arguments of TensorRT-LLM's LLM as --NAME VALUE")
        if not joined:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[name] = value
    return found


def _file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--extra_llm_api_options: {path!r} cannot be read: {error}") from error
    found = _yaml(text, path)
    if not isinstance(found, dict):
        raise ConfigError(f"--extra_llm_api_options: {path!r} must hold a mapping of arguments of LLM")
    return found


def _yaml(text: str, where: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {where} needs yaml: pip install 'spec-plugins[yaml]'") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is not valid YAML: {error}") from error


if __name__ == "__main__":
    main()
