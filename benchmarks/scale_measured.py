"""The simulation against collections that run here: the embedded pair, with one worker for rollouts and with two.

First the times of passes are measured in one process: scoring a token, a step of rollouts by the number of rows, and
what starting a worker costs. All are CPU seconds, so that other load of the machine does not count. Then the simulation
gets the work of some chunks, all workers on the machine's cores, and says how long a collection takes; then it runs.
Read by `scale`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.scale_simulation import Outcome, Pool, simulate
from benchmarks.scale_times import Batching, ChunkSeconds, LinearPass, first_round_seconds, rollout_seconds
from benchmarks.scale_work import ChunkWork
from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config
from citer_ray.decoding import Request, decode_many
from citer_ray.engine import Engine, Sampling, Session, Turn
from citer_ray.engines.build import build_engine
from citer_ray.examples import Example
from citer_ray.on_ray.collect import CollectPlan, chunked
from citer_ray.policy import AlwaysSlm
from citer_ray.preparation import Prepared, engine_spec, load_purpose, prepare

ROOT = Path(__file__).parents[1]
STEP_ROWS = (1, 32, 128, 256)  # of the passes that are timed
STEP_TOKENS = 24
HANDLED_CHUNKS = (20, 120)  # of the collections that time what comes with a chunk


@dataclass(frozen=True)
class Measured:
    """What the simulation is fed with; seconds are of CPU.

    Attributes:
        slm: passes of the SLM that score.
        llm: of the LLM.
        step: of the SLM that decode.
        load_s: until a worker takes its first chunk.
        handling_s: what Ray and the driver do for a chunk in one pool.
        grading_s: what a rollout costs its worker beside the model's passes: sessions, text and grades.
        work: some chunks, which stand for all.
    """

    slm: LinearPass
    llm: LinearPass
    step: LinearPass
    load_s: float
    handling_s: float
    grading_s: float
    work: tuple[ChunkWork, ...]

    def predict(self, chunks: int, rollout_workers: int, cores: float, batching: Batching) -> Outcome:
        """A collection on `cores`, of which other load takes away fractions."""
        whole = max(1, os.cpu_count() or 1)
        slower = whole / cores
        seconds = first_round_seconds(self.work, self.slm, self.llm, batching, self.step)
        graded = [
            replace(one, rollouts=one.rollouts + self.grading_s * len(work.tokens))
            for one, work in zip(seconds, self.work, strict=True)
        ]
        all_of = [graded[index % len(graded)] for index in range(chunks)]

        def pool(name: str, workers: int) -> Pool:
            return Pool(name, workers, slower * self.load_s, [slower * _of(one, name) for one in all_of])

        pools = [pool("slm", 1), pool("llm", 1), pool("rollouts", rollout_workers)]
        return simulate(pools, driver_s=slower * self.handling_s, cores=whole)


def _of(one: ChunkSeconds, name: str) -> float:
    return float(getattr(one, name))


def config_of(folder: Path, examples: int, rollout_workers: int, changes: Sequence[str] = ()) -> CiterConfig:
    """The embedded pair; rollouts decide a part of all positions, so that they are most of the work."""
    return load_config(
        ROOT / "configs" / "smoke.yaml",
        [
            f"output_dir={folder}",
            "tracking.enabled=false",
            f"data.collect_limit={examples}",
            "collect.examples_per_chunk=8",
            "collect.branches=none",
            "collect.shortcut=false",
            "collect.state_fraction=0.4",
            "collect.slm={count: 1, num_cpus: 0.25}",
            "collect.llm={count: 1, num_cpus: 0.25}",
            f"collect.rollouts={{count: {rollout_workers}, num_cpus: 0.5}}",
            "evaluate.workers={count: 1, num_cpus: 0.25}",
            *changes,
        ],
    )


# -- times of passes -----------------------------------------------------------------------------------------------


class _Recorded:
    """An engine that notes each decoded response: tokens of its context, and of what it wrote."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.responses: list[list[int]] = []

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    async def close(self) -> None:
        await self._engine.close()

    async def score(self, batch: Any, *, hidden: bool = False) -> Any:
        return await self._engine.score(batch, hidden=hidden)

    async def open(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Session:
        session = await self._engine.open(prompt_ids, sampling, **options)
        note = [len(prompt_ids), 0]
        self.responses.append(note)
        return _RecordedSession(session, note)


class _RecordedSession:
    def __init__(self, session: Session, note: list[int]) -> None:
        self._session, self._note = session, note

    @property
    def num_tokens(self) -> int:
        return self._session.num_tokens

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        turn = await self._session.turn(new_ids, max_tokens)
        self._note[1] += len(turn.token_ids)
        return turn

    async def close(self) -> None:
        await self._session.close()


def measure_times(config: CiterConfig, chunks: int) -> Measured:
    """Label the first chunks in this process and time passes, on as many threads as a worker has."""
    prepared = prepare(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.engine.torch_threads or 1)
    try:
        return _measure(prepared, chunks)
    finally:
        torch.set_num_threads(threads)


def _measure(prepared: Prepared, count: int) -> Measured:
    spec = engine_spec(prepared)
    labeller = CollectPlan(spec, prepared.eos_token_id, 1, AlwaysSlm(), None, Path("unused"), None).labeller()
    examples = load_purpose(prepared, "collect").examples
    chunks = chunked(examples, prepared.config.collect.examples_per_chunk)[:count]
    scoring, deciding = build_engine("slm", spec, purpose="score"), _Recorded(build_engine("slm", spec))
    llm = build_engine("llm", spec, purpose="score")
    seconds, tokens = {"slm": 0.0, "llm": 0.0, "rollouts": 0.0}, {"slm": 0, "llm": 0}
    work = []

    async def one(number: int, chunk: Sequence[Example]) -> ChunkWork:
        before = time.process_time()
        rows = await labeller.score_slm(scoring, chunk, number)
        seconds["slm"] += time.process_time() - before
        before = time.process_time()
        scored = await labeller.score_llm(llm, rows)
        seconds["llm"] += time.process_time() - before
        asked = np.array([any(id is not None for id in row.llm_ids) for row in scored])
        lengths = np.array([(len(row.prompt_ids), len(row.reference_ids)) for row in scored])
        tokens["slm"] += int(lengths.sum())
        tokens["llm"] += int(lengths[asked].sum())
        deciding.responses.clear()
        before = time.process_time()
        decided = await labeller.decide(deciding, None, scored, {example.id: example for example in chunk})
        seconds["rollouts"] += time.process_time() - before
        # `decode_many` opens responses in the order of the rows.
        counts = [row.rollouts for row in decided]
        noted = np.array(deciding.responses, np.int64).reshape(-1, 2)
        owners = np.repeat(np.arange(len(decided)), counts)[: len(noted)]
        return ChunkWork(lengths[:, 0], lengths[:, 1], asked, owners, noted[:, 0], noted[:, 1])

    for number, chunk in enumerate(chunks):
        work.append(asyncio.run(one(number, chunk)))
    per_token = {name: seconds[name] / max(1, tokens[name]) for name in tokens}
    step = _step_time(build_engine("slm", spec), work, per_token["slm"])
    config = prepared.config
    batching = Batching(config.engine.max_pass_tokens, config.collect.rollouts_in_flight)
    in_passes = sum(rollout_seconds(one, step, batching) for one in work)
    return Measured(
        slm=LinearPass(0.0, token=per_token["slm"]),
        llm=LinearPass(0.0, token=per_token["llm"]),
        step=step,
        load_s=_load_seconds(config),
        handling_s=_handling_seconds(config),
        grading_s=max(0.0, seconds["rollouts"] - in_passes) / max(1, sum(len(one.tokens) for one in work)),
        work=tuple(work),
    )


def _step_time(engine: Engine, work: Sequence[ChunkWork], per_token: float) -> LinearPass:
    """Seconds of a decoding pass as a line in its rows: from responses of equal length, several numbers at once."""
    context = int(np.mean(np.concatenate([one.contexts for one in work])))
    limit = Sampling(ignore_eos=True)
    prompt = [5 + index % 7 for index in range(context)]

    async def decode(rows: int, tokens: int) -> float:
        requests = [Request(prompt, AlwaysSlm(), tokens, limit) for _ in range(rows)]
        before = time.process_time()
        await decode_many(engine, None, requests, in_flight=rows)
        return time.process_time() - before

    points = []
    for rows in STEP_ROWS:
        short, long = (asyncio.run(decode(rows, tokens)) for tokens in (4, 4 + STEP_TOKENS))
        points.append((rows, max(1e-6, long - short) / STEP_TOKENS))
    rows_N, seconds_N = np.array(points).T
    row, fixed = np.polyfit(rows_N, seconds_N, 1, w=1 / seconds_N)
    # A pass over many new tokens is a prefill, whose time is that of scoring.
    return LinearPass(max(0.0, float(fixed)), row=max(0.0, float(row) - per_token), token=per_token)


def _load_seconds(config: CiterConfig) -> float:
    """CPU seconds of a fresh process until it holds a model: imports and weights."""
    code = (
        "import sys\n"
        "import citer_ray.on_ray.collect\n"
        "from citer_ray.config_loading import load_config\n"
        "from citer_ray.pair.models import load_model, load_tokenizer\n"
        "config = load_config(sys.argv[1], [])\n"
        "load_tokenizer(config.pair.slm), load_model(config.pair.slm)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_yaml(config), encoding="utf-8")
        before = os.times()
        subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=True, capture_output=True)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _handling_seconds(config: CiterConfig) -> float:
    """CPU seconds of one chunk in one pool apart from the models: two collections by an engine that makes up scores."""
    cpu = []
    for chunks in HANDLED_CHUNKS:
        examples = chunks * config.collect.examples_per_chunk
        with tempfile.TemporaryDirectory() as folder:
            settings = [
                "engine.factory=benchmarks.scale_memory:made_up_engine",
                "collect.shortcut=true",
                "collect.both_wrong=slm",
            ]
            cpu.append(collect(config_of(Path(folder), examples, 1, settings)).cpu)
    few, many = HANDLED_CHUNKS
    return max(0.0, cpu[1] - cpu[0]) / (many - few) / 3


# -- the collection itself -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collected:
    """A collection that ran: wall seconds, cores that other processes left to it, and CPU seconds of all of it."""

    seconds: float
    cores: float
    cpu: float


def collect(config: CiterConfig) -> Collected:
    """Run a collection on Ray and time it, without Ray's own start."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    from citer_ray.on_ray.experiment import Experiment

    with Experiment.start(config, sys.argv) as experiment:
        _ = experiment.spec, experiment.collect_examples
        with _Meter() as meter:
            experiment.collect(1)
        return meter.collected


class _Meter:
    """Times of what runs within; Ray does not wait for workers that it ends, so their times are looked at in between.

    Attributes:
        collected: the result, once it is left.
    """

    collected: Collected

    def __enter__(self) -> _Meter:
        self._wall, self._machine, self._before = time.monotonic(), _machine_seconds(), _family_seconds()
        self._seen: dict[int, float] = dict(self._before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._seen |= _family_seconds()
        seconds = time.monotonic() - self._wall
        own = sum(cpu - self._before.get(pid, 0.0) for pid, cpu in self._seen.items())
        others = max(0.0, _machine_seconds() - self._machine - own)
        cores = max(0.2, float(psutil.cpu_count() or 1) - others / seconds)
        self.collected = Collected(seconds, cores, own)

    def _look(self) -> None:
        while not self._stop.wait(0.25):
            self._seen |= _family_seconds()


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _family_seconds() -> dict[int, float]:
    """CPU seconds of this process and of all below it that live."""
    me = psutil.Process()
    seconds: dict[int, float] = {}
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds
