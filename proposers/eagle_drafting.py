"""Drafting with an EAGLE head: chains, greedy or drawn, and dynamic trees (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spec_plugins.heads.eagle_runner import EagleRunner
from spec_plugins.proposer import Drafts, IntArray, Sampling
from spec_plugins.verification import draw, target_probs

__all__ = ["Start", "draft_chains", "draft_trees"]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where ``n`` requests stand when drafting begins."""

    rows: Sequence[int]
    """Their rows of the cache."""
    entries: torch.Tensor
    """``[n]`` int64: entries of true features in each row; drafted ones go behind."""
    longest: int
    """The most of them."""
    positions: torch.Tensor
    """``[n]`` int64: of the last committed token, which the head has not taken for a feature yet."""
    features: torch.Tensor
    """``[n, hidden]``: what follows the last true position."""
    heard: torch.Tensor
    """``[n, hidden]``: what the LM head takes there."""


def draft_chains(
    runner: EagleRunner,
    start: Start,
    most: IntArray,
    sampling: Sampling | None,
    generator: torch.Generator,
    min_probability: float,
) -> Drafts:
    """Chains of up to ``most`` tokens, ``[n]``; one pass of the head for each position but the first.

    Requests that sample get tokens drawn from the head's distribution under their settings, and ``probs``;
    ``sampling`` ``None``: all are greedy. A chain ends before the first position where the product of the
    probabilities so far and of the likeliest token there is below ``min_probability``.
    """
    n, depth = len(start.rows), int(most.max())
    device = runner.device
    drawn = np.flatnonzero(sampling.temperature > 0).tolist() if sampling is not None else []
    drawing = sampling if drawn else None
    draws = torch.zeros(n, dtype=torch.bool, device=device)
    draws[drawn] = True
    features, heard = start.features[:, None], start.heard[:, None]
    tokens, probs = [], []
    lengths = torch.from_numpy(most.astype(np.int64)).to(device)
    so_far = torch.ones(n, device=device)
    for d in range(depth):
        logits = runner.logits(heard[:, 0])
        chosen = logits.argmax(-1)
        if drawing is not None:
            shaped = target_probs(logits, drawing)
            chance = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
            chosen = torch.where(draws, draw(shaped, chance), chosen)
            probs.append(shaped)
        if min_probability:
            spread = logits.softmax(-1)
            # Of the likeliest token, not the drawn one: whether a position is drafted must not depend on it.
            lengths = torch.where(so_far * spread.amax(-1) < min_probability, lengths.clamp(max=d), lengths)
            so_far = so_far * spread.gather(-1, chosen[:, None])[:, 0]
        tokens.append(runner.head.target_ids(chosen))
        if d + 1 == depth or (min_probability and int(lengths.max()) <= d):
            break
        slots = start.entries[:, None] + d
        extent = start.longest + d + 1
        seen = torch.arange(extent, device=device) <= slots[:, :, None]
        features, heard = runner.forward(
            tokens[-1][:, None], features, (start.positions + d)[:, None], start.rows, slots, seen
        )
    counts = lengths.clamp(max=len(tokens)).to("cpu", torch.int32).numpy()
    packed = torch.stack(tokens, 1).to("cpu", torch.int32).numpy()
    if drawing is None:
        return Drafts(packed, counts)
    given: list[torch.Tensor | None] = [None] * n
    for i, wide in zip(drawn, runner.over_vocabulary(torch.stack(probs, 1)[drawn]), strict=True):
        given[i] = wide[: counts[i]]
    return Drafts(packed, counts, None, given)


