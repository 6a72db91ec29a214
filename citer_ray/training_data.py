"""The positions that one worker trains on, as tensors, numbered as the plan numbers them.

Filled from tables of label rows, however they were read (`LabelStore` in one process, Ray Data in
`on_ray/train.py`); read by `training.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """One shard of several parts."""
    shards = [
        Shard(
            number_B,
            torch.from_numpy(positions.hidden_BH),
            torch.from_numpy(positions.label_B),
            positions.case_B,
        )
        for number_B, positions in parts
    ]
    empty = Shard(
        np.zeros(0, np.int64),
        torch.zeros(0, hidden_size, dtype=torch.float16),
        torch.zeros(0),
        np.zeros(0, np.int8),
    )
    return _merge([empty, *shards])


def _merge(shards: list[Shard]) -> Shard:
    """One shard of several, ordered by number, so that how they were read does not matter."""
    number_B = np.concatenate([shard.number_B for shard in shards])
    order_B = np.argsort(number_B, kind="stable")
    return Shard(
        number_B[order_B],
        torch.cat([shard.hidden_BH for shard in shards])[torch.from_numpy(order_B)],
        torch.cat([shard.label_B for shard in shards])[torch.from_numpy(order_B)],
        np.concatenate([shard.case_B for shard in shards])[order_B],
    )


class TrainingData:
    """One worker's positions, a window at a time; all workers have one, over the same plan.

    The validation part is held. Of the training part one window is held if it is the only one; else each window is
    read again when it is its turn, so that memory is bounded by the plan's window size.

    Attributes:
        plan: the plan that all workers share.
        hidden_size: H.
    """

    def __init__(self, plan: TrainingPlan, hidden_size: int, read_window: Callable[[int], Iterable[pa.Table]]) -> None:
        """Read everything once.

        Args:
            plan: the plan.
            hidden_size: H.
            read_window: reads this worker's label rows of a window, with `SHARD_COLUMNS`.
        """
        self.plan = plan
        self.hidden_size = hidden_size
        self._read_window = read_window
        self._only_window: Shard | None = None
        validation = []
        for index, window in enumerate(plan.windows):
            starts = [window.starts, plan.validation_starts]
            train, held_out = shards_of(read_window(index), starts, hidden_size)
            validation.append(held_out)
            if len(plan.windows) == 1:
                self._only_window = train
        self._validation = _merge(validation)

    def window(self, index: int) -> Shard:
        """This worker's training positions of a window."""
        if self._only_window is not None:
            return self._only_window
        starts = [self.plan.windows[index].starts]
        return shards_of(self._read_window(index), starts, self.hidden_size)[0]

    def validation(self) -> Shard:
        """This worker's validation positions."""
        return self._validation


def stored_data(store: LabelStore, plan: TrainingPlan, *, rank: int = 0, workers: int = 1) -> TrainingData:
    """The training data of one of several workers, read from a label store; worker r has every `workers`-th file."""

    def read_window(index: int) -> Iterator[pa.Table]:
        for path in worker_files(plan, index, rank=rank, workers=workers):
            yield read_part(path, SHARD_COLUMNS)

    return TrainingData(plan, store.read_manifest().hidden_size, read_window)


def worker_files(plan: TrainingPlan, window: int, *, rank: int, workers: int) -> list[Path]:
    """The label files of a window that a worker reads: its shard, so that no file is read twice."""
    return [plan.files[file] for file in plan.windows[window].files[rank::workers]]
