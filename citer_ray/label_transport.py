"""Label rows as bytes, for moving a chunk between the collection's worker pools, and back from a table.

The bytes are an Arrow stream in the label schema: no pickle, and the same checks as when labels are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from citer_ray.label_rows import HIDDEN_DTYPE, LabelRow, rows_to_table
from citer_ray.label_store import hidden_size_of


def rows_to_bytes(rows: Sequence[LabelRow]) -> bytes:
    """One Arrow stream of one or more rows.

    Raises:
        DataError: a row does not fit the label schema.
    """
    table = rows_to_table(rows, rows[0].hidden.shape[1])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def rows_from_bytes(data: bytes) -> list[LabelRow]:
    """The inverse of `rows_to_bytes`, but for hidden states, which are float16 now."""
    with pa.ipc.open_stream(data) as reader:
        return rows_from_table(reader.read_all())


def rows_from_table(table: pa.Table) -> list[LabelRow]:
    """The rows of a table in the label schema."""
    hidden_size = hidden_size_of(table)
    rows = []
    for values in table.to_pylist():
        hidden = np.frombuffer(values.pop("hidden"), HIDDEN_DTYPE).reshape(-1, hidden_size)
        rows.append(LabelRow(hidden=hidden, **values))
    return rows
