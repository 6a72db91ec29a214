"""The core stays pure: importing any of its modules loads neither Ray, nor vLLM, nor MLflow."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import citer_ray

# The edges: the only modules that may import Ray, vLLM or MLflow, or import a module that does.
EDGES = (
    "citer_ray.cli",
    "citer_ray.cli.*",
    "citer_ray.engines.vllm*",
    "citer_ray.mlflow_*",
    "citer_ray.on_ray.*",
)
HEAVY = ("ray", "vllm", "mlflow")

# Imports each module in turn and reports, for the first that loaded it, who loaded what.
PROBE = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
loaded = {}
for name in names:
    importlib.import_module(name)
    for root in heavy:
        if root in sys.modules:
            loaded.setdefault(root, name)
json.dump(loaded, sys.stdout)
"""


def all_modules(folder: Path, prefix: str) -> Iterator[str]:
    """Names of the modules under a package's folder, without importing any of them here."""
    for module in pkgutil.iter_modules([str(folder)], prefix):
        yield module.name
        if module.ispkg:
            yield from all_modules(folder / module.name.removeprefix(prefix), module.name + ".")


def core_modules() -> list[str]:
    names = all_modules(Path(citer_ray.__file__).parent, "citer_ray.")
    return [name for name in names if not any(fnmatch(name, edge) for edge in (*EDGES, "*.__main__"))]


def loaded_by(modules: list[str]) -> dict[str, str]:
    """The heavy packages that a fresh interpreter has loaded after these imports, and by which module."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, HEAVY])], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_core_modules_load_no_ray_vllm_or_mlflow() -> None:
    modules = core_modules()
    assert {"citer_ray.engine", "citer_ray.policy", "citer_ray.errors"} <= set(modules)
    assert loaded_by(modules) == {}


def test_probe_sees_a_heavy_import() -> None:
    # The stand-in for a heavy package is a cheap one, to show that the probe would have caught it.
    result = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([["citer_ray.errors", "sqlite3.dbapi2"], ["sqlite3"]])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == {"sqlite3": "sqlite3.dbapi2"}


def test_edges_are_not_counted_as_core() -> None:
    assert not [name for name in core_modules() if name.startswith("citer_ray.on_ray.")]
