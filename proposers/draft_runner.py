"""Runs a draft model over many requests at once: what its cache holds of each, and what is still to be fed.

Everything here is in the draft's own tokens. Imports torch: for :meth:`DraftModelProposer.load` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.proposer import IntArray
from spec_plugins.row_model import RowModel

__all__ = ["DraftRunner", "Job", "load_draft"]

Longs = npt.NDArray[np.int64]
Choose = Callable[[Longs, torch.Tensor, int], torch.Tensor]
"""Of jobs (their indices), logits ``[n, vocab]`` and a depth: their tokens, ``[n]`` int64, on the device."""

PASS = 512  # tokens of a forward pass that takes in text: enough to be efficient, few enough to be small
TAIL = 16  # tokens that may be fed together with the newest one, rather than before it
_NONE: IntArray = np.empty(0, np.int32)


@dataclass(slots=True)
class Job:
    """A request to draft for."""

    request_id: str
    ids: IntArray
    """All of its text, ``[m]`` int32, ``m > 0``."""
    same: int
    """How many of them, from the first on, are as they were in the job before."""
    depth: int
    """How many tokens to draft, 1 or more."""


@dataclass(slots=True)
class _Row:
    """What the cache holds of a request."""

    index: int
    agreed: int = 0
    """Slots whose tokens are the text's."""
    drafted: IntArray = field(default_factory=lambda: _NONE)
    """Tokens in the slots after those: drafted, and perhaps accepted since."""


