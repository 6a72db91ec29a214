"""The plan: split by example, windows, batches without a remainder of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from citer_ray.errors import DataError
from citer_ray.label_store import LabelStore
from citer_ray.training_plan import (
    LabelledExample,
    TrainingPlan,
    Window,
    make_plan,
    plan_examples,
    validation_ids,
)
from tests.unit.test_label_store import chunk_table


def plan_of(sizes: list[list[int]], *, fraction: float = 0.2, limit: int = 10**9, seed: int = 0) -> TrainingPlan:
    """A plan of files whose examples have these many labels, all of them 1 in even files and 0 in odd ones."""
    examples = [
        LabelledExample(f"{file}-{index}", file, size, float(size * (file % 2 == 0)))
        for file, counts in enumerate(sizes)
        for index, size in enumerate(counts)
    ]
    return plan_examples(
        examples,
        files=[Path(f"part-{file}") for file in range(len(sizes))],
        validation_fraction=fraction,
        window_positions=limit,
        seed=seed,
    )


def test_every_labelled_position_is_in_exactly_one_part() -> None:
    plan = plan_of([[3, 0, 5], [2, 2], [7]], fraction=0.4)
    (window,) = plan.windows
    names = [*window.starts, *plan.validation_starts]
    assert sorted(names) == ["0-0", "0-2", "1-0", "1-1", "2-0"]
    assert len(plan.validation_starts) == 2
    assert plan.train_examples == 3
    assert plan.train_positions + plan.validation_positions == 19


def test_numbers_of_examples_follow_each_other() -> None:
    (window,) = plan_of([[3, 4, 5]], fraction=0.01).windows
    sizes = {"0-0": 3, "0-1": 4, "0-2": 5}
    expected = 0
    for name, start in window.starts.items():
        assert start == expected
        expected += sizes[name]
    assert window.positions == expected


def test_the_split_is_by_example_and_the_same_for_every_seed() -> None:
    plans = [plan_of([[5] * 20, [5] * 20], seed=seed) for seed in (0, 1)]
    assert plans[0].validation_starts == plans[1].validation_starts
    assert len(plans[0].validation_starts) == 8


@settings(deadline=None, max_examples=50)
@given(st.sets(st.text(max_size=4), min_size=2, max_size=30), st.floats(0.001, 0.999))
def test_both_parts_are_never_empty_by_the_fraction(names: set[str], fraction: float) -> None:
    held_out = validation_ids(names, fraction)
    assert held_out < names
    assert held_out == validation_ids(sorted(names), fraction) or not held_out
    if round(fraction * len(names)) < len(names):
        assert len(held_out) == max(1, round(fraction * len(names)))


def test_the_label_mean_is_that_of_training_positions() -> None:
    plan = plan_of([[4] * 10, [4] * 10])
    (window,) = plan.windows
    ones = sum(4 for name in window.starts if name.startswith("0-"))
    assert plan.label_mean == pytest.approx(ones / plan.train_positions)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=2, max_size=12), st.integers(2, 100))
def test_windows_hold_every_file_once_and_never_a_single_position(sizes: list[list[int]], limit: int) -> None:
    try:
        plan = plan_of(sizes, limit=limit)
    except DataError:
        return
    assert sorted(file for window in plan.windows for file in window.files) == list(range(len(sizes)))
    assert all(window.positions >= 2 for window in plan.windows)
    largest = max(sum(counts) for counts in sizes)
    assert all(window.positions <= limit + largest for window in plan.windows)


def test_windows_bound_what_is_held() -> None:
    plan = plan_of([[50] * 4 for _ in range(10)], limit=450)
    assert len(plan.windows) >= 4
    assert all(window.positions <= 450 for window in plan.windows)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 3000), st.integers(2, 500))
def test_batches_are_a_permutation_and_never_of_one_position(positions: int, batch_size: int) -> None:
    window = Window((0,), {}, positions)
    batches = window.batches(batch_size, seed=1, epoch=2, index=3)
    assert sorted(np.concatenate(batches).tolist()) == list(range(positions))
    sizes = {len(batch) for batch in batches}
    assert min(sizes) >= min(batch_size, positions)
    assert max(sizes) - min(sizes) <= 1
    assert len(batches) == window.num_batches(batch_size)


def test_each_epoch_is_shuffled_anew_and_reproducibly() -> None:
    window = Window((0,), {}, 100)
    first, second, again = (window.batches(100, 5, epoch, 0)[0].tolist() for epoch in (0, 1, 0))
    assert first == again
    assert first != second
    assert first != window.batches(100, 6, 0, 0)[0].tolist()


def test_an_example_that_occurs_twice_is_refused() -> None:
    examples = [LabelledExample("a", 0, 2, 1.0), LabelledExample("a", 1, 2, 1.0)]
    with pytest.raises(DataError, match="example a is in the labels twice"):
        plan_examples(examples, files=[], validation_fraction=0.1, window_positions=10, seed=0)


@pytest.mark.parametrize("sizes", [[[]], [[5]], [[0, 5]], [[1, 1]]])
def test_too_few_labels_are_refused(sizes: list[list[int]]) -> None:
    with pytest.raises(DataError, match="too few"):
        plan_of(sizes)


def test_a_plan_of_stored_labels_counts_labelled_positions_only(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    for chunk in (4, 1):
        store.write_chunk(chunk, chunk_table(chunk))
    plan = make_plan(store, validation_fraction=0.5, window_positions=100, seed=0)
    assert [path.name for path in plan.files] == ["part-00001.parquet", "part-00004.parquet"]
    assert plan.train_positions + plan.validation_positions == 2 * (2 + 3)
