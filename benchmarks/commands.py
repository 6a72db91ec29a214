"""Whole commands as a user types them, each with the longest time that it may take: the quickstart, and the evaluation.

Parts: `quickstart` (both rounds and the report on the embedded pair) and `evaluate` (every method on 200 problems, with
the fitting of all baselines). The second needs what the first writes, and runs it where only the second is asked for.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Options, Quotient

QUICKSTART_S = 360.0
EVALUATE_S = 600.0
_ROOT = Path(__file__).parents[1]


def run(options: Options) -> Iterator[Quotient]:
    """Measure; see the module."""
    if not (options.wants("quickstart") or options.wants("evaluate")):
        return
    config = "configs/smoke.yaml" if options.short else "configs/embedded.yaml"
    problems = 10 if options.short else 200
    with tempfile.TemporaryDirectory(prefix="citer-commands-") as folder:
        settings = [f"output_dir={folder}/run"]
        seconds = _seconds("quickstart", "--config", config, *settings)
        if options.wants("quickstart"):
            yield _limit("quickstart", seconds, QUICKSTART_S, options.short)
        if options.wants("evaluate"):
            every = ("--methods", "all", "--limit", str(problems))
            seconds = _seconds("evaluate", "--config", config, *every, *settings)
            yield _limit(f"evaluate: every method, {problems} problems", seconds, EVALUATE_S, options.short)


def _limit(name: str, seconds: float, limit: float, short: bool) -> Quotient:
    return Quotient(name, seconds, limit, "s", None if short else 1.0, at_most=True)


def _seconds(*arguments: str) -> float:
    """Wall-clock time of a command.

    Raises:
        RuntimeError: it failed.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "citer_ray.cli", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"citer {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-3000:]}")
    return time.perf_counter() - began
