"""`python -m benchmarks`: run all benchmarks, print one table, write one JSON file.

Exits with 1 where a target is missed. `--short` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import collect
from benchmarks.harness import machine, results_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Collection against naive loops.")
    parser.add_argument("--short", action="store_true", help="little work, a small pair, no verdict")
    parser.add_argument("--pair", action="append", choices=("embedded", "random"), help="only this pair")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both ways (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts (default 3)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks.json"), help="the JSON file")
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    torch.set_num_threads(options.threads)
    progress = Console(stderr=True)
    results = []
    for one in collect.run(
        pairs=options.pair or ("embedded", "random"),
        short=options.short,
        repeats=1 if options.short else options.repeats,
    ):
        progress.print(f"{one.name}: {one.ratio:.1f}x")
        results.append(one)
    Console(width=120).print(results_table(results))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "short": options.short, "results": [one.as_json() for one in results]}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(one.verdict == "missed" for one in results))


if __name__ == "__main__":
    sys.exit(main())
