"""Where files lie: a local path, or a folder of an object store by its URI (`s3://bucket/runs`, `gs://...`).

`storage_path` gives an object with pathlib's interface for both: `pathlib.Path` for local ones and a `UPath` of
universal_pathlib over fsspec otherwise, so that the rest of the package asks `is_remote` only where an object store
differs: there are no folders to make, a file is replaced by one upload, and listings are never cached. Credentials come
from the environment of each process (boto's variables for S3), never from here; paths pickle without any.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from citer_ray.errors import CiterError, ConfigError, DataError
from citer_ray.redaction import without_credentials

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_LOCAL = ("file", "local")
_PACKAGES = {"s3": "citer-ray[s3]", "s3a": "citer-ray[s3]", "gs": "citer-ray[gcs]", "gcs": "citer-ray[gcs]"}
_S3_HINT = (
    "check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or the machine's role), and "
    "AWS_ENDPOINT_URL for a server other than Amazon's"
)
_GCS_HINT = "check the bucket's name, and GOOGLE_APPLICATION_CREDENTIALS or the machine's service account"
_HINTS = {"s3": _S3_HINT, "s3a": _S3_HINT, "gs": _GCS_HINT, "gcs": _GCS_HINT}
# Packages whose errors say that a store is away or refuses; none of them derives from OSError.
_STORE_PACKAGES = ("botocore", "aiobotocore", "s3fs", "gcsfs", "aiohttp", "google", "azure")


def storage_path(where: str | Path) -> Path:
    """A path of either kind; nothing is looked up yet.

    Returns:
        `pathlib.Path` for a local path or `file://`, else a `UPath`: the same methods, but no `os.PathLike`.

    Raises:
        ConfigError: the URI's kind is unknown, its driver is not installed, or it holds a password.
    """
    if not isinstance(where, str):
        return where
    scheme, separator, rest = where.partition("://")
    if not separator:
        return Path(where)
    shown = without_credentials(where)
    if urlsplit(where).password is not None:
        raise ConfigError(f"{shown} holds a password; credentials of a store belong in the environment")
    if scheme in _LOCAL:
        return Path("/" + rest.lstrip("/"))
    if not rest.strip("/"):
        raise ConfigError(f"{shown} names no bucket; write for example {scheme}://bucket/runs/name")
    import fsspec
    from upath import UPath

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        install = f"pip install '{package}'" if package else str(error)
        raise ConfigError(f"{shown} needs a driver that is not installed here: {install} (on every node)") from error
    except ValueError as error:
        raise ConfigError(f"{shown} is of an unknown kind; give a path, s3://bucket/folder or gs://...") from error
    # Other processes write to the same folder: a listing that is kept would hide their files.
    return cast("Path", UPath(where.rstrip("/"), use_listings_cache=False))


def is_remote(path: Path) -> bool:
    """Whether a path lies in an object store."""
    return not isinstance(path, Path)


def absolute(path: Path) -> Path:
    """The path, independent of the working directory."""
    return path if is_remote(path) else path.resolve()


def make_folder(path: Path) -> None:
    """Make a folder and those above it. An object store has none, and asking it for one could make a bucket."""
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it."""
    if is_remote(path):
        _filesystem(path).rm(path.path, recursive=True)  # type: ignore[attr-defined]  # a UPath
    else:
        shutil.rmtree(path)


def upload(local: Path, path: Path) -> None:
    """Put a local file into an object store; readers see the old file or all of the new one.

    Raises:
        DataError: the store is away or refuses.
    """
    with store_errors(path, "cannot write"):
        _filesystem(path).put_file(str(local), path.path)  # type: ignore[attr-defined]  # a UPath


def check_writable(folder: Path) -> None:
    """Write and remove a small file, making a local folder if needed.

    Raises:
        OSError: a local folder cannot be written.
        DataError: a store is away or refuses.
    """
    probe = folder / ".writable"
    if is_remote(folder):
        with store_errors(folder, "cannot write to"):
            probe.write_bytes(b"")
            probe.unlink()
        return
    make_folder(folder)
    probe.touch()
    probe.unlink()


@contextmanager
def opened_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file; of a remote one only what is read is fetched.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be opened, or what is read from it is damaged.
        DataError: the store is away or refuses.
    """
    import pyarrow.parquet as pq

    if not is_remote(path):
        with pq.ParquetFile(path) as file:
            yield file
        return
    with store_errors(path, "cannot read"):
        stream = _filesystem(path).open(path.path, "rb", cache_type="none")  # type: ignore[attr-defined]  # a UPath
        # Fetches the wanted columns in a few large requests; fsspec's own read-ahead would fetch the others, too.
        with stream, pq.ParquetFile(stream, pre_buffer=True) as file:
            yield file


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """The same file or folder on this machine: itself, or a temporary copy of what lies in a store."""
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / path.name
        with store_errors(path, "cannot read"):
            files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
            for file in files:
                target = copy if file == path else copy / str(file)[len(str(path)) + 1 :]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        yield copy


def file_stamp(path: Path) -> str:
    """What changes when a file is replaced.

    Raises:
        OSError: it cannot be looked at.
        DataError: the store is away or refuses.
    """
    if is_remote(path):
        with store_errors(path, "cannot read"):
            return str(_filesystem(path).ukey(path.path))  # type: ignore[attr-defined]  # a UPath
    state = path.stat()
    return str((state.st_mtime_ns, state.st_size, state.st_ino))


def arrow_filesystem(path: Path) -> tuple[Any, str]:
    """pyarrow's filesystem of a path, None for the local one, and the path in it: what Ray Train takes."""
    if not is_remote(path):
        return None, str(path)
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(_filesystem(path))), str(path.path)  # type: ignore[attr-defined]  # a UPath


@contextmanager
def store_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what a store's driver raises into a `DataError` that says what to check; local errors pass.

    A missing file stays a `FileNotFoundError` where it was to be read.
    """
    try:
        yield
    except CiterError:
        raise
    except Exception as error:
        missing = isinstance(error, FileNotFoundError) and what == "cannot read"
        if not is_remote(path) or missing or not (isinstance(error, OSError) or _of_store(error)):
            raise
        raise DataError(f"{what} {path}: {_brief(error)}; {_hint(path)}") from error


def store_failure(error: BaseException) -> str | None:
    """One line on an error of a store's driver that nobody has turned into ours; None for any other."""
    if not _of_store(error):
        return None
    return f"the object store is away or refuses: {_brief(error)}; {_S3_HINT}; what is finished is kept"


def _of_store(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _STORE_PACKAGES


def _hint(path: Path) -> str:
    return _HINTS.get(str(path).partition("://")[0], "check its address and credentials")


def _brief(error: BaseException) -> str:
    text = without_credentials(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"


def _filesystem(path: Path) -> Any:
    return path.fs  # type: ignore[attr-defined]  # a UPath
