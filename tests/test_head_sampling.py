"""Tokens that heads draw keep the target's distribution, and are accepted more often than their likeliest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")
pytest.importorskip("scipy", reason="needs scipy: pip install 'spec-plugins[evaluate]'")

from draft_models import make_model  # noqa: E402
from sampled_drafts import agreement, settings  # noqa: E402
from tiny_heads import eagle_head, medusa_heads  # noqa: E402

from spec_plugins.proposer import Drafts, Need, Packed, Step, Target  # noqa: E402
from spec_plugins.registry import registry  # noqa: E402

VOCAB, WIDTH, N, PROMPT = 6, 16, 2000, [1, 2, 3, 4, 1]
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH}
EAGLE = {**SIZES, "intermediate_size": 24, "target_hidden_size": WIDTH}
METHODS = ("eagle3", "eagle", "medusa")


@pytest.fixture(scope="module")
def target() -> Any:
    return make_model(3, vocab=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, initializer_range=0.4)


def drafts_of(target: Any, folder: Path, method: str, temperature: float, **options: Any) -> Drafts:
    """Drafts for many requests that all have the same prompt."""
    if method == "medusa":
        medusa_heads(folder, draft_vocab=5, **SIZES)
    elif method == "eagle3":
        eagle_head(folder, draft_vocab=5, **EAGLE)
    else:
        eagle_head(folder, "eagle", draft_vocab_size=VOCAB, **EAGLE)
    proposer = registry().create(method, {"model": str(folder), **options})
    proposer.load(
        Target(
            vocab_size=VOCAB, max_model_len=64, max_num_seqs=N, provides=frozenset(Need), hidden_size=WIDTH,
            num_layers=2, num_speculative_tokens=2, embeddings=lambda: target.model.embed_tokens.weight,
            lm_head=lambda: target.lm_head.weight,
        )
    )  # fmt: skip
    with torch.no_grad():
        states = target(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states

    def packed(values: Any) -> Packed[Any]:
        offsets = np.arange(N + 1, dtype=np.int32) * (len(PROMPT) - 1)
        return Packed(values[0].float().repeat(N, 1), offsets)

    length, two = np.full(N, len(PROMPT), np.int32), np.full(N, 2, np.int32)
    step = Step(
        [str(i) for i in range(N)], np.tile(np.array(PROMPT, np.int32), (N, 1)), np.arange(N, dtype=np.int32),
        length, length, two, two, length, sampling=settings(N, (temperature, 0, 1.0, 0.0)),
        hidden_states=packed(states[-1]), aux_hidden_states=packed(torch.cat(states[:2], -1)),
    )  # fmt: skip
    return proposer.propose(step)  # type: ignore[return-value]


@pytest.mark.parametrize("method", METHODS)
def test_sampled_output_is_the_targets(target: Any, tmp_path: Path, method: str) -> None:
    drafts = drafts_of(target, tmp_path / "head", method, 0.8)
    assert agreement(target, PROMPT, drafts, 0.8) > 1e-4
    assert agreement(target, PROMPT, drafts, 0.8, lie=True) < 1e-6, "the control must be caught"
    assert len(np.unique(drafts.tokens[:, 0])) > 2, "they are drawn, and not the likeliest each time"


@pytest.mark.parametrize("method", METHODS)
def test_where_a_draft_ends_does_not_depend_on_the_token_that_was_drawn_there(
    target: Any, tmp_path: Path, method: str
) -> None:
    """Otherwise unlikely tokens would be missing from the output."""
    drafts = drafts_of(target, tmp_path / "head", method, 0.8, min_probability=0.12)
    ends = {
        int(t): set(drafts.counts[drafts.tokens[:, 0] == t].tolist()) for t in np.unique(drafts.tokens[:, 0])
    }
    assert len(ends) > 2
    # The second position goes by the first's token, the first by none: none is empty, or all are.
    assert all(0 not in found for found in ends.values())
    assert {n for found in ends.values() for n in found} == {1, 2}
    assert all(len(found) == 1 for found in ends.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("temperature", "options"), [(0.0, {}), (0.8, {"draft_sample_method": "greedy"})])
def test_the_likeliest_where_nothing_is_to_be_drawn(
    target: Any, tmp_path: Path, method: str, temperature: float, options: dict[str, Any]
) -> None:
    drafts = drafts_of(target, tmp_path / "head", method, temperature, **options)
    assert drafts.probs is None
    assert (drafts.tokens == drafts.tokens[0]).all()
