"""What is recorded about a run, and what is left out on purpose."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from citer_ray.config import CiterConfig
from citer_ray.provenance import git_state, package_versions, write_provenance

CONFIG = CiterConfig.model_validate(
    {
        "name": "demo",
        "output_dir": "runs/demo",
        "pair": {"slm": {"path": "a"}, "llm": {"path": "b"}},
        "data": {"collect": "c"},
    }
)


def written(folder: Path, argv: list[str] | None = None, config: CiterConfig = CONFIG) -> dict[str, Any]:
    path = write_provenance(folder, config, argv or ["citer", "iterate"], {"run": 7})
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit and a package folder."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("1\n", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_record(tmp_path: Path) -> None:
    record = written(tmp_path / "out")
    started = datetime.fromisoformat(record["started_at"])
    assert started.tzinfo == UTC
    assert record["seeds"] == {"run": 7}
    assert record["python"] == platform.python_version()
    assert record["versions"]["numpy"] == np.__version__
    assert record["versions"]["pydantic"] == importlib.metadata.version("pydantic")
    assert record["cpu_count"] >= record["usable_cpus"] >= 1
    assert len(record["config_digest"]) == 64
    assert record["earlier"] == []
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["provenance.json"]


def test_config_digest_follows_the_config(tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"seed": 1})
    digests = [written(tmp_path / str(i), config=c)["config_digest"] for i, c in enumerate((CONFIG, CONFIG, other))]
    assert digests[0] == digests[1] != digests[2]


def test_no_host_name_home_or_password(tmp_path: Path) -> None:
    argv = ["/home/someone/.venv/bin/citer", "iterate", "tracking.uri=https://me:secret@host.org/mlflow"]
    text = json.dumps(written(tmp_path, argv))
    assert "secret" not in text
    assert "someone" not in text
    assert socket.gethostname() not in text.replace(platform.platform(), "")
    assert json.loads(text)["argv"] == ["citer", "iterate", "tracking.uri=https://***@host.org/mlflow"]


def test_resumed_run_keeps_the_earlier_starts(tmp_path: Path) -> None:
    first = written(tmp_path, ["citer", "collect"])
    second = written(tmp_path, ["citer", "fit"])
    third = written(tmp_path, ["citer", "fit", "--resume"])
    assert [start["argv"] for start in third["earlier"]] == [first["argv"], second["argv"]]
    assert all("earlier" not in start for start in third["earlier"])


@pytest.mark.parametrize("text", ["", "{half", "[1, 2]", "null"])
def test_damaged_file_does_not_stop_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "provenance.json").write_text(text, encoding="utf-8")
    assert written(tmp_path)["earlier"] == []


def test_git_revision_and_dirty_flag(checkout: Path) -> None:
    revision = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout / "package") == {"revision": revision, "dirty": False}
    (checkout / "package" / "a.py").write_text("2\n", encoding="utf-8")
    assert git_state(checkout / "package") == {"revision": revision, "dirty": True}


def test_installed_inside_another_checkout_is_not_that_checkout(checkout: Path) -> None:
    installed = checkout / ".venv" / "site-packages" / "package"
    installed.mkdir(parents=True)
    assert git_state(installed) is None


def test_repository_without_a_commit_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path / "package") is None
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path / "package") is None


def test_only_installed_packages_are_listed() -> None:
    assert package_versions(["numpy", "no-such-package-here"]) == {"numpy": np.__version__}