class DraftRunner:
    """A causal language model that drafts chains, with a cache in which each request has a row.

    Only tokens that the cache lacks are fed: those that were drafted and accepted are there already, those
    that were rejected are overwritten. A step is one forward pass over what is new of all requests, padded
    to the longest of at most ``TAIL`` tokens, and one over a token of each request for every further depth;
    longer text is taken in before, in passes of ``PASS`` tokens, up to ``prefill_tokens`` a step. The
    cache is as long as its longest row, and rows times length is at most ``cache_tokens``.
    """

    def __init__(self, model: Any, cache_tokens: int, prefill_tokens: int) -> None:
        """Raises :class:`UnsupportedError` where the model cannot be run so."""
        self.model = RowModel(model, 1, "draft_model")
        self.model.cache.capacity = 1
        self.cache_tokens, self.prefill_tokens = cache_tokens, prefill_tokens
        self._rows: dict[str, _Row] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def cache_bytes(self) -> int:
        """What the cache takes on the device."""
        return self.model.cache.nbytes

    def forget(self, request_id: str) -> None:
        """Free a request's row, by moving the last one into it; with the last request, the cache."""
        gone = self._rows.pop(request_id, None)
        if gone is None:
            return
        cache = self.model.cache
        if not self._rows:
            cache.store, cache.num_rows, cache.capacity = None, 1, 1
            return
        last = max(self._rows.values(), key=lambda row: row.index)
        if last.index > gone.index:
            with torch.inference_mode():
                cache.copy_row(last.index, gone.index, last.agreed + len(last.drafted))
            last.index = gone.index

    @torch.inference_mode()
    def draft(self, jobs: Sequence[Job], choose: Choose) -> IntArray:
        """Draft for every job that can be.

        Args:
            jobs: of different requests.
            choose: picks the next tokens from logits.

        Returns:
            ``[n, deepest]`` int32: the chosen tokens; ``-1`` past a job's depth, and in all of a row whose
            request does not fit into the cache, or whose text is not taken in yet.
        """
        depths = np.array([job.depth for job in jobs], np.int64)
        tokens = np.full((len(jobs), int(depths.max(initial=0))), -1, np.int32)
        rows = self._place(jobs)
        ready = self._take_in(jobs, rows)
        if not ready:
            return tokens
        # In the order of their rows, so that a whole batch is a slice of the cache.
        ready.sort(key=lambda i: rows[i].index)  # type: ignore[union-attr]
        mine = [row for i in ready if (row := rows[i]) is not None]
        active = np.array(ready, np.int64)
        where = np.array([row.index for row in mine], np.int64)
        lengths = np.array([len(jobs[i].ids) for i in ready], np.int64)
        logits = self._feed(where, [jobs[i].ids[row.agreed :] for i, row in zip(ready, mine, strict=True)],
                            np.array([row.agreed for row in mine], np.int64))  # fmt: skip
        chosen: list[tuple[Longs, torch.Tensor]] = []
        for depth in range(tokens.shape[1]):
            last = choose(active, logits, depth)
            chosen.append((active, last))
            go_on = depths[active] > depth + 1
            if not go_on.any():
                break
            if not go_on.all():
                last = last[torch.as_tensor(go_on.nonzero()[0], device=last.device)]
                active, where, lengths = active[go_on], where[go_on], lengths[go_on]
            slots = torch.as_tensor(lengths + depth, device=last.device)[:, None]
            logits = self._forward(where, last[:, None], slots, slots, int(lengths.max()) + depth + 1)
        # The only wait for the device; whatever `choose` made is ready then, too.
        found = torch.cat([t for _, t in chosen]).cpu().numpy()
        for depth, part in enumerate(np.split(found, np.cumsum([len(a) for a, _ in chosen])[:-1])):
            tokens[chosen[depth][0], depth] = part
        for i, row in zip(ready, mine, strict=True):
            row.agreed, row.drafted = len(jobs[i].ids), tokens[i, : depths[i] - 1].copy()
        return tokens

    # ------------------------------------------------------------------------------------ the cache

    def _place(self, jobs: Sequence[Job]) -> list[_Row | None]:
        """A row for each job that fits, with what it holds brought up to date."""
        needs = np.array([len(job.ids) + job.depth for job in jobs], np.int64)
        order = np.argsort(needs, kind="stable")
        fits = needs[order] * np.arange(1, len(jobs) + 1) <= self.cache_tokens
        # Short ones first: n rows are as long as the longest.
        inside = order[: int(fits.argmin()) if not fits.all() else len(order)]
        longest = int(needs[inside].max(initial=0))
        for i in set(range(len(jobs))) - set(inside.tolist()):
            self.forget(jobs[i].request_id)
        cache = self.model.cache
        wanted = [jobs[i].request_id for i in inside]
        total = len(self._rows.keys() | set(wanted))
        if total > cache.num_rows or longest > cache.capacity:
            if total * max(longest, cache.capacity) > self.cache_tokens:
                for request_id in self._rows.keys() - set(wanted):
                    self.forget(request_id)  # not in this step: it is fed again when it comes back
                total = len(wanted)
            rows = cache.num_rows if total <= cache.num_rows else max(total, 2 * cache.num_rows)
            capacity = cache.capacity if longest <= cache.capacity else max(longest, 2 * cache.capacity)
            if rows * capacity > self.cache_tokens:
                rows, capacity = total, max(longest, min(capacity, self.cache_tokens // total))
            cache.resize(rows, capacity)
        found: list[_Row | None] = [None] * len(jobs)
        for i in inside.tolist():
            job = jobs[i]
            row = self._rows.pop(job.request_id, None) or _Row(len(self._rows))
            self._rows[job.request_id] = row
            _agree(row, job)
            found[i] = row
        return found

    def _take_in(self, jobs: Sequence[Job], rows: Sequence[_Row | None]) -> list[int]:
        """Feed what is too long for the pass that drafts; returns the jobs that are then ready for it."""
        allowed = self.prefill_tokens
        goals: dict[int, int] = {}
        ready = []
        for i, (job, row) in enumerate(zip(jobs, rows, strict=True)):
            if row is None:
                continue
            missing = len(job.ids) - row.agreed
            if missing > TAIL:
                taken = min(missing - 1, allowed)
                allowed -= taken
                if taken:
                    goals[i] = row.agreed + taken
                missing -= taken
            if missing <= TAIL:
                ready.append(i)
        while goals:
            left = {i: goals[i] - rows[i].agreed for i in goals}  # type: ignore[union-attr]
            longest = sorted(left, key=lambda i: -left[i])
            width = min(left[longest[0]], PASS)
            batch = longest[: max(1, PASS // width)]
            batch.sort(key=lambda i: rows[i].index)  # type: ignore[union-attr]
            mine = [row for i in batch if (row := rows[i]) is not None]
            starts = np.array([row.agreed for row in mine], np.int64)
            ends = [min(goals[i], row.agreed + width) for i, row in zip(batch, mine, strict=True)]
            fed = [jobs[i].ids[row.agreed : end] for i, row, end in zip(batch, mine, ends, strict=True)]
            self._feed(np.array([row.index for row in mine], np.int64), fed, starts)
            for i, row, end in zip(batch, mine, ends, strict=True):
                row.agreed, row.drafted = end, _NONE
                if end == goals[i]:
                    del goals[i]
        return ready

    # --------------------------------------------------------------------------------- forward passes

    def _feed(self, rows: Longs, fed: Sequence[IntArray], starts: Longs) -> torch.Tensor:
        """Feed ragged text, each behind ``starts[i]`` slots of its row; logits after each, ``[n, vocab]``."""
        counts = np.array([len(ids) for ids in fed], np.int64)
        width = int(counts.max())
        # Padded on the left, for all to end in the last column. Padding goes to the slot behind the text,
        # and sees the first token only.
        column, pad = np.arange(width), (width - counts)[:, None]
        at = starts[:, None] + column - pad
        positions = np.where(column >= pad, at, 0)
        slots = np.where(column >= pad, at, (starts + counts)[:, None])
        ids = np.zeros((len(fed), width), np.int64)
        for i, mine in enumerate(fed):
            ids[i, width - len(mine) :] = mine
        device = self.model.device
        return self._forward(
            rows,
            torch.as_tensor(ids, device=device),
            torch.as_tensor(positions, device=device),
            torch.as_tensor(slots, device=device),
            int((starts + counts).max()) + 1,
        )

    def _forward(
        self, rows: Longs, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, extent: int
    ) -> torch.Tensor:
        first, n = int(rows[0]), len(rows)
        together = int(rows[-1]) - first + 1 == n
        where = slice(first, first + n) if together else torch.as_tensor(rows, device=ids.device)
        self.model.cache.decode(slots, extent, where)
        visible = torch.arange(extent, device=ids.device) <= positions[:, :, None]
        logits: torch.Tensor = self.model.forward(ids, positions, visible, last_only=True).logits
        return logits[:, -1]


def _agree(row: _Row, job: Job) -> None:
    """Count the slots that hold the text: what was drafted may have been accepted. O(drafted)."""
    if job.same < row.agreed:
        row.agreed, row.drafted = job.same, _NONE
    elif len(row.drafted):
        text = job.ids[row.agreed : row.agreed + len(row.drafted)]
        wrong = np.flatnonzero(text != row.drafted[: len(text)])
        row.agreed += int(wrong[0]) if len(wrong) else len(text)
        row.drafted = _NONE
    # The newest token is fed in any case: its logits are what is drafted from.
    row.agreed = min(row.agreed, len(job.ids) - 1)


def load_draft(folder: str, dtype: str, device: str) -> Any:
    """A causal language model from a folder of safetensors, onto a device. Runs no foreign code.

    Raises:
        ConfigError: it cannot be loaded, or its weights cannot be used.
        UnsupportedError: it needs code that is not in transformers.
    """
    from transformers import AutoModelForCausalLM

    what = f"options.model: {folder!r}"
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"{what} is no folder with a config.json; give the folder of a model that `from_pretrained` loads"
        )
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"options.dtype: {dtype!r} is no float type of torch; set it to 'bfloat16', say")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(Path(folder).expanduser()),
            dtype=kind,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # truncated, of another kind, other weights: each has an error of its own
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    model, about = loaded
    missing = sorted(about["missing_keys"])
    if missing:  # transformers makes them up
        raise ConfigError(f"{what} lacks weights: {missing[0]} and {len(missing) - 1} more; fetch it anew")
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise ConfigError(f"{what} has weights that are no numbers, in {name}; fetch it anew")
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{what} has no LM head, so it cannot draft; give a causal language model")
    return model.to(device).eval()
