"""Relative paths of a submitted job: below the home folder, and said; absolute ones and URIs stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from citer_ray.config_loading import load_config
from citer_ray.submitted_job import JOB_VARIABLE, placed, placed_router

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
JOB = {JOB_VARIABLE: "{}"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_relative_output_folder_is_below_home_and_said(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(SMOKE)
    assert placed(config, {}) is config
    assert caplog.messages == []
    assert placed(config, JOB).output_dir == str(home / "runs" / "smoke")
    assert f"goes to {home / 'runs' / 'smoke'}" in caplog.text


@pytest.mark.parametrize("output_dir", ["/shared/runs/smoke", "memory://bucket/runs/smoke"])
def test_other_output_folders_stay(output_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(SMOKE, [f"output_dir={output_dir}"])
    assert placed(config, JOB) is config
    assert caplog.messages == []


def test_a_router_is_here_or_an_earlier_jobs(home: Path) -> None:
    assert placed_router(None, JOB) is None
    assert placed_router("runs/a/routers/round-1", {}) == Path("runs/a/routers/round-1")
    assert placed_router("runs/a/routers/round-1", JOB) == home / "runs/a/routers/round-1"
    Path("packed").mkdir()
    assert placed_router("packed", JOB) == Path("packed")
    assert str(placed_router("memory://bucket/router", JOB)) == "memory://bucket/router"
