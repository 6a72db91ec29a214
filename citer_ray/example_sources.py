"""Where rows come from: a JSONL or Parquet file, a hub data set, or the embedded problems.

Yields numbered rows in order, one at a time, and a reason in place of a row that cannot be read; knows
nothing of fields. Read by `examples.load_examples`. Heavy libraries (`pyarrow`, `datasets`) load only for the
sources that need them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from citer_ray.errors import ConfigError, DataError
from citer_ray.storage import is_remote, opened_parquet, storage_path, store_errors

HUB_PREFIX = "hub:"
EMBEDDED_PREFIX = "embedded:"
EMBEDDED_COUNT = 400
PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """A row and its number from 1 (a JSONL file's line), or the reason why it cannot be read."""

    number: int
    row: object = None
    reason: str | None = None


def read_rows(source: str, *, split: str, limit: int | None, families: Sequence[str] | None) -> Iterator[NumberedRow]:
    """Opens a source.

    Args:
        source: A path, a URI of one (`s3://...`), `hub:NAME[:CONFIG]`, or `embedded:SPLIT[:COUNT][:FAMILY,FAMILY]`.
        split: Split of a hub data set.
        limit: How many embedded problems to draw where the source does not say.
        families: Embedded problems only: the families to draw from.

    Raises:
        ConfigError: The source cannot be understood.
        DataError: It does not exist or cannot be opened.
    """
    if source.startswith(EMBEDDED_PREFIX):
        return _embedded_rows(source, limit, families)
    if families is not None:
        raise ConfigError(f"families {list(families)} choose embedded problems, but the source is {source!r}")
    if source.startswith(HUB_PREFIX):
        return _hub_rows(source, split)
    path = storage_path(source)
    readers = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".ndjson": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise ConfigError(
            f"cannot read examples from {source!r}: use a .jsonl or .parquet file, hub:NAME[:CONFIG], "
            "or embedded:SPLIT[:COUNT][:FAMILY,FAMILY]"
        )
    with store_errors(path, "cannot find"):
        if not path.is_file():
            looked = "" if is_remote(path) else f" (looked from {Path.cwd()})"
            raise DataError(f"no such file of examples: {source}{looked}")
    return readers[path.suffix.lower()](path)


def _jsonl_rows(path: Path) -> Iterator[NumberedRow]:
    """One JSON value a line; lines of white space alone are no rows."""
    with store_errors(path, "cannot read"), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield NumberedRow(
                    number, reason=f"not UTF-8 text: byte {line[error.start]:#04x} at position {error.start}"
                )
                continue
            if not text.strip():
                continue
            try:
                yield NumberedRow(number, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield NumberedRow(number, reason=f"not valid JSON: {error}")


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    import pyarrow

    try:
        number = 0
        with opened_parquet(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield NumberedRow(number, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read the Parquet file {path}: {error}") from error


def _hub_rows(source: str, split: str) -> Iterator[NumberedRow]:
    import datasets

    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise ConfigError(f"{source!r} names no data set: use hub:NAME or hub:NAME:CONFIG")
    try:
        rows: Any = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub's client raises errors of many libraries
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"cannot load split {split!r} of the data set {source!r}: {reason}") from error
    return (NumberedRow(number, row) for number, row in enumerate(rows, start=1))


def _embedded_rows(source: str, limit: int | None, families: Sequence[str] | None) -> Iterator[NumberedRow]:
    from citer_ray.pair.embedded import problems

    split, count, named = _parse_embedded(source)
    if named and families is not None:
        raise ConfigError(f"{source!r} names families and so does the setting families: use one of them")
    try:
        drawn = problems.split(
            split,  # type: ignore[arg-type]  # checked by the callee
            count or limit or EMBEDDED_COUNT,
            tuple(named or families or problems.FAMILIES),
        )
    except ValueError as error:
        raise ConfigError(f"{source!r}: {error}") from error
    rows = [
        {
            "id": problem.id,
            "question": problem.question,
            "reference": problem.solution,
            "answer": problem.answer,
            "task": "math",
            "family": problem.family,
        }
        for problem in drawn
    ]
    return (NumberedRow(number, row) for number, row in enumerate(rows, start=1))


def _parse_embedded(source: str) -> tuple[str, int | None, list[str]]:
    split, *rest = source.removeprefix(EMBEDDED_PREFIX).split(":")
    count: int | None = None
    if rest and rest[0].isdecimal():
        count = int(rest.pop(0))
    if not split or len(rest) > 1 or count == 0:
        raise ConfigError(f"cannot read {source!r}: use embedded:SPLIT[:COUNT][:FAMILY,FAMILY], with COUNT at least 1")
    return split, count, [family.strip() for family in rest[0].split(",")] if rest else []
