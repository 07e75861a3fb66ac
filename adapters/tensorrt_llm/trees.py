"""Sizes of what TensorRT-LLM's compiled engines draft: trees of choices, and lookahead's windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spec_plugins.errors import ConfigError
from spec_plugins.trees import sparse_tree

__all__ = [
    "Choices", "best_choices", "chain", "check_choices", "depth_of", "lookahead_draft_len", "non_leaves_of",
]  # fmt: skip

Choices = Sequence[Sequence[int]]
"""A tree: for each node the ranks on the way to it, ``[0, 2]`` the third guess after the first one."""


def chain(length: int) -> list[list[int]]:
    """The tree that is no tree: each position's first guess."""
    return [[0] * n for n in range(1, length + 1)]


def best_choices(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The tree of so many nodes that is accepted furthest, as :func:`spec_plugins.trees.sparse_tree` finds
    it; fewer where there are no more. By depth, then by ranks, as TensorRT-LLM's own trees are."""
    paths: list[list[int]] = []
    parents, _, ranks = sparse_tree(accuracies, nodes)
    for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), rank])
    return sorted(paths, key=lambda path: (len(path), path))


def check_choices(choices: Choices, vocab_size: int, *, gaps: bool) -> None:
    """Check that choices are a tree that TensorRT-LLM can be given.

    Args:
        choices: of any order.
        vocab_size: ranks are below it.
        gaps: whether a node may have a third guess without a second. Medusa chooses by rank; EAGLE expands
            as many as a node has.

    Raises:
        ConfigError: names the path that is wrong.
    """
    paths = {tuple(path) for path in choices}
    if not paths or () in paths:
        raise ConfigError(
            "options.choices: must hold paths, each of at least one rank, such as [[0], [0, 0]]"
        )
    if len(paths) < len(choices):
        [(twice, _)] = Counter(map(tuple, choices)).most_common(1)
        raise ConfigError(f"options.choices: {list(twice)} is there twice; leave one out")
    for path in sorted(paths):
        if not 0 <= path[-1] < vocab_size:
            raise ConfigError(
                f"options.choices: {list(path)} ends in rank {path[-1]}; ranks go from 0, the likeliest, to "
                f"{vocab_size - 1}"
            )
        if len(path) > 1 and path[:-1] not in paths:
            raise ConfigError(
                f"options.choices: {list(path)} is there without {list(path[:-1])}, which it continues; add "
                "that"
            )
        before = (*path[:-1], path[-1] - 1)
        if not gaps and path[-1] and before not in paths:
            raise ConfigError(
                f"options.choices: {list(path)} is there without the likelier {list(before)}; EAGLE takes a "
                "node's likeliest guesses, as many as it has here, so leave no rank out"
            )


def depth_of(choices: Choices) -> int:
    """The longest path."""
    return max(map(len, choices))


def non_leaves_of(choices: Choices) -> int:
    """The most nodes of one level that have children; the last committed token is a level of its own."""
    parents = {tuple(path[:-1]) for path in choices}
    return max(Counter(map(len, parents)).values())


def lookahead_draft_len(window: int, ngram: int, verification_set: int) -> int:
    """How many draft tokens a step of lookahead (arXiv 2402.02057) takes at most, as TensorRT-LLM counts."""
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification_set) * (ngram - 1)
