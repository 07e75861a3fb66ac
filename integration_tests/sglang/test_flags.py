"""The flags that the adapter writes, against the installed SGLang's own parser."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from engine_settings import ENGINE

server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang: make environment-sglang")

from spec_plugins.adapters.sglang import flags as sglang_flags  # noqa: E402
from spec_plugins.launch import flags_of, installed_version, prepare  # noqa: E402

# Every option, with a value that is not SGLang's default.
NGRAM = {
    "prefer": "most_frequent", "min_breadth": 2, "max_breadth": 4, "max_tree_depth": 20, "capacity": 1000,
    "corpus": "corpus.jsonl", "corpus_nodes": 3, "corpus_max_tokens": 99,
}  # fmt: skip
DRAFT = {"model": "DRAFT", "revision": "main", "quantization": "fp8", "load_format": "dummy", "topk": 1}
HEADS = {**DRAFT, "draft_sample_method": "probabilistic", "token_map": "map.pt"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "draft_model": DRAFT,
    **dict.fromkeys(("eagle", "eagle3", "mtp"), HEADS),
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """As SGLang's server makes it."""
    made = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(made)
    return made


def changed(parser: argparse.ArgumentParser, source: Any) -> dict[str, Any]:
    """What a configuration's flags set."""
    told = vars(parser.parse_args(["--model-path", "M", *prepare("sglang", source).flags]))
    default = vars(parser.parse_args(["--model-path", "M"]))
    return {name.removeprefix("speculative_"): v for name, v in told.items() if v != default[name]}


def test_the_version_is_sglangs() -> None:
    assert installed_version("sglang") == metadata.version("sglang")


@pytest.mark.parametrize("method", sglang_flags.NATIVE)
def test_sglang_takes_the_flags_of_the_examples(parser: argparse.ArgumentParser, method: str) -> None:
    found = changed(parser, {"proposer": method, "route": "native", **sglang_flags.EXAMPLES[method]})
    draft = sglang_flags.EXAMPLES[method].get("options", {})
    depth = sglang_flags.EXAMPLES[method]["num_speculative_tokens"]
    assert found == {
        "algorithm": sglang_flags._METHODS[method][0],
        "num_draft_tokens": depth + 1,
        **({"num_steps": depth, "eagle_topk": 1} if method != "ngram" else {}),
        **({"draft_model_path": draft["model"]} if draft else {}),
    }


@pytest.mark.parametrize("method", sglang_flags.NATIVE)
def test_sglang_takes_every_option(parser: argparse.ArgumentParser, method: str) -> None:
    options = OPTIONS[method]
    assert set(options) == set(sglang_flags.NATIVE[method].model_fields)
    found = changed(
        parser, {"proposer": method, "route": "native", "num_speculative_tokens": 3, "options": options}
    )
    # Each changes one thing, beside the algorithm and the sizes.
    assert len(found) == len(options) + (2 if method == "ngram" else 3)


def test_what_is_left_out_is_sglangs_default(parser: argparse.ArgumentParser) -> None:
    default = parser.parse_args(["--model-path", "M"])
    shown = {
        "min_breadth": default.speculative_ngram_min_bfs_breadth,
        "max_breadth": default.speculative_ngram_max_bfs_breadth,
        "max_tree_depth": default.speculative_ngram_max_trie_depth,
        "capacity": default.speculative_ngram_capacity,
        "corpus_nodes": default.speculative_ngram_external_sam_budget,
        "corpus_max_tokens": default.speculative_ngram_external_corpus_max_tokens,
    }
    for name, value in shown.items():
        said = sglang_flags.NgramOptions.model_fields[name].description or ""
        assert said.endswith(f"SGLang's default: {value:,}.")
    assert (shown["min_breadth"], shown["max_breadth"]) == sglang_flags._BREADTH
    assert default.speculative_ngram_match_type == "BFS"
    assert default.speculative_use_rejection_sampling is False


TREE = {"num_speculative_tokens": 3, "max_draft_nodes": 7, "options": {"model": "HEAD", "topk": 4}}


@pytest.mark.parametrize(
    ("method", "fields", "sizes"),
    [
        ("ngram", sglang_flags.EXAMPLES["ngram"], (10, 12)),
        *(
            (method, sglang_flags.EXAMPLES[method], (1, 4))
            for method in sglang_flags.NATIVE
            if method != "ngram"
        ),
        ("eagle", TREE, (4, 8)),
    ],
)
def test_sglang_settles_on_what_was_written(
    parser: argparse.ArgumentParser,
    tiny_model: Path,
    method: str,
    fields: dict[str, Any],
    sizes: tuple[int, int],
) -> None:
    """It loads no weights for that, so that any model does."""
    from sglang.srt.arg_groups.overrides import resolved_view

    options = {k: str(tiny_model) if k == "model" else v for k, v in fields.get("options", {}).items()}
    source = {"proposer": method, "route": "native", **fields, "options": options}
    told = parser.parse_args(["--model-path", str(tiny_model), *prepare("sglang", source).flags])
    vars(told).update(ENGINE)
    settled = server_args.ServerArgs.from_cli_args(told)
    settled.resolve_once()
    found = resolved_view(settled)
    assert (found.speculative_eagle_topk, found.speculative_num_draft_tokens) == sizes
    if method != "ngram":
        assert found.speculative_num_steps == 3


def test_a_proposer_is_named_and_sized(parser: argparse.ArgumentParser) -> None:
    found = changed(parser, {"proposer": "suffix", "num_speculative_tokens": 4, "max_draft_nodes": 9})
    assert found == {"algorithm": "SPEC_SUFFIX", "num_steps": 4, "num_draft_tokens": 10}
    assert changed(parser, "suffix") == {"algorithm": "SPEC_SUFFIX"}


@pytest.mark.parametrize("method", sglang_flags.NATIVE)
def test_what_is_refused_is_what_would_replace_a_flag(parser: argparse.ArgumentParser, method: str) -> None:
    source = {"proposer": method, "route": "native", "options": OPTIONS[method]}
    written = [word for word in prepare("sglang", source).flags if word.startswith("--")]
    ours = {id(parser._option_string_actions[word]) for word in [*written, "--model-path"]}
    for name, action in parser._option_string_actions.items():
        try:
            flags_of("sglang").command("M", written, [name])
        except sglang_flags.ConfigError:
            assert id(action) in ours, name
        else:
            assert id(action) not in ours, name
