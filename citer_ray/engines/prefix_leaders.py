"""Which of several new sessions should compute a prefix that they share: `Batcher` asks it once before each pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Leaders:
    """Contexts that the coming pass computes, longest first, as one matrix to compare with."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._count = 0

    def add(self, ids: npt.NDArray[np.int32]) -> None:
        if self._count == len(self._ids):
            grown = np.full((max(8, 2 * self._count), max(self._ids.shape[1], len(ids))), -1, np.int32)
            grown[: self._count, : self._ids.shape[1]] = self._ids
            self._ids = grown
        self._ids[self._count, : len(ids)] = ids
        self._count += 1

    def common_prefix(self, ids: npt.NDArray[np.int32]) -> int:
        """Length of the longest prefix that `ids`, not longer than any leader so far, shares with one."""
        if self._count == 0:
            return 0
        same = self._ids[: self._count, : len(ids)] == ids
        return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max())
