"""Storage by URI, on fsspec's file system in memory: the same files as on a local path, and what is refused."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError, DataError
from citer_ray.example_sources import read_rows
from citer_ray.file_replacement import remove_orphans, replacing
from citer_ray.label_store import LabelStore, read_part
from citer_ray.mlflow_store import tracking_uri
from citer_ray.mlflow_tracker import MlflowBackend
from citer_ray.preparation import prepare
from citer_ray.storage import (
    absolute,
    arrow_filesystem,
    file_stamp,
    is_remote,
    local_copy,
    make_folder,
    opened_parquet,
    remove_tree,
    storage_path,
    store_errors,
    store_failure,
)
from citer_ray.tracking_backlog import BACKLOG_JSONL, BufferedTracker, Operation
from tests.planted_labels import write_planted_labels

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


@pytest.fixture
def root() -> Iterator[Path]:
    yield storage_path("memory://bucket/run")
    memory = fsspec.filesystem("memory")
    for path in memory.ls("/", detail=False):
        memory.rm(path, recursive=True)


def test_local_paths_stay_plain(tmp_path: Path) -> None:
    assert type(storage_path("runs/one")) is type(Path("runs/one"))
    assert storage_path(f"file://{tmp_path}") == tmp_path
    assert storage_path(tmp_path) is tmp_path
    assert not is_remote(storage_path("runs/s3:/odd"))
    assert absolute(storage_path("runs")).is_absolute()
    assert arrow_filesystem(tmp_path) == (None, str(tmp_path))


def test_remote_paths_join_and_travel(root: Path) -> None:
    path = root / "labels" / "round-1"
    assert is_remote(path) and str(path) == "memory://bucket/run/labels/round-1"
    assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301 (our own)
    assert storage_path(str(path)) == path and absolute(path) == path
    assert storage_path("memory://bucket/run/") == root


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nosuch://bucket/run", "unknown kind"),
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/run", "belong in the environment"),
    ],
)
def test_what_is_no_place_is_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        storage_path(uri)
    assert "secret" not in str(caught.value)


def test_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"pip install 'citer-ray\[gcs\]'"):
        storage_path("gs://bucket/run")


def test_files_are_replaced_in_one_step(root: Path, tmp_path: Path) -> None:
    path = root / "report.json"
    with replacing(path) as temporary:
        temporary.write_text("one", encoding="utf-8")
        assert not path.exists()
    before = file_stamp(path)
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "one" and file_stamp(path) == before
    with replacing(path) as temporary:
        temporary.write_text("two more", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "two more" and file_stamp(path) != before
    with pytest.raises(DataError, match="cannot write memory://bucket/run/full: No space left"):  # noqa: SIM117
        with replacing(root / "full"):
            raise OSError(errno.ENOSPC, "No space left on device")  # on this machine, while the file is written
    assert [one.name for one in root.iterdir()] == ["report.json"]
    assert remove_orphans(root, "report") == []


def test_folders_are_copied_and_removed(root: Path) -> None:
    make_folder(root / "nothing")
    assert not (root / "nothing").exists()
    for name in ("a.txt", "deep/b.txt"):
        with replacing(root / "folder" / name) as temporary:
            temporary.write_text(name, encoding="utf-8")
    with local_copy(root / "folder") as copy:
        assert {str(one.relative_to(copy)) for one in copy.rglob("*.txt")} == {"a.txt", "deep/b.txt"}
        assert (copy / "deep" / "b.txt").read_text(encoding="utf-8") == "deep/b.txt"
    assert not copy.exists()
    with local_copy(root / "folder" / "a.txt") as copy:
        assert copy.read_text(encoding="utf-8") == "a.txt"
    remove_tree(root / "folder")
    assert not (root / "folder").exists()


def test_labels_are_the_same_as_on_a_local_path(root: Path, tmp_path: Path) -> None:
    local, remote = write_planted_labels(tmp_path / "labels"), write_planted_labels(root / "labels")
    assert remote.done_chunks() == local.done_chunks() and len(local.done_chunks()) > 1
    assert remote.read_manifest() == local.read_manifest()
    assert remote.read_rows().equals(local.read_rows())
    assert remote.read_rows(["example_id", "label"]).equals(local.read_rows(["example_id", "label"]))
    remote.part(0).unlink()
    assert remote.done_chunks() == local.done_chunks()[1:]
    remote.part(1).write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"part-00001\.parquet cannot be read"):
        read_part(remote.part(1))
    with pytest.raises(DataError, match="another configuration"):
        LabelStore.open(root / "labels", digest="other")


def test_examples_come_from_a_uri(root: Path, tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
    with replacing(root / "rows.jsonl") as temporary:
        temporary.write_text('{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n')
    with replacing(root / "rows.parquet") as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)
    for name in ("rows.jsonl", "rows.parquet"):
        found = read_rows(f"{root}/{name}", split="train", limit=None, families=None)
        assert [row.row for row in found] == rows
    with pytest.raises(DataError, match=r"no such file of examples: memory://bucket/run/none\.jsonl"):
        read_rows(f"{root}/none.jsonl", split="train", limit=None, families=None)


def test_one_column_is_read_without_the_others(root: Path) -> None:
    with replacing(root / "two.parquet") as temporary:
        pq.write_table(pa.table({"small": [1, 2], "large": ["x" * 1000, "y" * 1000]}), temporary)
    with opened_parquet(root / "two.parquet") as file:
        assert file.read(columns=["small"]).to_pydict() == {"small": [1, 2]}


def test_a_run_is_prepared_at_a_uri_and_needs_a_tracking_uri(root: Path) -> None:
    config = load_config(SMOKE, [f"output_dir={root}"])
    prepared = prepare(config)
    assert prepared.workspace.labels("round-1") == root / "labels" / "round-1"
    assert not root.exists(), "the probe stays"
    with pytest.raises(ConfigError, match=r"set tracking\.uri or MLFLOW_TRACKING_URI"):
        tracking_uri(config, {})
    assert tracking_uri(config, {"MLFLOW_TRACKING_URI": "http://host:5000"}) == "http://host:5000"


class _StoreError(Exception):
    """As botocore's, which derive from Exception alone."""


