"""A discrete-event simulation of a collection on Ray: chunks pass pools of workers that a driver feeds.

It has the structure of `on_ray/collect.py`: pools load their weights at the same time, every worker takes one chunk at
a time in order, the driver touches each chunk once a pool. On CPUs workers share cores. Fed with the seconds of
`scale_times`; what comes out is how long it takes and which part decides it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]

STRAGGLERS, DRIVER, LOADING = "stragglers at the end", "driver", "loading weights"


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of one stage.

    Attributes:
        name: of the stage, as a bottleneck is called.
        workers: how many.
        load_s: until a worker takes its first chunk.
        seconds: of each chunk, by index.
    """

    name: str
    workers: int
    load_s: float
    seconds: Sequence[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated collection took.

    Attributes:
        seconds: from the start to the last chunk.
        done_s: when each chunk was written.
        busy_s: seconds of work of each pool, all workers together.
        parts: for each possible bottleneck, the seconds below which the collection cannot go because of it alone; of
            stragglers, the time in which the last pool's workers were idle at the end, on average.
    """

    seconds: float
    done_s: tuple[float, ...]
    busy_s: dict[str, float]
    parts: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass
class _Run:
    env: simpy.Environment
    pools: Sequence[Pool]
    driver_s: float
    cores: simpy.Resource | None
    quantum_s: float
    driver: simpy.Resource = field(init=False)
    idle: list[simpy.Store] = field(init=False)
    done: dict[int, float] = field(default_factory=dict)
    last_end: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.driver = simpy.Resource(self.env, capacity=1)
        self.idle = [simpy.Store(self.env) for _ in self.pools]
        for pool, idle in zip(self.pools, self.idle, strict=True):
            for worker in range(pool.workers):
                self.env.process(self._load(pool, idle, worker))
        for chunk in range(len(self.pools[0].seconds)):
            self.env.process(self._chunk(chunk))

    def _load(self, pool: Pool, idle: simpy.Store, worker: int) -> Process:
        yield from self._work(pool.load_s)
        yield idle.put(worker)

    def _chunk(self, chunk: int) -> Process:
        for number, (pool, idle) in enumerate(zip(self.pools, self.idle, strict=True)):
            if self.driver_s:
                with self.driver.request() as turn:
                    yield turn
                    yield from self._work(self.driver_s)
            worker = yield idle.get()
            yield from self._work(pool.seconds[chunk])
            if number == len(self.pools) - 1:
                self.last_end[worker] = self.env.now
            yield idle.put(worker)
        self.done[chunk] = self.env.now

    def _work(self, seconds: float) -> Process:
        """Seconds of one worker: as they are, or on a core that is shared in turns."""
        if self.cores is None:
            yield self.env.timeout(seconds)
            return
        while seconds > 0:
            with self.cores.request() as core:
                yield core
                part = min(seconds, self.quantum_s)
                yield self.env.timeout(part)
                seconds -= part


def simulate(
    pools: Sequence[Pool], *, driver_s: float = 0.0, cores: int | None = None, quantum_s: float = 0.05
) -> Outcome:
    """Run a collection.

    Args:
        pools: in the order in which a chunk passes them; all name the same chunks.
        driver_s: what the driver does for a chunk before each pool.
        cores: that all workers and the driver share; None gives each its own device.
        quantum_s: length of a turn on a shared core.

    Raises:
        ValueError: no pool, no worker, or pools of different chunks.
    """
    if not pools or any(pool.workers < 1 for pool in pools):
        raise ValueError("a collection needs pools with at least one worker each")
    if len({len(pool.seconds) for pool in pools}) != 1:
        raise ValueError("every pool needs the seconds of every chunk")
    env = simpy.Environment()
    run = _Run(env, pools, driver_s, simpy.Resource(env, capacity=cores) if cores else None, quantum_s)
    env.run()
    done = tuple(run.done[chunk] for chunk in range(len(pools[0].seconds)))
    seconds = max(done, default=0.0)
    busy = {pool.name: math.fsum(pool.seconds) for pool in pools}
    last = pools[-1]
    idle = math.fsum(seconds - run.last_end.get(worker, last.load_s) for worker in range(last.workers))
    parts = {pool.name: busy[pool.name] / pool.workers for pool in pools}
    parts[DRIVER] = driver_s * len(pools) * len(done)
    parts[LOADING] = max(pool.load_s for pool in pools)
    parts[STRAGGLERS] = idle / last.workers
    return Outcome(seconds, done, busy, parts)
