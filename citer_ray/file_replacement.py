"""Replacing a binary file in one step: a reader, or a killed run, sees the old file or the new one.

The label store and the router's artifact write through it. Temporary files have a fixed pattern, so that
what a killed writer left behind can be recognised and removed. In an object store a file appears when its upload
ends, so the temporary file is on this machine and nothing is left behind there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from citer_ray.errors import DataError
from citer_ray.storage import is_remote, upload

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on a normal exit it is flushed to disk and renamed to `path`.

    For a `path` in an object store it is a local file, which is uploaded in the end.

    Raises:
        DataError: the folder cannot be written or the disk is full; `path` is as it was.
    """
    temporary: Path | None = None
    try:
        if is_remote(path):
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / path.name
                local.touch()
                yield local
                upload(local, path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free space or fix permissions and run again, "
            "what is finished is kept"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def remove_orphans(folder: Path, stem: str) -> list[Path]:
    """Remove temporary files of targets whose name starts with `stem`, while nobody writes to `folder`."""
    if is_remote(folder):
        return []
    orphans = sorted(folder.glob(f".{stem}*{TEMPORARY_SUFFIX}"))
    for orphan in orphans:
        orphan.unlink(missing_ok=True)
    return orphans


def _flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