_StoreError.__module__ = "botocore.exceptions"


def test_a_store_that_refuses_is_one_message(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: object, *arguments: object, **options: object) -> None:
        raise _StoreError("Unable to locate credentials")

    monkeypatch.setattr(type(root.fs), "put_file", refuse)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"cannot write memory://bucket/run/a: .*Unable to locate"):  # noqa: SIM117
        with replacing(root / "a") as temporary:
            temporary.write_text("x")
    monkeypatch.setattr(type(root), "write_bytes", refuse)
    with pytest.raises(ConfigError, match=r"output_dir memory://bucket/run cannot be written: .*Unable to locate"):
        prepare(load_config(SMOKE, [f"output_dir={root}"]))
    assert store_failure(_StoreError("gone")) is not None
    assert store_failure(ValueError("a bug")) is None
    with pytest.raises(ValueError, match="a bug"), store_errors(root, "cannot read"):
        raise ValueError("a bug")
    with pytest.raises(PermissionError), store_errors(tmp_path, "cannot read"):
        raise PermissionError


def test_the_tracking_backlog_and_ids_are_kept_at_a_uri(root: Path) -> None:
    class Away:
        description = "a server"

        def apply(self, operation: Operation) -> str | None:
            from citer_ray.errors import RetryableError

            raise RetryableError("away")

    tracker = BufferedTracker(Away(), root)
    tracker.start_round(1, {"a": 1})
    tracker.log_artifact(root / "report.md")
    tracker.close()
    lines = (root / BACKLOG_JSONL).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4 and '"memory://bucket/run/report.md"' in lines[1]
    assert len(BufferedTracker(Away(), root)._pending) == 4
    MlflowBackend(load_config(SMOKE, [f"output_dir={root}"]), "http://host:5000")
