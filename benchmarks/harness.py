"""Timing two ways of the same work side by side, and saying what came out.

Ours and the reference take turns, so that another load of the machine meets both alike; the verdict is on the median
of the turns' ratios. `collect.py` feeds it; `__main__` prints the table and writes the JSON.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: tokens of work, wall-clock seconds, and the process's CPU seconds."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """A measured pair of ways.

    Attributes:
        name: what was measured.
        target: the ratio that must be reached; None if the run is too short to judge.
        ours: this project's runs.
        reference: the runs of what it is measured against, turn by turn.
        agreement: results that both ways share, of how many were compared.
        settings: what else a reader needs to know.
    """

    name: str
    target: float | None
    ours: tuple[Run, ...]
    reference: tuple[Run, ...]
    agreement: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Median over turns of our tokens per second over the reference's."""
        return statistics.median(a.rate / b.rate for a, b in zip(self.ours, self.reference, strict=True))

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU seconds, which another load of the machine disturbs less."""
        pairs = zip(self.ours, self.reference, strict=True)
        return statistics.median((a.tokens / a.cpu_seconds) / (b.tokens / b.cpu_seconds) for a, b in pairs)

    @property
    def verdict(self) -> str:
        """`reached`, `missed`, or `not judged`."""
        if self.target is None:
            return "not judged"
        return "reached" if self.ratio >= self.target else "missed"

    def as_json(self) -> dict[str, Any]:
        """Everything, for the record."""
        return {
            **asdict(self),
            "ours_per_second": _median_rate(self.ours),
            "reference_per_second": _median_rate(self.reference),
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "verdict": self.verdict,
        }


def run_in_turn(
    ours: Callable[[], int], reference: Callable[[], int], repeats: int
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Time both ways in turn; each callable does its work once and returns the number of its tokens."""
    pairs = [(_timed(ours), _timed(reference)) for _ in range(repeats)]
    return tuple(run for run, _ in pairs), tuple(run for _, run in pairs)


def results_table(comparisons: Sequence[Comparison]) -> Table:
    """The table of all comparisons."""
    table = Table("benchmark", title=f"tokens per second, {torch.get_num_threads()} torch thread(s)")
    for column in ("ours", "reference", "ratio", "by CPU time", "target"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    table.add_column("same results", justify="right")
    for one in comparisons:
        table.add_row(
            one.name,
            f"{_median_rate(one.ours):,.0f}",
            f"{_median_rate(one.reference):,.1f}",
            f"{one.ratio:.1f}x",
            f"{one.cpu_ratio:.1f}x",
            "" if one.target is None else f"{one.target:g}x",
            one.verdict,
            "{}/{}".format(*one.agreement),
        )
    return table


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _timed(work: Callable[[], int]) -> Run:
    gc.collect()  # the engine of the run before, with its KV cache, goes before the clock starts
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return Run(tokens, time.perf_counter() - wall, time.process_time() - cpu)


def _median_rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - no file of ours
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
