"""Label rows: the schema, its checks, and rows turned into positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from citer_ray.errors import DataError
from citer_ray.label_rows import LabelRow, explode, label_schema, rows_to_table

H = 3


def make_row(name: str = "a", length: int = 4, *, seed: int = 0, chunk: int = 0) -> LabelRow:
    """A row with one position of each case, a soft label and one position without a label."""
    rng = np.random.default_rng(seed)
    return LabelRow(
        example_id=name,
        prompt_ids=[1, 5, 6],
        reference_ids=list(range(10, 10 + length)),
        slm_ids=[7] * length,
        llm_ids=[None if index == 0 else 8 for index in range(length)],
        case=[index % 3 for index in range(length)],
        label=[None if index == 1 else index / length for index in range(length)],
        hidden=rng.standard_normal((length, H)).astype(np.float32),
        round=1,
        rollouts=2,
        rollout_tokens=9,
        chunk=chunk,
    )


def test_rows_keep_their_values() -> None:
    row = make_row()
    table = rows_to_table([row], H)
    assert table.schema.equals(label_schema(H))
    read = table.to_pylist()[0]
    assert read["llm_ids"] == [None, 8, 8, 8]
    assert read["label"] == [0.0, None, 0.5, 0.75]
    assert (read["round"], read["rollouts"], read["rollout_tokens"], read["chunk"]) == (1, 2, 9, 0)


def test_positions_are_those_of_the_rows_in_order() -> None:
    rows = [make_row("a", 4), make_row("empty", 0), make_row("b", 2, seed=1)]
    positions = explode(rows_to_table(rows, H), H)
    assert positions.row_B.tolist() == [0, 0, 0, 0, 2, 2]
    assert positions.position_B.tolist() == [0, 1, 2, 3, 0, 1]
    assert positions.case_B.tolist() == [0, 1, 2, 0, 0, 1]
    expected = np.concatenate([row.hidden for row in rows]).astype(np.float16)
    np.testing.assert_array_equal(positions.hidden_BH, expected)
    np.testing.assert_array_equal(positions.label_B, np.float32([0, np.nan, 0.5, 0.75, 0, np.nan]))


def test_sliced_and_chunked_tables_give_the_same_positions() -> None:
    rows = [make_row(str(index), 1 + index, seed=index) for index in range(5)]
    whole = rows_to_table(rows, H)
    tail = explode(whole.slice(2), H)
    pieces = explode(pa.concat_tables([whole.slice(2, 1), whole.slice(3)]), H)
    expected = np.concatenate([row.hidden for row in rows[2:]]).astype(np.float16)
    np.testing.assert_array_equal(tail.hidden_BH, expected)
    np.testing.assert_array_equal(pieces.hidden_BH, expected)
    np.testing.assert_array_equal(pieces.label_B, tail.label_B)


def test_no_rows_give_no_positions() -> None:
    positions = explode(rows_to_table([], H), H)
    assert len(positions) == 0
    assert positions.hidden_BH.shape == (0, H)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slm_ids": [1]}, "slm_ids has 1 entries, the reference has 4"),
        ({"hidden": np.zeros((4, H + 1))}, r"shape \(4, 4\), expected \(4, 3\)"),
        ({"hidden": np.full((4, H), 1e6)}, "12 of 12 hidden values .* float16 .*1e\\+06"),
        ({"hidden": np.full((4, H), np.nan)}, "12 of 12 hidden values"),
        ({"case": [0, 1, 2, 3]}, "case must be one of"),
        ({"label": [0.0, 1.0, 1.5, None]}, "position 2: label 1.5"),
        ({"label": [0.0, 1.0, float("nan"), None]}, "position 2: label nan"),
    ],
)
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_bad_rows_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=f"example a.*{message}"):
        rows_to_table([replace(make_row(), **change)], H)


def test_another_hidden_size_is_refused() -> None:
    with pytest.raises(DataError, match="not 5 for each position"):
        explode(rows_to_table([make_row()], H), 5)
