"""Reference verification of drafts, in torch: what the target would have said, token for token.

Greedy verification keeps the longest path that agrees with the target's argmax; sampled verification
is rejection sampling, so that committed tokens follow the target's distribution whatever the draft.
Slots are those of :mod:`spec_plugins.trees`: slot 0 holds the target's output after the last
committed token, slot ``j + 1`` its output after draft node ``j``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from spec_plugins.proposer import Drafts, IntArray, Sampling
from spec_plugins.trees import chain_parents, node_depths

__all__ = ["Verdict", "draw", "target_probs", "verify", "verify_greedy", "verify_sampled"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What one verification commits. ``depth`` is that of the deepest draft of the batch."""

    accepted: IntArray
    """``[n]`` int32: how many draft tokens were accepted."""
    path: IntArray
    """``[n, depth]`` int32: the accepted draft nodes from the root down, then ``-1``."""
    tokens: IntArray
    """``[n, depth + 1]`` int32: the accepted tokens, the target's own next one, then ``-1``."""


def target_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The target's distributions after temperature, top-k, top-p and min-p, in that order.

    Settings mean what they mean to ``transformers``' logits warpers: top-k keeps ties with the k-th
    score, each filter sees the distribution that the one before left. Temperature 0 puts everything
    on the argmax, the first one on ties. Logits may be ``-inf``, but not all of a row.

    Args:
        logits: ``[n, ..., vocab]``, any float type; not changed.
        sampling: ``n`` entries.

    Returns:
        float32, the shape and device of ``logits``. Two passes over the logits; top-k adds a partial
        sort and top-p a full one of the requests that ask for them.
    """
    greedy = sampling.temperature == 0
    if greedy.all():
        return _one_hot(logits)
    vocab, device = logits.shape[-1], logits.device
    column = (-1,) + (1,) * (logits.ndim - 1)

    def pick(mask: Array, values: Array) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.flatnonzero(mask & ~greedy)
        return _long(rows, device), torch.as_tensor(values[rows], device=device).view(column)

    temperature = np.where(greedy, np.float32(1), sampling.temperature)
    scores = logits.float() / torch.as_tensor(temperature, device=device).view(column)

    rows, k = pick((sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k.astype(np.int64))
    if len(rows):
        mine = scores[rows]
        best = mine.topk(int(k.max()), dim=-1).values
        last = best.gather(-1, (k - 1).expand(*best.shape[:-1], 1))
        scores[rows] = mine.masked_fill_(mine < last, -torch.inf)

    tail = (1 - sampling.top_p.astype(np.float64)).astype(np.float32)
    rows, cut = pick(sampling.top_p < 1, tail)
    if len(rows):
        mine = scores[rows]
        ascending, order = mine.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= cut
        drop[..., -1] = False
        scores[rows] = mine.masked_fill_(drop.scatter(-1, order, drop), -torch.inf)

    rows, share = pick(sampling.min_p > 0, sampling.min_p)
    if len(rows):
        mine = scores[rows]
        probs = mine.softmax(-1)
        scores[rows] = mine.masked_fill_(probs < share * probs.amax(-1, keepdim=True), -torch.inf)

    probs = scores.softmax(-1)
    if greedy.any():
        rows = _long(np.flatnonzero(greedy), device)
        probs[rows] = _one_hot(logits[rows])
    return probs


def verify(
    logits: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
    predictions: torch.Tensor | None = None,
) -> Verdict:
    """Verify drafts against the target's logits, ``[n, slots, vocab]``.

    Takes :func:`verify_greedy` where ``sampling`` is ``None`` or greedy throughout (one pass over the
    logits, or none where their argmax is given as ``predictions``), else :func:`target_probs` and
    :func:`verify_sampled`. Raises what those raise.
    """
    if sampling is None or (sampling.temperature == 0).all():
        return verify_greedy(logits.argmax(-1) if predictions is None else predictions, drafts)
    if generators is None:
        generators = [None] * len(drafts)
    return verify_sampled(target_probs(logits, sampling), drafts, generators)


def verify_greedy(predictions: torch.Tensor | Array, drafts: Drafts) -> Verdict:
    """Accept the path along which each token is the target's own prediction. O(nodes), compiled.

    Args:
        predictions: ``[n, slots]`` int: the target's argmax at every slot.
        drafts: chains or trees; their ``probs`` do not matter.

    Raises:
        ValueError: fewer rows or slots than the drafts need.
    """
    if isinstance(predictions, torch.Tensor):
        predictions = predictions.cpu().numpy()
    _check_shape(predictions.shape, drafts)
    predictions = predictions.astype(np.int32, copy=False)
    parents = _parents(drafts)
    path, accepted = _room(drafts)
    last = _follow(drafts.tokens, parents, drafts.counts, predictions, path, accepted)
    return _verdict(drafts, path, accepted, predictions[np.arange(len(drafts)), last + 1])


def verify_sampled(
    probs: torch.Tensor, drafts: Drafts, generators: Sequence[torch.Generator | None]
) -> Verdict:
    """Accept by rejection sampling, so that committed tokens are distributed as ``probs`` says.

    From the root down, the children of the node reached are tested in order: child ``x`` drawn from
    ``q`` is accepted with probability ``min(1, p[x] / q[x])``; if not, ``p`` becomes
    ``max(p - q, 0)``, normalised. A deterministic child is drawn from a one-hot ``q``. Once none is
    left, the last token is sampled from ``p``. For chains this is Leviathan et al. (arXiv 2211.17192)
    and Chen et al. (arXiv 2302.01318), for trees SpecInfer (arXiv 2305.09781) and, with siblings
    drawn without replacement, Jeon et al. (arXiv 2402.14160). To leave out the probabilities of a
    token that was drawn is exact as well, and costs acceptance only; wrong ones are not exact.

    Each request draws one float64 uniform a draft node and one for the last token, so its outcome
    depends on nothing but its own rows and generator.

    Cost: one gather over all nodes, a residual and running sum over ``[n, vocab]`` at the end, and
    one ``vocab`` row for every rejected token that came with probabilities. Waits for the device
    a fixed number of times, plus once for each such rejection of the request that has most.

    Args:
        probs: ``[n, slots, vocab]`` float32, each row summing to 1, as :func:`target_probs` returns.
            Rows that are one-hot verify exactly as greedily.
        drafts: chains or trees, with or without ``probs`` (any float type, the device of ``probs``).
        generators: ``n`` of them, or ``None`` for torch's own on the device of ``probs``.

    Raises:
        ValueError: fewer rows, slots or generators than the drafts need, or a token outside the
            vocabulary.
    """
    _check_shape(probs.shape, drafts)
    n, device, vocab = len(drafts), probs.device, probs.shape[-1]
    every = np.arange(n)
    parents = _parents(drafts)
    width = parents.shape[1]
    used = np.arange(width) < drafts.counts[:, None]
    tokens = np.where(used, drafts.tokens, 0)
    if ((tokens < 0) | (tokens >= vocab)).any():
        raise ValueError(f"draft tokens must lie in range({vocab})")

    claims = {i: rows for i, rows in enumerate(drafts.probs or ()) if rows is not None}
    drawn = np.zeros(n, np.bool_)
    drawn[list(claims)] = True
    slots = _long(np.where(used, parents + 1, 0), device)
    ids = _long(tokens, device)
    p_of = probs[_long(every[:, None], device), slots, ids].double().cpu().numpy()
    q_of = np.ones((n, width))
    if claims:
        mine = used & drawn[:, None]
        own = _long(tokens[mine][:, None], device).split_with_sizes(drafts.counts[drawn].tolist())
        q = torch.cat([rows.gather(1, x) for rows, x in zip(claims.values(), own, strict=True)])
        q_of[mine] = q[:, 0].clamp(max=1).double().cpu().numpy()
    chance = _uniforms(drafts.counts, width + 1, generators, device)

    path, accepted = _room(drafts)
    last = np.full(n, -1, np.int32)
    mass = np.ones(n)
    following = np.zeros(n, np.int32)
    rest: torch.Tensor | None = None  # [n, vocab]: what rejections left of p, at node rest_at[i]
    rest_at = np.full(n, -2, np.int32)
    while True:
        rejected = _advance(
            tokens, parents, drafts.counts, drawn, p_of, q_of, chance, following, mass, last, path, accepted
        )
        rows = np.flatnonzero(rejected >= 0)
        if not len(rows):
            break
        there, at = _long(rows, device), last[rows]
        whole = probs[there, _long(at + 1, device)]
        claimed = torch.stack([claims[i][rejected[i]] for i in rows.tolist()]).to(whole)
        if rest is None:
            rest = probs.new_empty((n, vocab))
        again = torch.as_tensor(rest_at[rows] == at, device=device)
        left = torch.where(again[:, None], rest[there], whole).sub_(claimed).clamp_(min=0)
        total = left.sum(-1, keepdim=True)
        # Nothing is left only where p equals q up to rounding: then start over from p.
        left = torch.where(total > 0, left / total, whole)
        rest[there] = left
        rest_at[rows] = at
        p_left = left.gather(1, ids[there]).double().cpu().numpy()
        p_of[rows] = np.where(parents[rows] == at[:, None], p_left, p_of[rows])

    weights = probs[_long(every, device), _long(last + 1, device)]
    # Whatever hangs on the last node was rejected.
    owner, node = (used & (parents == last[:, None]) & ~drawn[:, None]).nonzero()
    weights[_long(owner, device), ids[_long(owner, device), _long(node, device)]] = 0
    if rest is not None:
        kept = _long((rest_at == last).nonzero()[0], device)
        weights[kept] = rest[kept]
    # All of p was rejected only where its sum is 1 up to rounding.
    empty = (weights.amax(-1) <= 0).cpu().numpy().nonzero()[0]
    if len(empty):
        weights[_long(empty, device)] = probs[_long(empty, device), _long(last[empty] + 1, device)]
    return _verdict(drafts, path, accepted, _sample(weights, chance[every, drafts.counts]))


def _sample(weights: torch.Tensor, chance: Array) -> Array:
    """One index a row in proportion to ``weights``, ``[n, vocab]``; ``chance``: ``[n]`` in [0, 1)."""
    return draw(weights, torch.as_tensor(chance, device=weights.device)).cpu().numpy()


def draw(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """One index a row in proportion to ``weights``, never one of weight 0, without waiting for the device.

    Args:
        weights: ``[n, vocab]``, at least one of a row more than 0.
        chance: ``[n]`` float64 in [0, 1).

    Returns:
        ``[n]`` int64. A running sum and a maximum of each row.
    """
    running = weights.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(running, chance[:, None] * running[:, -1:], right=True)
    index = index.clamp_(max=weights.shape[1] - 1)
    # Rounding of the goal or of a parallel sum may point just past a weight.
    return torch.where(weights.gather(1, index) > 0, index, weights.argmax(-1, keepdim=True))[:, 0]


def _uniforms(
    counts: IntArray, width: int, generators: Sequence[torch.Generator | None], device: torch.device
) -> npt.NDArray[np.float64]:
    """``[n, width]``; a generator gives only the ``counts[i] + 1`` that its request needs."""
    if len(generators) != len(counts):
        raise ValueError(f"{len(counts)} drafts, but {len(generators)} generators")
    chance = torch.empty((len(counts), width), dtype=torch.float64, device=device)
    if any(g is None for g in generators):
        chance.uniform_()
    for i, g in enumerate(generators):
        if g is not None:
            m = int(counts[i]) + 1
            chance[i, :m] = torch.rand(m, dtype=torch.float64, generator=g, device=g.device)
    return chance.cpu().numpy()


@numba.njit(cache=True)
def _follow(
    tokens: IntArray,
    parents: IntArray,
    counts: IntArray,
    predictions: IntArray,
    path: IntArray,
    accepted: IntArray,
) -> IntArray:
    """Fill ``path`` and ``accepted``; return the last node of each path, ``-1`` for none."""
    last = np.full(len(counts), -1, np.int32)
    for i in range(len(counts)):
        for j in range(counts[i]):
            if parents[i, j] == last[i] and tokens[i, j] == predictions[i, last[i] + 1]:
                path[i, accepted[i]] = j
                accepted[i] += 1
                last[i] = j
    return last


@numba.njit(cache=True)
def _advance(
    tokens: IntArray,
    parents: IntArray,
    counts: IntArray,
    drawn: Array,
    p: Array,
    q: Array,
    chance: Array,
    following: IntArray,
    mass: Array,
    last: IntArray,
    path: IntArray,
    accepted: IntArray,
) -> IntArray:
    """Test nodes from ``following[i]`` on until a request is done, ``-1``, or a drawn token was rejected:
    then that node, and the caller must update ``p`` of its siblings. Rejecting a deterministic token
    takes its own probability out of ``mass[i]`` and leaves all others in proportion.
    """
    rejected = np.full(len(counts), -1, np.int32)
    for i in range(len(counts)):
        for j in range(following[i], counts[i]):
            following[i] = j + 1
            if parents[i, j] != last[i]:
                continue
            if chance[i, j] * q[i, j] * mass[i] < p[i, j]:
                path[i, accepted[i]] = j
                accepted[i] += 1
                last[i] = j
                mass[i] = 1.0
            elif drawn[i]:
                rejected[i] = j
                break
            else:
                mass[i] = max(mass[i] - p[i, j], 0.0)
                for k in range(j + 1, counts[i]):  # a repeated sibling stays rejected
                    if parents[i, k] == last[i] and tokens[i, k] == tokens[i, j]:
                        p[i, k] = 0.0
    return rejected


def _check_shape(shape: Sequence[int], drafts: Drafts) -> None:
    need = int(drafts.counts.max(initial=0)) + 1
    if shape[0] != len(drafts) or shape[1] < need:
        raise ValueError(f"{len(drafts)} drafts need {need} slots each, not {list(shape[:2])}")


def _parents(drafts: Drafts) -> IntArray:
    return chain_parents(*drafts.tokens.shape) if drafts.parents is None else drafts.parents


def _room(drafts: Drafts) -> tuple[IntArray, IntArray]:
    """An empty path and count for each draft."""
    depths = drafts.counts if drafts.parents is None else node_depths(drafts.parents, drafts.counts)
    n = len(drafts)
    return np.full((n, int(depths.max(initial=0))), -1, np.int32), np.zeros(n, np.int32)


def _verdict(drafts: Drafts, path: IntArray, accepted: IntArray, final: Array) -> Verdict:
    tokens = np.full((len(path), path.shape[1] + 1), -1, np.int32)
    tokens[:, :-1] = np.where(path < 0, -1, np.take_along_axis(drafts.tokens, np.maximum(path, 0), axis=1))
    tokens[np.arange(len(path)), accepted] = final
    return Verdict(accepted, path, tokens)


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    hot = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _long(values: Array, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=device)
