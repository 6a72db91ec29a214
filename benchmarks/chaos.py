"""Killing runs at random moments: after the same command has gone on, nothing is lost, doubled or different.

`python -m benchmarks.chaos --trials 20 --seed 0` (`make chaos`). A trial starts a real `citer collect`, `fit` or
`iterate` on a small configuration, kills the driver, a random worker or all of its Ray processes with SIGKILL, repeats
the command until it ends well, and compares labels, router weights and MLflow runs with those of an undisturbed run.
`tests/integration/test_chaos.py` runs a few trials.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from rich.console import Console

from citer_ray.label_store import LabelStore

Command = Literal["collect", "fit", "iterate"]
Victim = Literal["driver", "worker", "all of Ray"]
COMMANDS: tuple[Command, ...] = ("collect", "fit", "iterate")
VICTIMS: tuple[Victim, ...] = ("driver", "worker", "all of Ray")

ROOT = Path(__file__).parents[1]
ROUNDS = 2
SETTINGS = (
    "data.collect_limit=24",
    "data.validation_limit=8",
    "data.test_limit=8",
    "collect.examples_per_chunk=4",
    f"iterate.max_rounds={ROUNDS}",
    "iterate.min_area_gain=-100",  # all rounds, whatever they bring
    "iterate.citer_s=false",
    "evaluate.methods=[slm, llm, citer]",
    "evaluate.llm_shares=[0.1]",
    "evaluate.bootstrap_samples=20",
    "evaluate.timed_examples=0",
    "evaluate.shown_examples=0",
    "fit.num_cpus=0.5",
)
PATIENCE_S = 300.0  # for a command, before it is called hanging
LEFT_AFTER_S = 90.0
EARLIEST = 0.1  # moment of a kill
ATTEMPTS = 4


@dataclass
class Trial:
    """One trial and what came of it.

    Attributes:
        number: of the trial.
        command: what ran.
        victim: what was killed.
        moment: when, as a part of the undisturbed command's time.
        hit: a process that was killed, by its title; None if the kill came too early or too late.
        too_early: the command had no such process yet.
        statuses: of the command, from the killed one to the one that ended well.
        left: processes that had outlived their driver by `LEFT_AFTER_S`.
        faults: what differs from the undisturbed run, or went wrong otherwise.
    """

    number: int
    command: Command
    victim: Victim
    moment: float
    hit: str | None = None
    too_early: bool = False
    statuses: list[int] = field(default_factory=list)
    left: int = 0
    faults: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line."""
        nothing = f"nothing to kill {'yet' if self.too_early else 'any more'}"
        what = f"{f'killed {self.hit}' if self.hit else nothing} at {self.moment:.0%}"
        ends = ", ".join(map(str, self.statuses))
        return f"{self.number:3} {self.command:8} {self.victim:11} {what}; ended with {ends}: " + (
            "; ".join(self.faults) or "as undisturbed"
        )


@dataclass(frozen=True)
class Undisturbed:
    """The folder of an undisturbed `iterate`, and the seconds of each command."""

    folder: Path
    seconds: dict[Command, float]

    @classmethod
    def run(cls, folder: Path) -> Undisturbed:
        """Raises: RuntimeError: the run fails undisturbed."""
        before = time.time()
        process = start("iterate", folder)
        output, errors = process.communicate(timeout=4 * PATIENCE_S)
        if process.returncode != 0:
            raise RuntimeError(f"the undisturbed run ended with {process.returncode}: {output}{errors}")
        seconds = time.time() - before
        labelled, fitted = (
            (folder / name).stat().st_mtime
            for name in ("labels/round-1/manifest.json", "routers/round-1/router.safetensors")
        )
        start_s = (folder / "run.yaml").stat().st_mtime - before
        times: dict[Command, float] = {
            "collect": labelled - before,
            "fit": start_s + fitted - labelled,
            "iterate": seconds,
        }
        return cls(folder, times)


