"""Rows of files, hub data sets and embedded problems, with their numbers and what makes them unreadable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from citer_ray.errors import ConfigError, DataError
from citer_ray.example_sources import NumberedRow, read_rows
from citer_ray.pair.embedded.problems import FAMILIES


def rows_of(source: str | Path, **options: Any) -> list[NumberedRow]:
    return list(read_rows(str(source), **{"split": "train", "limit": None, "families": None, **options}))


def test_jsonl_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": \n\xff\n[' + b"[" * 100_000 + b"\n7\n" + '"é"'.encode())
    rows = rows_of(path)
    assert [row.number for row in rows] == [1, 4, 5, 6, 7, 8]
    assert [row.row for row in rows] == [{"a": 1}, None, None, None, 7, "é"]
    reasons = [row.reason or "" for row in rows]
    assert "not valid JSON" in reasons[1]
    assert "not UTF-8 text: byte 0xff at position 0" in reasons[2]
    assert "not valid JSON" in reasons[3]


def test_a_huge_integer_is_a_bad_line_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1' + "0" * 5000 + "}\n{}\n")
    rows = rows_of(path)
    assert "not valid JSON" in (rows[0].reason or "")
    assert rows[1].row == {}


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.PARQUET"
    rows = [{"id": str(n), "choices": {"label": ["A", "B"], "text": ["x", "y"]}} for n in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert rows_of(path) == [NumberedRow(number, row) for number, row in enumerate(rows, start=1)]


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        rows_of(path)


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> Iterator[dict[str, int]]:
        asked.append((name, config, split))
        return iter([{"a": 1}, {"a": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert rows_of("hub:openai/gsm8k:main", split="test") == [
        NumberedRow(1, {"a": 1}),
        NumberedRow(2, {"a": 2}),
    ]
    rows_of("hub:tau/commonsense_qa")
    assert asked == [("openai/gsm8k", "main", "test"), ("tau/commonsense_qa", None, "train")]


def test_a_hub_error_names_the_data_set_and_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'train' of the data set 'hub:a/b': no route$"):
        rows_of("hub:a/b")


def test_embedded_problems() -> None:
    rows = [row.row for row in rows_of("embedded:test:5")]
    assert len(rows) == 5
    assert all(isinstance(row, dict) and row["question"] and row["task"] == "math" for row in rows)
    assert [row.row for row in rows_of("embedded:test", limit=3)] == rows[:3]
    named = rows_of(f"embedded:test:4:{FAMILIES[1]}")
    assert named == rows_of("embedded:test:4", families=[FAMILIES[1]])
    assert {row.row["family"] for row in named if isinstance(row.row, dict)} == {FAMILIES[1]}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("rows.csv", {}, "use a .jsonl or .parquet file, hub:NAME"),
        ("rows", {}, "use a .jsonl or .parquet file"),
        ("hub:", {}, "names no data set"),
        ("embedded:", {}, "embedded:SPLIT"),
        ("embedded:test:0", {}, "COUNT at least 1"),
        ("embedded:test:3:items:x", {}, "embedded:SPLIT"),
        ("embedded:holdout:3", {}, "unknown split 'holdout'"),
        ("embedded:test:3:nonsense", {}, "unknown families"),
        (f"embedded:test:3:{FAMILIES[0]}", {"families": [FAMILIES[0]]}, "use one of them"),
        ("rows.jsonl", {"families": ["items"]}, "choose embedded problems"),
    ],
)
def test_sources_that_cannot_be_understood(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(source, **options)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file of examples: .*nowhere\.jsonl"):
        rows_of(tmp_path / "nowhere.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"folder\.jsonl"):
        rows_of(tmp_path / "folder.jsonl")
