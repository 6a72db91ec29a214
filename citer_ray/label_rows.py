"""Label rows: one example with a case, a label and the SLM's hidden state at every position of its reference.

The collection builds `LabelRow`s; `label_store` keeps them as Parquet in the schema below; `explode` turns
them into the positions that the router is fitted on.

Hidden states are one binary value a row: float16, little-endian, [T, H] in C order. Measured on 100,000
positions of 64 floats, that reads about 7 times faster than a list of fixed-size lists, which Parquet
decodes number by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from citer_ray.errors import DataError
from citer_ray.labels import Case

HIDDEN_DTYPE = np.dtype("<f2")
HIDDEN_SIZE_KEY = b"hidden_size"


@dataclass(frozen=True, slots=True)
class LabelRow:
    """The labels of one example; the sequences have one entry for each of the T reference positions.

    Attributes:
        example_id: unique in a collection.
        prompt_ids: the prompt's token ids.
        reference_ids: the reference's token ids, EOS included.
        slm_ids: the SLM's greedy tokens.
        llm_ids: the LLM's greedy tokens, None where they were not needed.
        case: a `Case` for each position.
        label: 1 prefers the SLM, 0 the LLM, between them a fraction of rollouts; None where there is no
            label.
        hidden: float [T, H]; the SLM's hidden states after the final norm, stored as float16.
        round: the round that made the labels, from 1.
        rollouts: rollouts that were decoded for the example.
        rollout_tokens: tokens that they wrote.
        chunk: number of the chunk of examples.
    """

    example_id: str
    prompt_ids: Sequence[int]
    reference_ids: Sequence[int]
    slm_ids: Sequence[int]
    llm_ids: Sequence[int | None]
    case: Sequence[int]
    label: Sequence[float | None]
    hidden: npt.NDArray[np.floating]
    round: int
    rollouts: int
    rollout_tokens: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of several rows, in order.

    Attributes:
        row_B: int64; the row of the table that a position belongs to.
        position_B: int64; the position in that row's reference.
        hidden_BH: float16.
        label_B: float32; NaN where there is no label.
        case_B: int8.
    """

    row_B: npt.NDArray[np.int64]
    position_B: npt.NDArray[np.int64]
    hidden_BH: npt.NDArray[np.float16]
    label_B: npt.NDArray[np.float32]
    case_B: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.label_B)

    def select(self, keep_B: npt.NDArray[np.bool_]) -> Positions:
        """The positions where `keep_B` is true."""
        return Positions(
            self.row_B[keep_B],
            self.position_B[keep_B],
            self.hidden_BH[keep_B],
            self.label_B[keep_B],
            self.case_B[keep_B],
        )


def label_schema(hidden_size: int) -> pa.Schema:
    """The Arrow schema of label files."""
    ids = pa.list_(pa.int32())
    return pa.schema(
        [
            pa.field("example_id", pa.string(), nullable=False),
            pa.field("prompt_ids", ids, nullable=False),
            pa.field("reference_ids", ids, nullable=False),
            pa.field("slm_ids", ids, nullable=False),
            pa.field("llm_ids", ids, nullable=False),
            pa.field("case", pa.list_(pa.int8()), nullable=False),
            pa.field("label", pa.list_(pa.float32()), nullable=False),
            pa.field("hidden", pa.large_binary(), nullable=False),
            pa.field("round", pa.int32(), nullable=False),
            pa.field("rollouts", pa.int32(), nullable=False),
            pa.field("rollout_tokens", pa.int64(), nullable=False),
            pa.field("chunk", pa.int32(), nullable=False),
        ],
        metadata={
            HIDDEN_SIZE_KEY: str(hidden_size).encode(),
            b"hidden_dtype": b"float16, little-endian, [T, H]",
        },
    )


