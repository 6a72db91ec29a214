"""Which positions are trained on, in which order: decided once, before any worker starts.

Made from the labels alone (no hidden states), so it is cheap; read by `training.py` and `on_ray/train.py`.
Examples are split into a training and a validation part. Training positions are numbered within windows of
label files; a window is what is shuffled together, and its size bounds memory. Numbers, batches and seeds do
not depend on how many
workers there are or which of them holds a position: so n workers compute what one computes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from citer_ray.errors import DataError
from citer_ray.label_store import LabelStore

PLAN_COLUMNS = ("example_id", "label")


@dataclass(frozen=True, slots=True)
class LabelledExample:
    """What the plan needs of one example: where it is, and how many of its positions have which label."""

    example_id: str
    file: int
    labels: int
    label_sum: float


@dataclass(frozen=True, slots=True)
class Window:
    """Label files whose training positions are shuffled together.

    Attributes:
        files: indices into the plan's files.
        starts: number of the first training position of each training example that has labels.
        positions: training positions in the window.
    """

    files: tuple[int, ...]
    starts: dict[str, int]
    positions: int

    def batches(self, batch_size: int, seed: int, epoch: int, index: int) -> list[npt.NDArray[np.int64]]:
        """The window's position numbers in batches, newly shuffled for each epoch.

        Batches are equal to within one position, and none is smaller than `batch_size` unless the window is:
            a
        remainder, which might be a single position, never makes a batch of its own.
        """
        generator = np.random.default_rng([seed, epoch, index])
        return np.array_split(generator.permutation(self.positions), self.num_batches(batch_size))

    def num_batches(self, batch_size: int) -> int:
        """How many batches that are."""
        return max(1, self.positions // batch_size)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The split and the order.

    Attributes:
        files: label files.
        windows: training positions; each window has at least 2.
        validation_starts: number of the first position of each validation example that has labels.
        validation_positions: positions of the validation part.
        train_examples: training examples that have labels.
        label_mean: mean label of the training positions.
    """

    files: tuple[Path, ...]
    windows: tuple[Window, ...]
    validation_starts: dict[str, int]
    validation_positions: int
    train_examples: int
    label_mean: float

    @property
    def train_positions(self) -> int:
        """Training positions in all windows."""
        return sum(window.positions for window in self.windows)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Batches in an epoch."""
        return sum(window.num_batches(batch_size) for window in self.windows)


def make_plan(store: LabelStore, *, validation_fraction: float, window_positions: int, seed: int) -> TrainingPlan:
    """Read the label files' ids and labels and plan the training.

    Args:
        store: a complete collection.
        validation_fraction: part of the examples that is held out.
        window_positions: positions after which a window is full, so an upper limit of what is held at once.
        seed: shuffles the files before they are put into windows.

    Raises:
        DataError: an example occurs twice, or there are too few labelled examples.
    """
    files = store.parts()
    tables = (table for table in store.tables(PLAN_COLUMNS))
    return plan_examples(
        [example for file, table in enumerate(tables) for example in labelled_examples(table, file)],
        files=files,
        validation_fraction=validation_fraction,
        window_positions=window_positions,
        seed=seed,
    )


def labelled_examples(table: pa.Table, file: int) -> list[LabelledExample]:
    """Count the labels of each row of a table with `PLAN_COLUMNS`."""
    counts = []
    for example_id, labels in zip(table["example_id"].to_pylist(), table["label"].to_pylist(), strict=True):
        values = [label for label in labels if label is not None]
        counts.append(LabelledExample(example_id, file, len(values), float(sum(values))))
    return counts


def plan_examples(
    examples: Sequence[LabelledExample],
    *,
    files: Sequence[Path],
    validation_fraction: float,
    window_positions: int,
    seed: int,
) -> TrainingPlan:
    """Plan from counted labels; see `make_plan`."""
    _refuse_duplicates(examples)
    labelled = [example for example in examples if example.labels]
    held_out = validation_ids([example.example_id for example in labelled], validation_fraction)
    train = [example for example in labelled if example.example_id not in held_out]
    if not held_out or sum(example.labels for example in train) < 2:
        raise DataError(
            f"{len(labelled)} labelled examples with {sum(example.labels for example in labelled)} labels "
            "are too few "
            "to fit a router and hold some out; label more examples (data.collect, data.collect_limit)"
        )
    order = np.random.default_rng(seed).permutation(len(files)).tolist()
    validation = [example for example in labelled if example.example_id in held_out]
    validation_starts, validation_positions = _number(validation)
    return TrainingPlan(
        files=tuple(files),
        windows=tuple(_windows(train, order, window_positions)),
        validation_starts=validation_starts,
        validation_positions=validation_positions,
        train_examples=len(train),
        label_mean=math.fsum(example.label_sum for example in train) / sum(example.labels for example in train),
    )


def validation_ids(example_ids: Iterable[str], fraction: float) -> frozenset[str]:
    """The examples that are held out: those with the smallest hashes, `fraction` of them and at least one.

    By example and never by token, and the same examples in every round, for every seed: a router never sees
        what it
    is validated on, not even through the rollouts of the router before it. Empty if that left nothing to
    train on.
    """
    ranked = sorted(example_ids, key=lambda name: hashlib.sha256(b"validation:" + name.encode()).digest())
    count = max(1, round(fraction * len(ranked)))
    return frozenset(ranked[:count]) if count < len(ranked) else frozenset()


def _refuse_duplicates(examples: Sequence[LabelledExample]) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.example_id in seen:
            raise DataError(f"example {example.example_id} is in the labels twice; delete the folder, collect again")
        seen.add(example.example_id)


def _windows(train: Sequence[LabelledExample], order: Sequence[int], limit: int) -> list[Window]:
    """Put files into windows of about `limit` positions; a last one that is too small joins the previous."""
    by_file: dict[int, list[LabelledExample]] = {}
    for example in train:
        by_file.setdefault(example.file, []).append(example)
    groups: list[list[int]] = [[]]
    held = 0
    for file in order:
        size = sum(example.labels for example in by_file.get(file, []))
        if held >= 2 and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(file)
        held += size
    if len(groups) > 1 and held < 2:
        groups[-2].extend(groups.pop())
    windows = []
    for group in groups:
        starts, positions = _number([example for file in sorted(group) for example in by_file.get(file, [])])
        windows.append(Window(tuple(sorted(group)), starts, positions))
    return windows


def _number(examples: Sequence[LabelledExample]) -> tuple[dict[str, int], int]:
    """Number positions consecutively: the first number of each example, and how many there are."""
    starts: dict[str, int] = {}
    total = 0
    for example in examples:
        starts[example.example_id] = total
        total += example.labels
    return starts, total
