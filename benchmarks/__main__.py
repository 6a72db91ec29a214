"""`python -m benchmarks [SUITE ...]`: run suites of benchmarks, print one table, write one JSON file.

Exits with 1 where a target is missed. `--short` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import Options, Result, Suite, machine, results_table

# Each is a module with `run(options: Options) -> Iterator[Result]`, imported when it is asked for.
SUITES = {
    "collect": "benchmarks.collect",
    "commands": "benchmarks.commands",
    "scale": "benchmarks.scale",
    "serving": "benchmarks.serving",
    "vllm": "benchmarks.vllm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; returns the exit status."""
    options, output = _parse(arguments)
    results: list[tuple[str, Result]] = []
    progress = Console(stderr=True)
    for name in options.pop("suites"):
        suite: Suite = importlib.import_module(SUITES[name]).run
        for one in suite(Options(**options)):
            progress.print(f"{name}: {one.name}: {one.ratio:.2f}", markup=False, highlight=False)
            results.append((name, one))
    Console(width=140).print(results_table([one for _, one in results]))
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(),
        "short": options["short"],
        "results": [{"suite": name, **one.as_json()} for name, one in results],
    }
    output.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(one.verdict == "missed" for _, one in results))


def _parse(arguments: Sequence[str] | None) -> tuple[dict[str, Any], Path]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What the platform brings, in numbers.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all)")
    parser.add_argument("--short", action="store_true", help="little work, small models, no verdict")
    parser.add_argument("--part", action="append", default=[], help="only results whose part is named so")
    parser.add_argument("--pair", action="append", choices=("embedded", "random"), help="only this pair")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both ways (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts (default 3)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks.json"), help="the JSON file")
    parsed = parser.parse_args(arguments)
    if parsed.threads < 1 or parsed.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    unknown = sorted(set(parsed.suites) - set(SUITES))
    if unknown:
        parser.error(f"there is no suite {unknown[0]!r}; choose from {', '.join(SUITES)}")
    torch.set_num_threads(parsed.threads)
    chosen = {
        "suites": parsed.suites or list(SUITES),
        "short": parsed.short,
        "repeats": 1 if parsed.short else parsed.repeats,
        "pairs": tuple(parsed.pair or ("embedded", "random")),
        "parts": tuple(parsed.part),
    }
    return chosen, parsed.output


if __name__ == "__main__":
    sys.exit(main())