def rows_to_table(rows: Iterable[LabelRow], hidden_size: int) -> pa.Table:
    """Check rows and put them into the schema.

    Raises:
        DataError: lengths differ, hidden states have the wrong shape or do not fit float16, or a case or
            label is out of range; the message names the example.
    """
    rows = list(rows)
    names = label_schema(hidden_size).names
    columns: dict[str, list[object]] = {name: [] for name in names}
    for row in rows:
        hidden = _checked_hidden(row, hidden_size)
        _check_lists(row)
        for name in names:
            columns[name].append(hidden.tobytes() if name == "hidden" else getattr(row, name))
    return pa.table(columns, schema=label_schema(hidden_size))


def _check_lists(row: LabelRow) -> None:
    """Refuse lists of another length than the reference, and values out of range."""
    expected = len(row.reference_ids)
    for name in ("slm_ids", "llm_ids", "case", "label"):
        got = len(getattr(row, name))
        if got != expected:
            raise DataError(f"example {row.example_id}: {name} has {got} entries, the reference has {expected}")
    cases = {int(case) for case in Case}
    if not cases.issuperset(int(case) for case in row.case):
        raise DataError(f"example {row.example_id}: case must be one of {sorted(cases)}, got {sorted(set(row.case))}")
    for position, label in enumerate(row.label):
        if label is not None and not 0.0 <= label <= 1.0:
            raise DataError(f"example {row.example_id}, position {position}: label {label} is not in [0, 1]")


def _checked_hidden(row: LabelRow, hidden_size: int) -> npt.NDArray[np.float16]:
    """The row's hidden states as contiguous float16 [T, H]."""
    expected = (len(row.reference_ids), hidden_size)
    if row.hidden.shape != expected:
        raise DataError(f"example {row.example_id}: hidden has shape {row.hidden.shape}, expected {expected}")
    with np.errstate(over="ignore"):  # an overflow is reported below, with the example's name
        hidden = np.ascontiguousarray(row.hidden, dtype=HIDDEN_DTYPE)
    bad = int(np.count_nonzero(~np.isfinite(hidden)))
    if bad:
        raise DataError(
            f"example {row.example_id}: {bad} of {hidden.size} hidden values are NaN, infinite or beyond "
            f"float16 (largest magnitude before: {float(np.nanmax(np.abs(row.hidden))):.6g}); check the "
            "SLM's dtype"
        )
    return hidden


def explode(table: pa.Table, hidden_size: int) -> Positions:
    """All positions of the rows, in order, hidden states without a copy where the table is one chunk.

    Args:
        table: at least the columns `label`, `case` and `hidden`.
        hidden_size: H.

    Raises:
        DataError: the hidden states do not have `hidden_size` numbers for each label.
    """
    label = _one_array(table, "label")
    lengths = np.diff(label.offsets.to_numpy())
    hidden_B = _binary_values(_one_array(table, "hidden"))
    num_positions = int(lengths.sum())
    if len(hidden_B) != num_positions * hidden_size:
        raise DataError(
            f"labels hold {num_positions} positions and {len(hidden_B)} hidden values; that is not "
            f"{hidden_size} for each position, so these labels are of another SLM or damaged: collect again"
        )
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    row_B = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    return Positions(
        row_B=row_B,
        position_B=np.arange(num_positions, dtype=np.int64) - starts[row_B] if num_positions else row_B,
        hidden_BH=hidden_B.reshape(num_positions, hidden_size),
        label_B=label.flatten().to_numpy(zero_copy_only=False).astype(np.float32),
        case_B=_one_array(table, "case").flatten().to_numpy(zero_copy_only=False).astype(np.int8),
    )


def _one_array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _binary_values(array: pa.Array) -> npt.NDArray[np.float16]:
    """The concatenated values of a binary array as float16."""
    array = array.cast(pa.large_binary())  # nothing to do, unless another reader chose 32-bit offsets
    if len(array) == 0:
        return np.zeros(0, dtype=HIDDEN_DTYPE)
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(array.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    return data.view(HIDDEN_DTYPE)
