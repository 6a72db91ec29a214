"""A worker's positions: numbering, shards of several workers, windows that are read again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import torch

from citer_ray.label_store import LabelStore, read_part
from citer_ray.training_data import SHARD_COLUMNS, Shard, TrainingData, stored_data
from citer_ray.training_plan import TrainingPlan, make_plan
from tests.planted_labels import HIDDEN_SIZE, write_planted_labels


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LabelStore:
    return write_planted_labels(tmp_path_factory.mktemp("labels"))


def plan_of(store: LabelStore, window_positions: int = 10**6) -> TrainingPlan:
    return make_plan(store, validation_fraction=0.25, window_positions=window_positions, seed=0)


def expected_positions(store: LabelStore, starts: dict[str, int]) -> dict[int, tuple[list[float], float, int]]:
    """Number -> (hidden state, label, case), written out row by row."""
    expected = {}
    for table in store.tables():
        for row in table.to_pylist():
            if row["example_id"] not in starts:
                continue
            hidden = np.frombuffer(row["hidden"], "<f2").reshape(-1, HIDDEN_SIZE)
            number = starts[row["example_id"]]
            for position, label in enumerate(row["label"]):
                if label is not None:
                    expected[number] = (hidden[position].tolist(), label, row["case"][position])
                    number += 1
    return expected


def as_dict(*shards: Shard) -> dict[int, tuple[list[float], float, int]]:
    found = {}
    for shard in shards:
        for row, number in enumerate(shard.number_B.tolist()):
            assert number not in found
            found[number] = (shard.hidden_BH[row].tolist(), shard.label_B[row].item(), int(shard.case_B[row]))
    return found


def test_positions_have_the_plans_numbers(store: LabelStore) -> None:
    plan = plan_of(store)
    data = stored_data(store, plan)
    assert as_dict(data.window(0)) == expected_positions(store, plan.windows[0].starts)
    assert as_dict(data.validation()) == expected_positions(store, plan.validation_starts)
    assert len(data.window(0)) == plan.train_positions
    assert len(data.validation()) == plan.validation_positions


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_shards_of_several_workers_are_disjoint_and_complete(store: LabelStore, workers: int) -> None:
    plan = plan_of(store)
    shards = [stored_data(store, plan, rank=rank, workers=workers) for rank in range(workers)]
    assert as_dict(*(data.window(0) for data in shards)) == expected_positions(store, plan.windows[0].starts)
    assert as_dict(*(data.validation() for data in shards)) == expected_positions(store, plan.validation_starts)


def test_several_windows_are_read_again_and_one_is_held(store: LabelStore) -> None:
    reads: list[int] = []

    def data_of(plan: TrainingPlan) -> TrainingData:
        def read_window(index: int) -> Iterator[pa.Table]:
            reads.append(index)
            for file in plan.windows[index].files:
                yield read_part(plan.files[file], SHARD_COLUMNS)

        return TrainingData(plan, HIDDEN_SIZE, read_window)

    one = data_of(plan_of(store))
    assert (len(one.plan.windows), reads) == (1, [0])
    one.window(0)
    assert reads == [0]
    reads.clear()
    many = data_of(plan_of(store, 150))
    windows = len(many.plan.windows)
    assert windows >= 3
    assert reads == list(range(windows))
    again = many.window(1)
    assert reads[-1] == 1
    assert as_dict(again) == expected_positions(store, many.plan.windows[1].starts)
    assert as_dict(many.validation()) == expected_positions(store, many.plan.validation_starts)


def test_the_order_of_reading_does_not_matter(store: LabelStore) -> None:
    plan = plan_of(store)

    def backwards(index: int) -> Iterator[pa.Table]:
        for file in reversed(plan.windows[index].files):
            table = read_part(plan.files[file], SHARD_COLUMNS)
            yield from (table.slice(row, 1) for row in reversed(range(table.num_rows)))

    shard, expected = TrainingData(plan, HIDDEN_SIZE, backwards).window(0), stored_data(store, plan).window(0)
    np.testing.assert_array_equal(shard.number_B, expected.number_B)
    assert torch.equal(shard.hidden_BH, expected.hidden_BH)
    assert torch.equal(shard.label_B, expected.label_B)
    np.testing.assert_array_equal(shard.case_B, expected.case_B)


def test_a_worker_without_files_holds_nothing(store: LabelStore) -> None:
    data = stored_data(store, plan_of(store), rank=40, workers=41)
    assert len(data.window(0)) == len(data.validation()) == 0
    assert data.window(0).hidden_BH.shape == (0, HIDDEN_SIZE)
