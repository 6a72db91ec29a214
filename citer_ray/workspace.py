"""The folder of a run: where labels, routers, reports and records lie.

run.yaml  provenance.json  pair.json  quarantine/*.jsonl
labels/round-1/  labels/citer_s/  routers/round-1/  routers/citer_s/  evaluation/  report.json  frontier.png
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths below a run's output folder. Making one touches nothing."""

    root: Path

    def labels(self, name: str) -> Path:
        """Labels of a round (`round-1`, ...) or of `citer_s`."""
        return self.root / "labels" / name

    def router(self, name: str) -> Path:
        """The router fitted on the labels of the same name."""
        return self.root / "routers" / name

    def fits(self) -> Path:
        """Checkpoints of router fits, for resuming."""
        return self.root / "fits"

    def evaluation(self, name: str) -> Path:
        """Measured points, for resuming: `validation` or `test`."""
        return self.root / "evaluation" / name

    def quarantine(self, name: str) -> Path:
        """Rows that were set aside, with reasons, as JSONL."""
        return self.root / "quarantine" / f"{name}.jsonl"


def round_name(round: int) -> str:
    """Name of a round's labels and router."""
    return f"round-{round}"
