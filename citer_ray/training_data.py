"""The positions that one worker trains on, as tensors, numbered as the plan numbers them.

Filled from tables of label rows, however they were read (`LabelStore` in one process, Ray Data in
`on_ray/train.py`); read by `training.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from citer_ray.label_rows import Positions, explode
from citer_ray.label_store import LabelStore, read_part
from citer_ray.training_plan import TrainingPlan

SHARD_COLUMNS = ("example_id", "label", "case", "hidden")


@dataclass(frozen=True, slots=True)
class Shard:
    """Labelled positions that a worker holds of a window, or of the validation part.

    Attributes:
        number_B: int64; the plan's numbers of the positions.
        hidden_BH: float16, on the CPU.
        label_B: float32.
        case_B: int8.
    """

    number_B: npt.NDArray[np.int64]
    hidden_BH: Tensor
    label_B: Tensor
    case_B: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.number_B)


class TrainingData(Protocol):
    """What training needs of its data; each worker has its own, over the same plan."""

    @property
    def plan(self) -> TrainingPlan:
        """The plan that all workers share."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    def window(self, index: int) -> Shard:
        """This worker's positions of a window; reads them again unless all windows are held."""
        ...

    def validation(self) -> Shard:
        """This worker's validation positions."""
        ...


def shards_of(tables: Iterable[pa.Table], starts: list[dict[str, int]], hidden_size: int) -> list[Shard]:
    """Pick and number the labelled positions of some tables, once for each numbering.

    Args:
        tables: label rows with `SHARD_COLUMNS`.
        starts: numberings (`Window.starts`, `TrainingPlan.validation_starts`); rows of other examples are
            left out.
        hidden_size: H.
    """
    parts: list[list[tuple[npt.NDArray[np.int64], Positions]]] = [[] for _ in starts]
    for table in tables:
        positions = explode(table, hidden_size)
        positions = positions.select(~np.isnan(positions.label_B))
        ids = table["example_id"].to_pylist()
        for part, numbering in zip(parts, starts, strict=True):
            part.append(_numbered(ids, positions, numbering))
    return [_join(part, hidden_size) for part in parts]


def _numbered(
    ids: list[str], positions: Positions, numbering: dict[str, int]
) -> tuple[npt.NDArray[np.int64], Positions]:
    """The labelled positions of the numbered examples, with their numbers."""
    start_R = np.array([numbering.get(name, -1) for name in ids], dtype=np.int64)
    if len(ids) == 0:
        return start_R, positions
    # The rank of a labelled position within its row: its index less that of the row's first one.
    first_R = np.searchsorted(positions.row_B, np.arange(len(ids)))
    rank_B = np.arange(len(positions), dtype=np.int64) - first_R[positions.row_B]
    keep_B = start_R[positions.row_B] >= 0
    return (start_R[positions.row_B] + rank_B)[keep_B], positions.select(keep_B)


def _join(parts: list[tuple[npt.NDArray[np.int64], Positions]], hidden_size: int) -> Shard:
    """One shard of several parts, ordered by number, so that how they were read does not matter."""
    if not parts:
        return Shard(
            np.zeros(0, np.int64),
            torch.zeros(0, hidden_size, dtype=torch.float16),
            torch.zeros(0),
            np.zeros(0, np.int8),
        )
    number_B = np.concatenate([number for number, _ in parts])
    order_B = np.argsort(number_B, kind="stable")
    return Shard(
        number_B[order_B],
        torch.from_numpy(np.concatenate([positions.hidden_BH for _, positions in parts])[order_B]),
        torch.from_numpy(np.concatenate([positions.label_B for _, positions in parts])[order_B]),
        np.concatenate([positions.case_B for _, positions in parts])[order_B],
    )


class StoredData:
    """Training data of one process, read from a label store; holds everything."""

    def __init__(self, store: LabelStore, plan: TrainingPlan) -> None:
        self._plan = plan
        self._hidden_size = store.read_manifest().hidden_size
        tables = [read_part(path, SHARD_COLUMNS) for path in plan.files]
        starts = [window.starts for window in plan.windows] + [plan.validation_starts]
        *self._windows, self._validation = shards_of(tables, starts, self._hidden_size)

    @property
    def plan(self) -> TrainingPlan:
        """See `TrainingData`."""
        return self._plan

    @property
    def hidden_size(self) -> int:
        """See `TrainingData`."""
        return self._hidden_size

    def window(self, index: int) -> Shard:
        """See `TrainingData`."""
        return self._windows[index]

    def validation(self) -> Shard:
        """See `TrainingData`."""
        return self._validation
