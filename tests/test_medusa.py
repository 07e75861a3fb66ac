"""Medusa heads draft what their weights say, in chains and in sparse trees."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from test_eagle import PARAMS, PATIENT, PROMPTS, run  # noqa: E402
from tiny_heads import medusa_heads  # noqa: E402

from spec_plugins.adapters.transformers import Engine  # noqa: E402
from spec_plugins.adapters.transformers.target_model import load_model  # noqa: E402
from spec_plugins.registry import registry  # noqa: E402
from spec_plugins.trees import sparse_tree  # noqa: E402

ACCURACIES = ((0.6, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.05))


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_model(str(tiny_model_dir), dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    return [c.token_ids for c in Engine(*model, max_num_seqs=3).generate(PROMPTS, PARAMS)]


@torch.no_grad()
def guesses(model: Any, heads: Any, tokens: list[int], ranks: int) -> list[list[int]]:
    """For each head its best guesses after ``tokens``, worked out from the model's own forward pass."""
    state = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
    drafted = torch.arange(heads.config.draft_vocab_size)
    found = []
    for j, block in enumerate(heads.blocks):
        lm_head = {"own": lambda j=j: heads.lm_heads[j].weight, "shared": lambda: heads.lm_head.weight}.get(
            heads.config.lm_head, lambda: model.lm_head.weight[heads.target_ids(drafted)]
        )()
        found.append(heads.target_ids((lm_head @ block(state)).topk(ranks).indices).tolist())
    return found


@pytest.mark.parametrize(
    "fields",
    [{}, {"draft_vocab": 128, "bias": False}, {"lm_head": "own", "num_layers": 2}, {"lm_head": "shared"}],
)
def test_chains_are_each_heads_likeliest_token(
    model: Any, plain: list[list[int]], tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = medusa_heads(tmp_path / "heads", **fields)
    watched, answers, proposer = run(model, "medusa", {"model": str(folder)}, num_speculative_tokens=5)
    assert answers == plain
    for tokens, draft, budget in watched.seen:
        best = [g[0] for g in guesses(model[0], proposer._heads, tokens, 1)]
        assert draft.tokens.tolist() == best[: min(budget, 3)]
    assert sum(len(draft) for _, draft, _ in watched.seen) > 100


def test_trees_are_products_of_the_heads_guesses(model: Any, plain: list[list[int]], tmp_path: Path) -> None:
    folder = medusa_heads(tmp_path / "heads", accuracies=ACCURACIES)
    options = {"model": str(folder), "tree": True}
    watched, answers, proposer = run(model, "medusa", options, num_speculative_tokens=3, max_draft_nodes=9)
    assert answers == plain
    shape = sparse_tree(list(ACCURACIES), 9)
    for tokens, draft, budget in watched.seen:
        if budget == 3:
            best = guesses(model[0], proposer._heads, tokens, 3)
            assert draft.parents.tolist() == shape[0].tolist()
            assert draft.tokens.tolist() == [best[h][r] for h, r in zip(*shape[1:], strict=True)]


def test_trees_of_requests_that_end_soon_are_whole_in_themselves(
    model: Any, plain: list[list[int]], tmp_path: Path
) -> None:
    """Where no request goes as deep as the tree, what is left must hold together: one at a time, each ends
    with such steps."""
    folder = medusa_heads(tmp_path / "heads")
    proposer = registry().create("medusa", {"model": str(folder), "tree": True})
    spec = {"num_speculative_tokens": 3, "max_draft_nodes": 24, "containment": PATIENT}
    engine = Engine(*model, spec, proposer=proposer, max_num_seqs=1)
    assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] == plain
    assert engine.driver is not None
    assert not engine.driver.statistics.faults


def test_the_sparse_tree_is_the_best_of_its_size() -> None:
    parents, heads, ranks = sparse_tree(list(ACCURACIES), 9)
    value = {-1: 1.0}
    paths = set()
    for node, (parent, head, rank) in enumerate(zip(parents, heads, ranks, strict=True)):
        assert parent < node
        value[node] = value[parent] * ACCURACIES[head][rank]
        paths.add((value[parent], int(head), int(rank)))
    every = [
        float(np.prod([ACCURACIES[h][r] for h, r in enumerate(path)]))
        for depth in (1, 2, 3)
        for path in itertools.product(range(3), repeat=depth)
    ]
    mine = sorted((v for node, v in value.items() if node >= 0), reverse=True)
    assert mine == pytest.approx(sorted(every, reverse=True)[:9])
    assert len(sparse_tree([(0.5, 0.2)], 9)[0]) == 2
