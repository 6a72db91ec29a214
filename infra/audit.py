"""A report on known vulnerabilities of what is installed: `make audit`. It informs and never fails.

pip-audit asks PyPI about every package. Without a network, or behind a mirror that does not pass such questions on, the
report says that nothing could be checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120


def run_pip_audit() -> str:
    """The report of pip-audit as JSON, or an empty text if there is none."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "5", "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def summary(report: str) -> list[str]:
    """Lines for people: what is vulnerable and where it is mended, and how much was checked."""
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError):
        return ["audit: PyPI did not answer, so nothing was checked (no network?)"]
    checked = [package for package in packages if "skip_reason" not in package]
    lines = [f"audit: {len(checked)} of {len(packages)} packages were checked"]
    if not checked:
        lines[0] += ": the package index here does not answer such questions (a mirror?)"
    for package in checked:
        for found in package.get("vulns", []):
            mended = ", ".join(found.get("fix_versions", [])) or "no release yet"
            lines.append(f"  {package['name']} {package['version']}: {found['id']} (mended in {mended})")
    if checked and len(lines) == 1:
        lines.append("  no known vulnerability")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(summary(run_pip_audit())) + "\n")
