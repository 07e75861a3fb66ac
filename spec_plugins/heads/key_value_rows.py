"""Keys and values of a head's layers, a row for each request, in the order in which they were fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spec_plugins.heads.decoder_layer import Attend

__all__ = ["KeyValueRows"]

FIRST_CAPACITY = 256


class KeyValueRows:
    """A store of ``layers`` times ``[rows, kv_heads, capacity, head_dim]`` keys and values, of bounded size.

    Takes ``2 * layers * kv_heads * head_dim`` numbers for each of ``rows * capacity`` entries, of which there
    are at most ``most_entries``; both grow as they are needed, and nothing is held where there is no request.
    Which entries a position may attend to is the caller's mask, so that holes and rejected entries cost
    nothing: they are written over.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        most_entries: int,
    ) -> None:
        self._shape, self._most = (layers, 2, kv_heads, head_dim), most_entries
        self._dtype, self._device = dtype, device
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._store = self._empty(0, 0)

    def _empty(self, rows: int, capacity: int) -> torch.Tensor:
        layers, two, heads, width = self._shape
        # Zeros: what is masked still counts where it is no number.
        return torch.zeros(layers, two, rows, heads, capacity, width, dtype=self._dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._store.nbytes

    @property
    def longest(self) -> int:
        """The most entries that a row can have, with as many rows as there are."""
        return self._most // max(1, self._store.shape[2])

    def row(self, request_id: str) -> int:
        """The row of a request, which gets one if it has none. New rows may leave :attr:`longest` less, and
        what rows held behind that is lost."""
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                before, rows = self._store, max(4, 2 * self._store.shape[2])
                capacity = min(max(FIRST_CAPACITY, before.shape[4]), self._most // rows)
                self._resize(rows, capacity)
                self._free = list(range(before.shape[2], rows))[::-1]
            row = self._rows[request_id] = self._free.pop()
            self._store[:, :, row].zero_()
        return row

    def discard(self, request_id: str) -> None:
        """Free a request's row, if it has one."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        if not self._rows:
            self._free, self._store = [], self._empty(0, 0)

    def reserve(self, entries: int) -> None:
        """Make room for so many entries, no more than :attr:`longest`, in each row."""
        if entries > self._store.shape[4]:
            self._resize(self._store.shape[2], min(self.longest, max(entries, 2 * self._store.shape[4])))

    def _resize(self, rows: int, capacity: int) -> None:
        before = self._store
        store = self._empty(rows, capacity)  # may fail for want of memory, and must leave all as it is
        kept = min(capacity, before.shape[4])
        store[:, :, : before.shape[2], :, :kept] = before[..., :kept, :]
        self._store = store

    def attends(self, rows: Sequence[int], slots: torch.Tensor, mask: torch.Tensor) -> list[Attend]:
        """Attention for each layer that stores what it is given and sees what the mask lets it.

        Args:
            rows: ``[batch]``; where they stand together and ascend, nothing is copied.
            slots: ``[batch, n]`` int64: where each position's key and value go; room must have been reserved.
            mask: ``[batch, n, extent]`` bool: which of a row's first ``extent`` entries each may see.
        """
        first, count = rows[0], len(rows)
        together = list(rows) == list(range(first, first + count))
        extent = mask.shape[-1]
        at = torch.tensor(list(rows), device=self._device)
        seen = mask[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._store[layer]
            keys[at[:, None], :, slots] = k.transpose(1, 2)
            values[at[:, None], :, slots] = v.transpose(1, 2)
            if together:
                keys, values = (x[first : first + count, :, :extent] for x in (keys, values))
            else:
                keys, values = (x[:, :, :extent][at] for x in (keys, values))
            return nn.functional.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)

        return [
            lambda q, k, v, layer=layer: attend(layer, q, k, v)  # type: ignore[misc]
            for layer in range(self._shape[0])
        ]
