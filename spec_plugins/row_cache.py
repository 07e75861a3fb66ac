"""A key-value cache in which every request owns a row, so that requests of a batch advance unevenly."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["RowCache"]


class _Layer(CacheLayerMixin):
    """One layer's view of the shared store."""

    is_sliding = False

    def __init__(self, cache: RowCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the store is the cache's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return 0 if self.cache.slots is None else self.cache.extent

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class RowCache(Cache):
    """Keys and values of all layers in one tensor, ``[2, layers, rows, heads, capacity, head_dim]``.

    Its owner says where the next forward pass writes (:meth:`prefill`, :meth:`decode`), then calls the
    model; attention masks hide what a row does not own. Capacity doubles when it is full.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int = 512) -> None:
        self.num_rows, self.capacity, self.num_layers = rows, capacity, num_layers
        self.store: torch.Tensor | None = None
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.extent = 0
        self.slots: torch.Tensor | None = None
        super().__init__(layers=[_Layer(self, i) for i in range(num_layers)])

    def prefill(self, row: int, length: int) -> None:
        """The next forward pass fills ``row`` from its start."""
        self.rows, self.extent, self.slots = slice(row, row + 1), length, None
        self._reserve(length)

    def decode(self, slots: torch.Tensor, extent: int, rows: torch.Tensor | slice | None = None) -> None:
        """The next forward pass writes row ``i`` of the batch at ``slots[i]``, ``[n, width]``.

        Attention sees the first ``extent`` slots of each row. ``rows``: which rows of the cache the batch
        is, ``[n]``; ``None``: the first. A slice is a view, a tensor a copy of what attention sees.
        """
        self.rows = slice(0, len(slots)) if rows is None else rows
        self.extent, self.slots = extent, slots
        self._reserve(extent)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states, ``[rows, heads, width, head_dim]``, and return all that attention may see."""
        if self.store is None:
            shape = (2, self.num_layers, self.num_rows, keys.shape[1], self.capacity, keys.shape[3])
            self.store = keys.new_zeros(shape)
        if not isinstance(self.rows, slice):
            assert self.slots is not None
            at = self.rows[:, None], slice(None), self.slots
            self.store[0, layer][at], self.store[1, layer][at] = keys.transpose(1, 2), values.transpose(1, 2)
            seen = self.store[:, layer, :, :, : self.extent][:, self.rows]
            return seen[0], seen[1]
        k, v = self.store[0, layer, self.rows], self.store[1, layer, self.rows]
        if self.slots is None:
            k[:, :, : self.extent], v[:, :, : self.extent] = keys, values
        else:
            index = self.slots[:, None, :, None].expand_as(keys)
            k.scatter_(2, index, keys)
            v.scatter_(2, index, values)
        return k[:, :, : self.extent], v[:, :, : self.extent]

    def _reserve(self, length: int) -> None:
        if length > self.capacity:
            self.resize(self.num_rows, max(length, 2 * self.capacity))

    def resize(self, rows: int, capacity: int) -> None:
        """Make room for so many rows and slots; the first ones keep what they hold."""
        before, r, c = self.store, min(rows, self.num_rows), min(capacity, self.capacity)
        self.num_rows, self.capacity = rows, capacity
        if before is not None:
            self.store = before.new_zeros(
                (*before.shape[:2], rows, before.shape[3], capacity, before.shape[5])
            )
            self.store[:, :, :r, :, :c] = before[:, :, :r, :, :c]

    @property
    def nbytes(self) -> int:
        """Bytes that the store takes."""
        return 0 if self.store is None else self.store.nbytes

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots within rows, ``[m]`` each: the accepted path of a tree to where a chain would be."""
        assert self.store is not None
        # Indexing copies before it writes, so overlapping slots are safe.
        self.store[:, :, rows, :, targets] = self.store[:, :, rows, :, sources]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of a row onto another row."""
        assert self.store is not None
        self.store[:, :, target, :, :length] = self.store[:, :, source, :, :length]
