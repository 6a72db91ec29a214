"""Builds the embedded pair: tokenizer, both models side by side, measurement and model card.

``build_pair`` is what ``citer pair build`` calls. Each model trains in a process of its own, one thread each,
because glibc reads the malloc settings of ``TRAINING_ENVIRONMENT`` only when a process starts. Read by
nothing at run time: the shipped weights come from it, and ``embedded_weights`` gives their path.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from citer_ray.errors import CiterError, ConfigError
from citer_ray.pair.embedded.card import model_card
from citer_ray.pair.embedded.evaluate import measure_pair
from citer_ray.pair.embedded.problems import split
from citer_ray.pair.embedded.recipe import PairRecipe
from citer_ray.pair.embedded.tokenizer import build_tokenizer

ROLES = ("slm", "llm")
TEST_PROBLEMS = 500
_STATUS = "loss {loss:.3f}, tokens {token_accuracy:.1%}, decisions {decision_accuracy:.1%}"
# Keeps freed blocks in the process instead of returning them to the kernel: twice as fast, same numbers.
TRAINING_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def build_pair(
    output_dir: Path,
    recipe: PairRecipe | None = None,
    *,
    test_problems: int = TEST_PROBLEMS,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains both models and writes ``slm/``, ``llm/``, ``recipe.json``, ``measured.json`` and ``README.md``.

    Args:
        output_dir: A new or empty folder.
        recipe: What to train; None means the recipe of the shipped weights.
        test_problems: How many problems of the split ``test`` measure the result.
        console: Where the progress bars go; None means standard error.

    Returns:
        What ``measured.json`` holds.

    Raises:
        ConfigError: ``output_dir`` holds something already.
        CiterError: A training process failed; its last lines are in the message.
    """
    recipe = recipe or PairRecipe()
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ConfigError(f"{output_dir} is not empty: give a new folder, or remove it first")
    output_dir.mkdir(parents=True, exist_ok=True)
    recipe.save(output_dir / "recipe.json")
    tokenizer = build_tokenizer(split("train", recipe.tokenizer_examples, recipe.families), recipe.context_length)
    for role in ROLES:
        tokenizer.save_pretrained(output_dir / role)
    seconds = _train_both(output_dir, recipe, console or Console(stderr=True))
    problems = split("test", test_problems, recipe.families)
    measured = measure_pair(output_dir / "slm", output_dir / "llm", problems)
    measured["training"] = {"seconds": seconds, "hardware": hardware()}
    (output_dir / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")
    (output_dir / "README.md").write_text(model_card(asdict(recipe), measured))
    return measured


def hardware() -> str:
    """The processor's name, for the model card."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} logical CPUs"


def _train_both(output_dir: Path, recipe: PairRecipe, console: Console) -> dict[str, float]:
    """Runs both training processes side by side; returns the wall-clock seconds of each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    processes = {role: _start(role, output_dir) for role in ROLES}
    with Progress(*columns, console=console) as bars, ThreadPoolExecutor(len(ROLES)) as threads:
        try:
            runs = {}
            for role, process in processes.items():
                task = bars.add_task(role, total=getattr(recipe, role).steps, status="starting")
                runs[role] = threads.submit(_follow, role, process, bars, task, output_dir / f"{role}.stderr")
            wait(runs.values(), return_when=FIRST_EXCEPTION)
        finally:  # an error or Ctrl-C here; a process that ended is not touched
            for process in processes.values():
                process.terminate()
    failed = [error for run in runs.values() if (error := run.exception()) is not None]
    if failed:
        raise failed[0]
    return {role: run.result() for role, run in runs.items()}


def _start(role: str, output_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "citer_ray.pair.embedded.training"]
    command += [str(output_dir / "recipe.json"), role, str(output_dir / role)]
    with (output_dir / f"{role}.stderr").open("w") as errors:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **TRAINING_ENVIRONMENT},
        )


def _follow(role: str, process: subprocess.Popen[str], bars: Progress, task: TaskID, errors: Path) -> float:
    """Turns a training process's JSON lines into its progress bar until it ends; returns its seconds."""
    started = time.monotonic()
    assert process.stdout is not None  # a pipe was asked for
    for line in process.stdout:
        values = json.loads(line)
        bars.update(task, completed=values["step"], status=_STATUS.format(**values))
    if status := process.wait():
        raise CiterError(f"training the {role} failed with exit status {status}:\n{errors.read_text()[-2000:]}")
    errors.unlink()
    return round(time.monotonic() - started, 1)
