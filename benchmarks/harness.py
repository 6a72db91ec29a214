"""Timing two ways of the same work side by side, and saying what came out.

Ours and the reference take turns, so that another load of the machine meets both alike; the verdict is on the median
of the turns' ratios. A suite (`collect.py`, `vllm.py`, ...) yields results; `__main__` prints the table and writes the
JSON.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import transformers
from rich.table import Table

from citer_ray.engines.build import freeze_startup_objects


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks of a suite.

    Attributes:
        short: little work and no verdict.
        repeats: turns of each comparison.
        pairs: pairs to measure, for suites that know several.
        parts: only results whose name contains one of these; all if empty.
    """

    short: bool = False
    repeats: int = 3
    pairs: tuple[str, ...] = ("embedded", "random")
    parts: tuple[str, ...] = ()

    def wants(self, part: str) -> bool:
        """Whether a part of a suite was asked for."""
        return not self.parts or any(one in part for one in self.parts)


class Result(Protocol):
    """One line of the table."""

    @property
    def name(self) -> str: ...

    @property
    def ratio(self) -> float: ...

    @property
    def verdict(self) -> str: ...

    def cells(self) -> tuple[str, ...]:
        """The line's cells, in the order of `results_table`."""
        ...

    def as_json(self) -> dict[str, Any]: ...


Suite = Callable[[Options], Iterator[Result]]


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
        in_process: all of our work is done by this process, so that its CPU seconds say something.
    """

    name: str
    target: float | None
    ours: tuple[Run, ...]
    reference: tuple[Run, ...]
    agreement: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    in_process: bool = True

    @property
    def ratio(self) -> float:
        """Median over turns of our tokens per second over the reference's."""
        return statistics.median(a.rate / b.rate for a, b in zip(self.ours, self.reference, strict=True))

    @property
    def cpu_ratio(self) -> float | None:
        """The same by CPU seconds, which another load of the machine disturbs less; None where they are not known."""
        if not self.in_process:
            return None
        pairs = zip(self.ours, self.reference, strict=True)
        return statistics.median((a.tokens / a.cpu_seconds) / (b.tokens / b.cpu_seconds) for a, b in pairs)

    @property
    def verdict(self) -> str:
        """`reached`, `missed`, or `not judged`."""
        return _verdict(self.ratio, self.target, at_most=False)

    def cells(self) -> tuple[str, ...]:
        """See `Result`."""
        return (
            self.name,
            f"{_median_rate(self.ours):,.0f}",
            f"{_median_rate(self.reference):,.1f}",
            f"{self.ratio:.1f}x",
            "" if self.cpu_ratio is None else f"{self.cpu_ratio:.1f}x",
            "" if self.target is None else f"{self.target:g}x",
            self.verdict,
            "{}/{}".format(*self.agreement),
        )

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


@dataclass(frozen=True)
class Quotient:
    """Two measured numbers that are not tokens of equal work: times, or a rate and its ideal.

    Attributes:
        name: what was measured.
        ours: this project's number.
        reference: what it is divided by; None where there is nothing to compare with.
        unit: of both.
        target: what the quotient must reach; None if it is not judged.
        at_most: the target is a limit instead.
        note: stands where the agreement stands in comparisons: a reason, for example.
        settings: what else a reader needs to know.
    """

    name: str
    ours: float | None
    reference: float | None
    unit: str
    target: float | None = None
    at_most: bool = False
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Ours over the reference's; NaN if either is missing."""
        if self.ours is None or not self.reference:
            return float("nan")
        return self.ours / self.reference

    @property
    def verdict(self) -> str:
        """`reached`, `missed`, or `not judged`."""
        return _verdict(self.ratio, self.target, self.at_most)

    def cells(self) -> tuple[str, ...]:
        """See `Result`."""
        sign = "at most " if self.at_most else ""
        return (
            self.name,
            _number(self.ours, self.unit),
            _number(self.reference, self.unit),
            "" if self.ratio != self.ratio else f"{self.ratio:.2f}",
            "",
            "" if self.target is None else f"{sign}{self.target:g}",
            self.verdict,
            self.note,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, for the record."""
        ratio = None if self.ratio != self.ratio else self.ratio
        return {**asdict(self), "ratio": ratio, "verdict": self.verdict}


def _verdict(ratio: float, target: float | None, at_most: bool) -> str:
    if target is None or ratio != ratio:
        return "not judged"
    return "reached" if (ratio <= target if at_most else ratio >= target) else "missed"


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.4g} {unit}"


def run_in_turn(
    ours: Callable[[], int], reference: Callable[[], int], repeats: int
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Time both ways in turn; each callable does its work once and returns the number of its tokens."""
    pairs = [(_timed(ours), _timed(reference)) for _ in range(repeats)]
    return tuple(run for run, _ in pairs), tuple(run for _, run in pairs)


def results_table(results: Sequence[Result]) -> Table:
    """The table of all results; where no unit is given, rates are tokens per second."""
    table = Table("benchmark", title=f"tokens per second, {torch.get_num_threads()} torch thread(s)")
    for column in ("ours", "reference", "ratio", "by CPU time", "target"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    table.add_column("same results", justify="right")
    for one in results:
        table.add_row(*one.cells())
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
    gc.unfreeze()
    freeze_startup_objects()  # as workers do; and the engine of the run before goes, with its KV cache
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
