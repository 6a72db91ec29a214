"""Writing a text file so that a reader, or a killed run, sees the old or the new one and never half of it.

Fed by everything that leaves JSON, YAML or Markdown in an output folder (`config_loading`, `provenance`,
`report`, the tracker's state); the files are read by resumed runs and by people.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Write `text` as UTF-8 to `path` by rename, making parent folders.

    The temporary file lies beside the target, because a rename is atomic only within one file system, and
    it is flushed to disk first, so that a power cut does not leave an empty file under the final name.

    Raises:
        OSError: the folder cannot be written or the disk is full; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