def draft_trees(
    runner: EagleRunner, start: Start, budgets: IntArray, depths: IntArray, topk: int, min_probability: float
) -> Drafts:
    """Trees: each position expands the ``topk`` likeliest nodes by ``topk`` tokens each, and of all the
    ``budgets`` likeliest, ``[n]``, are kept; none deeper than ``depths``, or less likely than
    ``min_probability``. One pass of the head for each position but the first."""
    n, depth = len(start.rows), int(depths.max())
    device = runner.device
    root = torch.full((n, 1), -1, device=device)
    grown = _Nodes(runner.logits(start.heard[:, None]), torch.zeros(n, 1, device=device), root, topk)
    levels, first = [grown], 0
    features = start.features[:, None].expand(n, topk, -1)
    # Which drafted entries the frontier may see, [n, topk, drafted].
    seen = torch.zeros(n, topk, 0, dtype=torch.bool, device=device)
    own = torch.eye(topk, dtype=torch.bool, device=device).expand(n, topk, topk)
    base = torch.arange(topk, device=device)
    frontier = base.expand(n, topk)
    for d in range(1, depth):
        at = levels[-1].tokens.gather(1, frontier)
        scores = levels[-1].scores.gather(1, frontier)
        seen = torch.cat([seen, own], -1)
        slots = start.entries[:, None] + (d - 1) * topk + base
        extent = start.longest + d * topk
        following, heard = runner.forward(
            runner.head.target_ids(at),
            features,
            (start.positions + d - 1)[:, None].expand(n, topk),
            start.rows,
            slots,
            _tree_mask(start.entries, seen, extent),
        )
        nodes = _Nodes(runner.logits(heard), scores, first + frontier, topk)
        first += levels[-1].tokens.shape[1]
        levels.append(nodes)
        if d + 1 < depth:
            frontier = nodes.scores.topk(topk, dim=1).indices
            parent = frontier // topk
            features = following.gather(1, parent[..., None].expand(-1, -1, following.shape[-1]))
            seen = seen.gather(1, parent[..., None].expand(-1, -1, seen.shape[-1]))
    return _likeliest(runner, levels, budgets, depths, min_probability)


class _Nodes:
    """The nodes of one depth: ``topk`` children of each node that was expanded, ``[n, expanded * topk]``."""

    def __init__(self, logits: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, topk: int) -> None:
        best = logits.log_softmax(-1).topk(topk, dim=-1)
        self.tokens = best.indices.flatten(1)
        """Draft ids."""
        self.scores = (scores[..., None] + best.values).flatten(1)
        """Log probabilities of the paths."""
        self.parents = parents[..., None].expand_as(best.indices).flatten(1)
        """Numbers of nodes, in the order of their making."""


def _tree_mask(entries: torch.Tensor, seen: torch.Tensor, extent: int) -> torch.Tensor:
    """``[n, nodes, extent]``: true entries, and of those drafted behind them the ones in ``seen``."""
    n, nodes, drafted = seen.shape
    column = torch.arange(extent, device=seen.device)
    true = (column < entries[:, None])[:, None].expand(n, nodes, extent)
    # Each row's drafted entries stand where its own true ones end.
    place = (column - entries[:, None]).clamp(0, drafted - 1)[:, None].expand(n, nodes, extent)
    behind = (column < (entries + drafted)[:, None])[:, None]
    return true | (seen.gather(2, place) & behind & ~true)


def _likeliest(
    runner: EagleRunner, levels: list[_Nodes], budgets: IntArray, depths: IntArray, min_probability: float
) -> Drafts:
    tokens, scores, parents = (
        torch.cat([getattr(level, name) for level in levels], 1) for name in ("tokens", "scores", "parents")
    )
    sizes = [level.tokens.shape[1] for level in levels]
    depth = np.repeat(np.arange(1, len(levels) + 1), sizes)
    rank = scores.cpu().numpy().astype(np.float64)
    rank[depth[None] > depths[:, None]] = -np.inf
    if min_probability:
        rank[rank < np.log(min_probability)] = -np.inf
    # A parent is at least as likely as its child, and was made before it: a stable order has it first.
    order = np.argsort(-rank, axis=1, kind="stable")
    counts = np.minimum(np.isfinite(rank).sum(1), budgets).astype(np.int32)
    width, made = int(counts.max(initial=0)), rank.shape[1]
    # Kept nodes in the order of their making; unused places hold one past the last, a column of its own.
    kept = np.where(np.arange(width) < counts[:, None], order[:, :width], made)
    kept.sort(axis=1)
    place = np.full((len(kept), made + 1), -1, np.int32)
    np.put_along_axis(place, kept, np.broadcast_to(np.arange(width, dtype=np.int32), kept.shape), 1)
    before = np.take_along_axis(np.pad(parents.cpu().numpy(), ((0, 0), (0, 1)), constant_values=-1), kept, 1)
    ids = np.pad(runner.head.target_ids(tokens).cpu().numpy(), ((0, 0), (0, 1)))
    return Drafts(
        np.take_along_axis(ids, kept, 1).astype(np.int32),
        counts,
        np.where(before < 0, -1, np.take_along_axis(place, np.maximum(before, 0), 1)).astype(np.int32),
    )
