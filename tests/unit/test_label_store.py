"""The label store: chunks, resume, manifest, digests, damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from citer_ray.errors import DataError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelManifest, LabelStore, hidden_size_of
from tests.unit.test_label_rows import H, make_row


def make_manifest(**changes: object) -> LabelManifest:
    values: dict[str, object] = {
        "fingerprint": PairFingerprint(slm="s", llm="l", tokenizer="t"),
        "hidden_size": H,
        "config_digest": "abc",
        "data_digest": "def",
        "round": 1,
        "examples": 2,
        "positions": 8,
        "cases": {"slm_correct": 4, "llm_correct": 2, "both_wrong": 2},
        "labels": 6,
        "slm_labels": 2.5,
        "tokens": 20,
        "tokens_per_second": 100.0,
        "rollouts": 4,
        "rollout_tokens": 18,
        "quarantined": 0,
    }
    return LabelManifest.model_validate(values | changes)


def chunk_table(chunk: int, examples: int = 2) -> pa.Table:
    rows = [make_row(f"{chunk}-{index}", 3 + index, seed=chunk, chunk=chunk) for index in range(examples)]
    return rows_to_table(rows, H)


def test_chunks_are_done_iff_their_file_is_there(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path / "labels", digest="abc")
    assert store.done_chunks() == []
    assert store.write_chunk(12, chunk_table(12)).name == "part-00012.parquet"
    store.write_chunk(3, chunk_table(3))
    assert LabelStore.open(tmp_path / "labels", digest="abc").done_chunks() == [3, 12]


def test_rows_come_back_by_chunk_and_column(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    for chunk in (5, 0, 100_000):
        store.write_chunk(chunk, chunk_table(chunk))
    table = store.read_rows(["example_id", "chunk"])
    assert table.column_names == ["example_id", "chunk"]
    assert table["chunk"].to_pylist() == [0, 0, 5, 5, 100_000, 100_000]
    # Parquet calls the items of lists "element", so compare values and what the file says of itself.
    first = next(iter(store.tables()))
    assert first.to_pylist() == chunk_table(0).to_pylist()
    assert hidden_size_of(first) == H


def test_the_same_chunk_gives_the_same_bytes(tmp_path: Path) -> None:
    stores = [LabelStore.open(tmp_path / name, digest="abc") for name in ("a", "b")]
    first, second = (store.write_chunk(7, chunk_table(7)).read_bytes() for store in stores)
    assert first == second


def test_positions_leave_out_what_has_no_label(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    store.write_chunk(0, chunk_table(0))
    ((table, positions),) = store.positions()
    assert "hidden" not in table.column_names
    assert positions.row_B.tolist() == [0, 0, 1, 1, 1]
    assert positions.position_B.tolist() == [0, 2, 0, 2, 3]
    assert not np.isnan(positions.label_B).any()
    ((_, everything),) = store.positions(labelled_only=False)
    assert len(everything) == 7


def test_another_digest_is_refused_and_both_are_named(tmp_path: Path) -> None:
    LabelStore.open(tmp_path, digest="abc")
    with pytest.raises(DataError, match=r"abc.*xyz.*output_dir"):
        LabelStore.open(tmp_path, digest="xyz")


def test_labels_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    LabelStore(tmp_path).write_chunk(0, chunk_table(0))
    with pytest.raises(DataError, match="origin is unknown"):
        LabelStore.open(tmp_path, digest="abc")


def test_opening_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    store.write_chunk(0, chunk_table(0))
    orphan = tmp_path / ".part-00001.parquet.x1y2.tmp"
    orphan.write_bytes(b"half a file")
    assert LabelStore.open(tmp_path, digest="abc").done_chunks() == [0]
    assert not orphan.exists()


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    before = store.write_chunk(0, chunk_table(0)).read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("citer_ray.label_store.pq.write_table", full)
    with pytest.raises(DataError, match="No space left on device"):
        store.write_chunk(0, chunk_table(1))
    with pytest.raises(DataError, match=r"part-00001\.parquet.*No space left on device"):
        store.write_chunk(1, chunk_table(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digest.json", "part-00000.parquet"]
    assert store.part(0).read_bytes() == before


def test_a_table_of_another_schema_is_refused(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    with pytest.raises(DataError, match="not in the label schema"):
        store.write_chunk(0, chunk_table(0).drop_columns(["round"]))
    with pytest.raises(DataError, match="does not say hidden_size"):
        store.write_chunk(0, chunk_table(0).replace_schema_metadata(None))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    path = store.write_chunk(0, chunk_table(0))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"part-00000\.parquet cannot be read.*collect again"):
        store.read_rows()


def test_the_manifest_comes_last_and_round_trips(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    assert not store.is_complete()
    with pytest.raises(DataError, match="no complete labels"):
        store.read_manifest()
    store.write_manifest(make_manifest())
    assert store.is_complete()
    assert store.read_manifest() == make_manifest()


def test_the_manifests_digest_leaves_out_the_speed() -> None:
    assert make_manifest().digest() == make_manifest(tokens_per_second=1.0).digest()
    assert make_manifest().digest() != make_manifest(rollouts=5).digest()


@pytest.mark.parametrize("name", ["manifest.json", "digest.json"])
def test_a_newer_schema_is_refused(tmp_path: Path, name: str) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    store.write_manifest(make_manifest())
    content = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(content | {"schema_version": 99}))
    with pytest.raises(DataError, match="schema version 99"):
        _ = store.read_manifest() if name == "manifest.json" else store.digest()


def test_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    store = LabelStore.open(tmp_path, digest="abc")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json cannot be read"):
        store.read_manifest()
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    with pytest.raises(DataError, match="not a label manifest"):
        store.read_manifest()


def test_an_empty_folder_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no labels"):
        LabelStore(tmp_path / "missing").read_rows()
