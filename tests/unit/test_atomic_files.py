"""Files appear whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from citer_ray.atomic_files import write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = write_text(tmp_path / "new" / "a.json", "Größe\n")
    assert path.read_text(encoding="utf-8") == "Größe\n"
    write_text(path, "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "a.json", "old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
