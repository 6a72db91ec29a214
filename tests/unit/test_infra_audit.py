"""The audit's report: what is found, what was not checked, and no network."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

summary = runpy.run_path(str(Path(__file__).parents[2] / "infra" / "audit.py"))["summary"]

SOUND = {"name": "a", "version": "1", "vulns": []}
HOLED = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}, {"id": "PYSEC-2", "fix_versions": []}],
}
UNKNOWN = {"name": "c", "skip_reason": "not on PyPI"}


@pytest.mark.parametrize(
    ("packages", "lines"),
    [
        ([SOUND], ["1 of 1 packages were checked", "no known vulnerability"]),
        (
            [SOUND, HOLED, UNKNOWN],
            ["2 of 3 packages", "b 2: PYSEC-1 (mended in 2.1)", "b 2: PYSEC-2 (mended in no release yet)"],
        ),
        ([UNKNOWN], ["0 of 1 packages were checked: the package index here does not answer"]),
    ],
)
def test_summary(packages: list[dict[str, object]], lines: list[str]) -> None:
    shown = summary(json.dumps({"dependencies": packages}))
    assert len(shown) == len(lines)
    assert all(expected in line for expected, line in zip(lines, shown, strict=True))


@pytest.mark.parametrize("report", ["", "Connection refused", "{}"])
def test_no_network(report: str) -> None:
    assert summary(report) == ["audit: PyPI did not answer, so nothing was checked (no network?)"]
