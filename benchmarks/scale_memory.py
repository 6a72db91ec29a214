"""Memory of a collection against the size of its data set: of the driver, and of Ray's object store.

A collection on Ray as it is, with an engine that makes up scores instead of computing them (`engine.factory`), so that
50,000 examples take minutes. Each size runs in a process of its own (`python -m benchmarks.scale_memory EXAMPLES
FOLDER`), whose peak is the operating system's. Read by `scale`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.engine import Engine, Sampling, Scores, Session, TokenSequence
from citer_ray.engines.build import EngineSpec, Role

ROOT = Path(__file__).parents[1]
HIDDEN_SIZE = 128
SOURCE_ROWS = 500  # different texts; ids are all different
MEBIBYTE = 2**20


class MadeUpEngine:
    """Scores without a model: the reference's own tokens, wrong at every eighth position, and constant hidden states.

    Constant, since a random vector for each position would take longer than all the rest; nothing here compresses them.
    """

    def __init__(self, role: Role, spec: EngineSpec) -> None:
        self.max_model_len = spec.max_model_len
        self._wrong = 8 if role == "slm" else 16

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        """See `Engine`."""
        return [self._one(np.asarray(one.response_ids, np.int32), hidden) for one in batch]

    def _one(self, reference_T: np.ndarray, hidden: bool) -> Scores:
        greedy_T = reference_T.copy()
        greedy_T[:: self._wrong] += 1
        states_TH = np.full((len(reference_T), HIDDEN_SIZE), 0.5, np.float32) if hidden else None
        return Scores(greedy_T, np.zeros(len(reference_T), np.float32), states_TH)

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> Session:
        """Raises: NotImplementedError: nothing here decodes."""
        raise NotImplementedError

    async def close(self) -> None:
        """There is nothing to free."""


def made_up_engine(role: Role, spec: EngineSpec) -> Engine:
    """For `engine.factory`."""
    return MadeUpEngine(role, spec)


@dataclass(frozen=True)
class Peaks:
    """Peaks of one collection, in MiB, and its labels.

    Attributes:
        examples: labelled.
        driver: resident memory of the driver.
        before: of it, what the driver holds when Ray has started and nothing is loaded.
        store: used bytes of the object store.
        worker: resident memory of the largest worker.
        hidden: all hidden states that went through.
        seconds: of the collection.
    """

    examples: int
    driver: float
    before: float
    store: float
    worker: float
    hidden: float
    seconds: float


def measure(examples: int, folder: Path) -> Peaks:
    """Collect in a process of its own.

    Raises:
        RuntimeError: the collection failed.
    """
    command = [sys.executable, "-m", "benchmarks.scale_memory", str(examples), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the collection of {examples} examples failed: {done.stderr[-3000:]}")
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def _config(examples: int, folder: Path) -> CiterConfig:
    source = folder / "examples.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    with source.open("w", encoding="utf-8") as file:
        for number in range(examples):
            price, count = number % SOURCE_ROWS, number % 7 + 2
            row = {
                "id": f"made-up-{number}",
                "question": f"Tom buys {count} pens at {price} cents each. What does he pay?",
                "solution": f"He pays {count} * {price} = {count * price} cents. The answer is {count * price}.",
                "answer": str(count * price),
            }
            file.write(json.dumps(row) + "\n")
    return load_config(
        ROOT / "configs" / "smoke.yaml",
        [
            f"output_dir={folder / 'run'}",
            f"data.collect={source}",
            "data.collect_limit=null",
            "tracking.enabled=false",
            "engine.factory=benchmarks.scale_memory:made_up_engine",
            "collect.examples_per_chunk=100",
            "collect.branches=none",
            "collect.both_wrong=slm",
        ],
    )


@contextmanager
def _watching_store(peaks: dict[str, float]) -> Iterator[None]:
    """Look at the object store and the workers, five times a second."""
    import psutil

    stop = threading.Event()
    state = get_state_from_address(ray.get_runtime_context().gcs_address)

    def watch() -> None:
        driver = psutil.Process()
        while not stop.wait(0.2):
            used = get_memory_info_reply(state).store_stats.object_store_bytes_used
            peaks["store"] = max(peaks["store"], used / MEBIBYTE)
            for child in driver.children(recursive=True):
                try:
                    if child.cmdline()[0].startswith("ray::"):
                        peaks["worker"] = max(peaks["worker"], child.memory_info().rss / MEBIBYTE)
                except (psutil.Error, IndexError):
                    continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _main(examples: int, folder: Path) -> Peaks:
    from citer_ray.on_ray.experiment import Experiment

    config = _config(examples, folder)
    peaks = {"store": 0.0, "worker": 0.0}
    with Experiment.start(config, sys.argv) as experiment:
        before = _peak()
        started = time.monotonic()
        with _watching_store(peaks):
            manifest = experiment.collect(1)
        seconds = time.monotonic() - started
    hidden = manifest.positions * manifest.hidden_size * 2 / MEBIBYTE
    return Peaks(manifest.examples, _peak(), before, peaks["store"], peaks["worker"], hidden, seconds)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBIBYTE


if __name__ == "__main__":
    found = _main(int(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(found.__dict__))
