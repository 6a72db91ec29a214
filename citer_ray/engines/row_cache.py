"""KV caches of many sessions in one tensor per layer, written and read by row.

`TransformersEngine` gives every session a row; a forward pass names its rows and positions in a `PassIndex`, and the
layers below hand transformers the right keys and values. Position p of a response lives at index p of its row, so a
pass may be ragged: what a padded query writes lies beyond the row's length and is overwritten before it is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_CAPACITY_STEP = 64  # positions; capacity grows by doubling, at least by this


@dataclass(frozen=True, slots=True)
class PassIndex:
    """Where one forward pass reads and writes.

    Attributes:
        rows_B: int64 [B]; the cache row of every batch row.
        span: (first, end) if the rows are exactly first..end-1; then reads are views and copy nothing.
        positions_BT: int64 [B, T]; position of every query token.
        kv_length: number of leading positions that the pass may attend to.
    """

    rows_B: torch.Tensor
    span: tuple[int, int] | None
    positions_BT: torch.Tensor
    kv_length: int


class _RowLayer(CacheLayerMixin):
    """Keys and values of one decoder layer: [rows, heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(states: torch.Tensor) -> torch.Tensor:
            shape = (self._owner.num_rows, states.shape[1], self._owner.capacity, states.shape[3])
            # Zeros, not empty: masked attention multiplies what it does not see by 0, and 0 * NaN is NaN.
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        index = self._owner.index
        assert index is not None, "RowCache.index must be set before a forward pass"
        rows = index.rows_B[:, None]
        self.keys[rows, :, index.positions_BT] = key_states.transpose(1, 2)
        self.values[rows, :, index.positions_BT] = value_states.transpose(1, 2)
        return self._read(self.keys, index), self._read(self.values, index)

    @staticmethod
    def _read(states: torch.Tensor, index: PassIndex) -> torch.Tensor:
        if index.span is not None:
            return states[index.span[0] : index.span[1], :, : index.kv_length]
        return states[:, :, : index.kv_length].index_select(0, index.rows_B)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        index = self._owner.index
        return (index.kv_length if index else query_length), 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always given explicitly

    def get_max_length(self) -> int:
        return -1

    def resize(self, num_rows: int, capacity: int) -> None:
        for name in ("keys", "values"):
            old: torch.Tensor | None = getattr(self, name)
            if old is None:
                continue
            new = old.new_zeros((num_rows, old.shape[1], capacity, old.shape[3]))
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def copy_rows(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        for states in (self.keys, self.values):
            if states is not None:
                states[targets, :, :length] = states[sources, :, :length]


class RowCache(Cache):
    """Rows of KV cache; also remembers which ids each row holds, so that a new session can copy a shared prefix.

    Attributes:
        index: the current pass; set by the engine before each forward.
        ids: int32 [rows, capacity]; token ids whose keys and values are valid, up to `lengths`.
        lengths: int64 [rows]; number of valid positions.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self._max_rows, self._max_length = max_rows, max_length
        self.num_rows = min(8, max_rows)
        self.capacity = min(_CAPACITY_STEP, max_length)
        self.index: PassIndex | None = None
        self.ids: npt.NDArray[np.int32] = np.zeros((self.num_rows, self.capacity), np.int32)
        self.lengths: npt.NDArray[np.int64] = np.zeros(self.num_rows, np.int64)
        self._free = list(range(self.num_rows))
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    @property
    def num_free(self) -> int:
        """Rows that can still be taken."""
        return len(self._free) + self._max_rows - self.num_rows

    def take(self) -> int:
        """A free row, the lowest one, so that busy rows stay close together."""
        if not self._free:
            if self.num_rows >= self._max_rows:
                raise RuntimeError("no free row")
            self._resize(min(2 * self.num_rows, self._max_rows), self.capacity)
        row = min(self._free)
        self._free.remove(row)
        self.lengths[row] = 0
        return row

    def release(self, row: int) -> None:
        """Give a row back. Its ids stay readable for prefix copies until it is taken again."""
        self._free.append(row)

    def forget_if_idle(self) -> None:
        """With no row taken, forget what rows hold: else a job's last float bits would depend on jobs before it."""
        if len(self._free) == self.num_rows:
            self.lengths[:] = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every row."""
        if length > self.capacity:
            doubled = max(length, 2 * self.capacity)
            rounded = -(-doubled // _CAPACITY_STEP) * _CAPACITY_STEP
            # A padded query may reach a little past the model's limit, so `length` itself is always honoured.
            self._resize(self.num_rows, max(length, min(rounded, self._max_length)))

    def shared_prefix(self, ids: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The row that shares the longest prefix with `ids`, and the prefix's length (0 if none)."""
        limit = min(len(ids), self.capacity)
        if limit == 0:
            return 0, 0
        same = np.logical_and.accumulate(self.ids[:, :limit] == ids[:limit], axis=1).sum(axis=1)
        same = np.minimum(same, self.lengths)
        row = int(same.argmax())
        return row, int(same[row])

    @torch.inference_mode()  # the rows are inference tensors: passes made them
    def copy_prefixes(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy leading positions between rows: (source, target, length) each."""
        sources = torch.tensor([source for source, _, _ in copies])
        targets = torch.tensor([target for _, target, _ in copies])
        longest = max(length for _, _, length in copies)
        for layer in self.layers:
            assert isinstance(layer, _RowLayer)
            if layer.keys is not None:
                layer.copy_rows(sources.to(layer.keys.device), targets.to(layer.keys.device), longest)
        # Like the tensors: read all, then write all, since a row may be a source and a target at once.
        prefixes = [self.ids[source, :length].copy() for source, _, length in copies]
        for prefix, (_, target, length) in zip(prefixes, copies, strict=True):
            self.ids[target, :length] = prefix
            self.lengths[target] = length

    def extend(self, row: int, ids: list[int]) -> None:
        """Record that `ids` were computed at the end of a row."""
        start = int(self.lengths[row])
        self.ids[row, start : start + len(ids)] = ids
        self.lengths[row] = start + len(ids)

    def truncate(self, row: int, length: int) -> None:
        """Forget what a row holds from position `length` on."""
        self.lengths[row] = min(int(self.lengths[row]), length)

    @torch.inference_mode()
    def _resize(self, num_rows: int, capacity: int) -> None:
        ids = np.zeros((num_rows, capacity), np.int32)
        ids[: self.num_rows, : self.capacity] = self.ids
        lengths = np.zeros(num_rows, np.int64)
        lengths[: self.num_rows] = self.lengths
        self._free.extend(range(self.num_rows, num_rows))
        self.ids, self.lengths, self.num_rows, self.capacity = ids, lengths, num_rows, capacity
        for layer in self.layers:
            assert isinstance(layer, _RowLayer)
            layer.resize(num_rows, capacity)
