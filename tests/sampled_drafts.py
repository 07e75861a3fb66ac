"""Whether what is committed of drawn drafts is distributed as the target model has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats

from spec_plugins.proposer import Drafts, Sampling
from spec_plugins.verification import target_probs, verify_sampled

__all__ = ["agreement", "settings"]


def settings(n: int, *kinds: tuple[float, int, float, float]) -> Sampling:
    """Temperature, top-k, top-p and min-p of ``n`` requests, in turn."""
    return Sampling.of([kinds[i % len(kinds)] for i in range(n)])


def agreement(
    target: Any, prompt: list[int], drafts: Drafts, temperature: float, *, lie: bool = False
) -> float:
    """p of the first two tokens that many requests commit, against the target's exact distributions.

    Args:
        target: a model of a few tokens.
        prompt: of every request.
        drafts: for each of them a chain of two, with probs.
        temperature: of every request.
        lie: claim another distribution than the tokens were drawn from: the control, which must be caught.
    """
    n, kind = len(drafts), (temperature, 0, 1.0, 0.0)
    probs = list(drafts.probs or ())
    assert len(probs) == n
    assert all(p is not None and len(p) == 2 for p in probs)
    vocab = probs[0].shape[1]  # type: ignore[union-attr]
    if lie:
        probs = [torch.full_like(p, 1 / vocab) for p in probs]  # type: ignore[arg-type]
    with torch.inference_mode():
        every = torch.tensor([[*prompt, t] for t in range(vocab)])
        exact = target_probs(target(every).logits[:, -2:], settings(vocab, kind)).double().numpy()
        fed = torch.tensor([[*prompt, *row] for row in drafts.tokens[:, :2].tolist()])
        logits = target(fed).logits[:, len(prompt) - 1 :]
    torch.manual_seed(0)  # as a user seeds an engine
    said = Drafts(drafts.tokens, drafts.counts, None, probs)
    committed = verify_sampled(target_probs(logits, settings(n, kind)), said, [None] * n).tokens
    first, second = committed[:, 0], committed[:, 1]
    values = [_p(first, exact[0, 0])]
    # Whatever the first was, the second is as the target has it after that one. A token that cannot be
    # drafted has no second in the same step.
    after = [(t, second[(first == t) & (second >= 0)]) for t in range(vocab)]
    values += [_p(seen, exact[t, 1]) for t, seen in after if len(seen)]
    return float(stats.combine_pvalues(values).pvalue)


def _p(seen: Any, exact: Any) -> float:
    counts = np.bincount(seen, minlength=len(exact))
    return float(stats.chisquare(counts, exact / exact.sum() * len(seen)).pvalue)