def start(command: Command, folder: Path) -> subprocess.Popen[str]:
    """A command in a process of its own, whose MLflow store lies beside its folder."""
    arguments = [sys.executable, "-m", "citer_ray.cli", command, "--config", str(ROOT / "configs" / "smoke.yaml")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")
    }
    return subprocess.Popen(
        [*arguments, f"output_dir={folder}", f"tracking.enabled={str(command == 'iterate').lower()}", *SETTINGS],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def draw_trials(count: int, seed: int) -> list[Trial]:
    """Trials in which every command meets every victim before any pair comes twice; moments are random."""
    generator = np.random.default_rng(seed)
    trials: list[Trial] = []
    while len(trials) < count:
        pairs = [(command, victim) for command in COMMANDS for victim in VICTIMS]
        for index in generator.permutation(len(pairs)):
            command, victim = pairs[index]
            trials.append(Trial(len(trials) + 1, command, victim, float(generator.uniform(EARLIEST, 1.0))))
    return trials[:count]


def run_until_hit(trial: Trial, undisturbed: Undisturbed, folder: Path, seed: int) -> Trial:
    """Run a trial, and again with another moment while there was nothing to kill: not yet, or not any more.

    Returns:
        The trial that killed something, or that had a fault, or the last one.
    """
    low, high = 0.0, 1.0
    while True:
        run_trial(trial, undisturbed, folder / f"{trial.moment:.3f}" / "run", seed)
        if trial.hit is not None or trial.faults or high - low < EARLIEST:
            return trial
        low, high = (trial.moment, high) if trial.too_early else (low, trial.moment)
        trial = Trial(trial.number, trial.command, trial.victim, (low + high) / 2)


def run_trial(trial: Trial, undisturbed: Undisturbed, folder: Path, seed: int) -> None:
    """Run a trial in a new folder; fills in what came of it."""
    if trial.command == "fit":
        shutil.copytree(undisturbed.folder / "labels" / "round-1", folder / "labels" / "round-1")
    process = start(trial.command, folder)
    family: dict[int, psutil.Process] = {}
    _wait_watching(process, trial.moment * undisturbed.seconds[trial.command], family)
    victims = _victims(trial, process, family, np.random.default_rng([seed, trial.number]))
    trial.too_early = not victims and process.poll() is None
    if victims:
        trial.hit = victims[0][1] if len(victims) == 1 else f"{len(victims)} processes"
        for victim, _ in victims:
            _kill(victim)
    _end(trial, process)
    trial.left = _clear(family)
    while trial.statuses[-1] != 0 and len(trial.statuses) <= ATTEMPTS:
        _end(trial, start(trial.command, folder))
    if trial.statuses[-1] != 0:
        trial.faults.append(f"it never ended well in {len(trial.statuses)} attempts")
        return
    trial.faults += compare(trial.command, undisturbed.folder, folder)


def _wait_watching(process: subprocess.Popen[str], seconds: float, family: dict[int, psutil.Process]) -> None:
    """Wait, keeping the processes that belong to the command."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and (left := deadline - time.monotonic()) > 0:
        _watch(process, family)
        try:
            process.wait(timeout=min(left, 0.5))
        except subprocess.TimeoutExpired:
            continue
    _watch(process, family)


def _watch(process: subprocess.Popen[str], family: dict[int, psutil.Process]) -> None:
    try:
        family.update({child.pid: child for child in psutil.Process(process.pid).children(recursive=True)})
    except psutil.NoSuchProcess:
        return


def _victims(
    trial: Trial, process: subprocess.Popen[str], family: dict[int, psutil.Process], generator: np.random.Generator
) -> list[tuple[psutil.Process, str]]:
    if process.poll() is not None:
        return []
    if trial.victim == "driver":
        return [(psutil.Process(process.pid), "the driver")]
    titles = {pid: _title(child) for pid, child in sorted(family.items())}
    alive = [(family[pid], title) for pid, title in titles.items() if title]
    if trial.victim == "all of Ray":
        return alive
    # Not an agent of a node: the whole node goes with it.
    others = ("IDLE", "Agent")
    workers = [one for one in alive if one[1].startswith("ray::") and not any(word in one[1] for word in others)]
    return [workers[int(generator.integers(len(workers)))]] if workers else []


def _title(process: psutil.Process) -> str:
    """What a process is, in a few words; empty if it has ended."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[0] if words and words[0].startswith("ray::") else Path(words[0]).name if words else ""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _end(trial: Trial, process: subprocess.Popen[str]) -> None:
    """Wait for a command's end and keep its status; a bug's stack and a hang are faults."""
    try:
        _, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        trial.faults.append(f"it hung for {PATIENCE_S:g} s")
        family: dict[int, psutil.Process] = {}
        _watch(process, family)
        process.kill()
        process.communicate()
        _clear(family)
        errors = ""
    trial.statuses.append(process.returncode)
    if process.returncode == 2 and len(trial.statuses) > 1:
        trial.faults.append(f"it refused to go on: {errors.strip()[-500:]}")


def _clear(family: dict[int, psutil.Process]) -> int:
    """Wait until a dead driver's processes are gone; kills and counts those that stay.

    Ray's agents and workers that were just starting look for its server for about a minute before they end, too: the
    agents, of which there are always some, are not waited for.
    """
    agents = [one for one in family.values() if "Agent" in _title(one)]
    _, alive = psutil.wait_procs([one for one in family.values() if one not in agents], timeout=LEFT_AFTER_S)
    for process in (*alive, *agents):
        _kill(process)
    return len(alive)


# -- comparison ----------------------------------------------------------------------------------------------------


def compare(command: Command, expected: Path, found: Path) -> list[str]:
    """What differs between an undisturbed run and one that was killed and went on."""
    rounds = range(1, ROUNDS + 1) if command == "iterate" else (1,)
    faults = [fault for number in rounds for fault in _compare_labels(expected, found, f"round-{number}")]
    if command != "collect":
        for number in rounds:
            name = f"routers/round-{number}/router.safetensors"
            if (expected / name).read_bytes() != (found / name).read_bytes():
                faults.append(f"{name} differs")
    if command == "iterate":
        faults += _compare_tracking(found)
    return faults


def _compare_labels(expected: Path, found: Path, name: str) -> Iterator[str]:
    ours, theirs = (LabelStore(folder / "labels" / name) for folder in (found, expected))
    if not ours.is_complete():
        yield f"labels of {name} are not complete"
        return
    rows, wanted = ours.read_rows(), theirs.read_rows()
    ids, wanted_ids = rows["example_id"].to_pylist(), wanted["example_id"].to_pylist()
    if lost := set(wanted_ids) - set(ids):
        yield f"{name} lost {len(lost)} examples"
    if doubled := len(ids) - len(set(ids)):
        yield f"{name} has {doubled} examples twice"
    if not rows.equals(wanted):
        yield f"labels of {name} differ"
    if ours.read_manifest().digest() != theirs.read_manifest().digest():
        yield f"the manifest of {name} differs"


def _compare_tracking(folder: Path) -> Iterator[str]:
    """One run a round under one run of the experiment, all of them finished."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs(experiments)
    names = sorted(run.data.tags["mlflow.runName"] for run in runs if "mlflow.parentRunId" in run.data.tags)
    if names != [f"round-{number}" for number in range(1, ROUNDS + 1)]:
        yield f"MLflow has the rounds {names}"
    if len(runs) != ROUNDS + 1:
        yield f"MLflow has {len(runs)} runs"
    if open_runs := [run.info.status for run in runs if run.info.status != "FINISHED"]:
        yield f"MLflow has runs that are {open_runs}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; returns 1 if any run came out different."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos.json")
    options = parser.parse_args(arguments)
    console = Console()
    trials = draw_trials(options.trials, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="citer-chaos-") as name:
        undisturbed = Undisturbed.run(Path(name) / "undisturbed" / "run")
        times = ", ".join(f"{command} {seconds:.0f} s" for command, seconds in undisturbed.seconds.items())
        console.print(f"undisturbed: {times}", highlight=False)
        for index, drawn in enumerate(trials):
            folder = Path(name) / f"trial-{drawn.number}"
            trials[index] = trial = run_until_hit(drawn, undisturbed, folder, options.seed)
            console.print(trial.summary(), highlight=False, markup=False, soft_wrap=True)
            shutil.rmtree(folder, ignore_errors=True)
            options.output.write_text(json.dumps([asdict(one) for one in trials], indent=2) + "\n", encoding="utf-8")
    bad = [trial.number for trial in trials if trial.faults]
    hits = sum(trial.hit is not None for trial in trials)
    console.print(f"{len(trials)} trials, {hits} kills, {len(bad)} with faults{f': {bad}' if bad else ''}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
