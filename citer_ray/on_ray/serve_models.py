"""The deployments `SLM` and `LLM`: one engine a replica.

The SLM's replica runs the routed loop: its own turns are local, the LLM's are one call each, and the ingress gets one
stream of reports a response. The LLM's replica holds sessions by key, for the loops in the SLM's replicas, takes their
turns through Serve and on its lane, and decodes responses of the LLM alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from citer_ray.config import Replicas
from citer_ray.engine import Engine, Sampling, Session, Turn
from citer_ray.engines.build import EngineSpec, Role, build_engine, limit_threads
from citer_ray.engines.hf import TransformersEngine
from citer_ray.errors import RetryableError
from citer_ray.on_ray.serve_autoscaling import DIRECT_TURNS
from citer_ray.on_ray.serve_environment import join_logs
from citer_ray.on_ray.serve_lanes import LOST, LaneServer, TurnReply
from citer_ray.on_ray.serve_metrics import ModelMetrics
from citer_ray.on_ray.serve_sessions import Limits, ReplicaEngine, TurnCall
from citer_ray.router_artifact import load_router
from citer_ray.serving.jobs import Job, Report, RouterRef, scorer_name
from citer_ray.serving.responding import ResponseSettings, respond
from citer_ray.storage import storage_path

logger = logging.getLogger(__name__)

_SWEEP_S = 5.0


class _Model:
    """What both deployments share: the engine, its gauges, and jobs."""

    def __init__(self, role: Role, spec: EngineSpec, router: RouterRef | None) -> None:
        config = spec.config.serve
        deployment = config.slm if role == "slm" else config.llm
        replicas = Replicas(num_cpus=deployment.num_cpus, num_gpus=deployment.num_gpus)
        limit_threads(spec.config, replicas)
        join_logs()
        self._role, self._spec, self._config = role, spec, config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-passes")
        folder = None if router is None else storage_path(router.source)
        self._engine = build_engine(role, spec, router=folder, executor=self._executor, worker=replicas)
        self.metrics = ModelMetrics(role)
        self.jobs = 0

    async def _respond(self, job: Job, slm: Engine | None, llm: Engine | None) -> AsyncGenerator[Report, None]:
        settings = ResponseSettings(self._config.on_llm_unavailable)
        self.jobs += 1
        self.metrics.jobs(self.jobs)
        stream = respond(job, slm, llm, settings)
        try:
            async for report in stream:
                yield report
        finally:
            await stream.aclose()
            self.jobs -= 1
            self.metrics.jobs(self.jobs)


class TimedEngine:
    """An engine whose turns fail after a time, so that a response does not wait for an engine that hangs."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self.num_open = 0

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> Session:
        if scorer is not None and not isinstance(self._engine, TransformersEngine):
            scorer = "router"  # the one that the engine was started with, whatever its version
        session = await self._engine.open(prompt_ids, sampling, scorer=scorer, threshold=threshold)
        self.num_open += 1
        return _TimedSession(self, session, self._timeout_s)

    async def score(self, *args: Any, **keywords: Any) -> Any:
        return await self._engine.score(*args, **keywords)

    async def close(self) -> None:
        await self._engine.close()


class _TimedSession:
    def __init__(self, engine: TimedEngine, session: Session, timeout_s: float) -> None:
        self._engine, self._session, self._timeout_s = engine, session, timeout_s
        self._closed = False

    @property
    def num_tokens(self) -> int:
        return self._session.num_tokens

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._session.turn(new_ids, max_tokens)
        except TimeoutError:
            raise RetryableError(f"a turn took more than {self._timeout_s:g} s") from None

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.num_open -= 1
            await self._session.close()


class SlmReplica(_Model):
    """The deployment `SLM`.

    Args:
        spec: the pair.
        llm: handle of the deployment `LLM`.
        router: the router that a vLLM engine starts with; other engines load routers when jobs name them.
    """

    def __init__(self, spec: EngineSpec, llm: DeploymentHandle[Any], router: RouterRef | None = None) -> None:
        super().__init__("slm", spec, router)
        limits = Limits(self._config.turn_timeout_s, self._config.llm_unavailable_after_s)
        node_ip = get_node_ip_address() if self._config.direct_turns else None
        self._llm = ReplicaEngine(llm, spec.max_model_len, limits, self.metrics.visit, node_ip)
        self._slm = TimedEngine(self._engine, self._config.turn_timeout_s)
        self._loaded: set[str] = set()
        self._loading = asyncio.Lock()

    async def respond(self, job: Job) -> AsyncGenerator[Report, None]:
        """Reports of a job of the models `routed` and `slm`."""
        if job.router is not None:
            await self._load(job.router)
        async for report in self._respond(job, self._slm, self._llm):
            self.metrics.sessions(self._slm.num_open)
            yield report
        self.metrics.sessions(self._slm.num_open)

    async def open_sessions(self) -> dict[str, int]:
        """What this process has in use, for tests and for people who look."""
        return {"pid": os.getpid(), "jobs": self.jobs, "slm": self._slm.num_open, "llm": self._llm.num_open}

    async def _load(self, router: RouterRef) -> None:
        """Have the scorer of a router version; replicas take new routers in without a restart."""
        if router.version in self._loaded or not isinstance(self._engine, TransformersEngine):
            return
        async with self._loading:
            if router.version not in self._loaded:
                fingerprint = self._spec.slm_fingerprint
                loaded, _ = await asyncio.to_thread(load_router, router.source, slm_fingerprint=fingerprint)
                self._engine.set_scorer(scorer_name(router.version), self._engine.router_scorer(loaded))
                self._loaded.add(router.version)
                logger.info("router %s is loaded", router.version)


@dataclass(slots=True)
class _Held:
    """A session of the LLM's replica."""

    session: Session
    last_used: float
    busy: bool = False


class LlmReplica(_Model):
    """The deployment `LLM`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__("llm", spec, None)
        self._timed = TimedEngine(self._engine, self._config.turn_timeout_s)
        self._sessions: dict[str, _Held] = {}  # least recently used first
        self._turn_ended = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._lanes = LaneServer(self._turn_on_lane, self.close_session)

    async def respond(self, job: Job) -> AsyncGenerator[Report, None]:
        """Reports of a job of the model `llm`."""
        async for report in self._respond(job, None, self._timed):
            yield report

    async def turn(self, request: TurnCall) -> TurnReply:
        """A turn of a session, through Serve; the first one opens it."""
        request = TurnCall(*request)
        if request.base == 0:
            held = await self._open(request.key, request.ids, request.sampling)
            reply = await self._run(request.key, held, [], request.max_tokens)
        else:
            reply = await self._continue(request.key, request.base, request.ids, request.max_tokens)
        return reply if request.caller is None else reply._replace(lane=await self._lanes.address_for(request.caller))

    async def _turn_on_lane(self, key: str, base: int, ids: list[int], max_tokens: int) -> TurnReply:
        self.metrics.direct_visit()
        return await self._continue(key, base, ids, max_tokens)

    async def _open(self, key: str, ids: list[int], sampling: Sampling) -> _Held:
        await self.close_session(key)
        await self._make_room()
        held = self._sessions[key] = _Held(await self._timed.open(ids, sampling), time.monotonic())
        self._sweep()
        return held

    async def _continue(self, key: str, base: int, ids: list[int], max_tokens: int) -> TurnReply:
        held = self._sessions.get(key)
        if held is None or held.busy or held.session.num_tokens != base:
            return LOST
        return await self._run(key, held, ids, max_tokens)

    async def _run(self, key: str, held: _Held, new_ids: list[int], max_tokens: int) -> TurnReply:
        self._sessions[key] = self._sessions.pop(key)
        held.busy, began = True, time.monotonic()
        try:
            turn = await held.session.turn(new_ids, max_tokens)
        except BaseException:
            if self._sessions.get(key) is held:
                del self._sessions[key]
            await held.session.close()
            raise
        finally:
            held.busy, held.last_used = False, time.monotonic()
            self._turn_ended.set()
            self.metrics.sessions(len(self._sessions))
        self.metrics.turn(time.monotonic() - began, len(turn.token_ids))
        return TurnReply(False, turn.token_ids, turn.logprobs, turn.finish)

    async def close_session(self, key: str) -> None:
        """Free a session's KV cache."""
        held = self._sessions.pop(key, None)
        if held is not None:
            await held.session.close()
        self.metrics.sessions(len(self._sessions))

    async def open_sessions(self) -> dict[str, int]:
        """What this process has in use, for tests and for people who look."""
        return {"pid": os.getpid(), "jobs": self.jobs, "llm": len(self._sessions), "kv": self._timed.num_open}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve does not see: turns in progress on lanes. Serve asks for it, for `serve_autoscaling`."""
        return {DIRECT_TURNS: float(self._lanes.num_turns)}

    async def _make_room(self) -> None:
        """Take the KV cache of the session that was idle longest, if there is none left; its owner rebuilds it."""
        while len(self._sessions) + self.jobs >= self._spec.config.engine.max_rows:
            idle = next((key for key, held in self._sessions.items() if not held.busy), None)
            if idle is not None:
                await self.close_session(idle)
                continue
            self._turn_ended.clear()
            await self._turn_ended.wait()

    def _sweep(self) -> None:
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._close_idle())

    async def _close_idle(self) -> None:
        """Close the sessions whose owner died without a word."""
        while self._sessions:
            await asyncio.sleep(min(_SWEEP_S, self._config.session_idle_s / 2))
            oldest = time.monotonic() - self._config.session_idle_s
            for key in [key for key, held in self._sessions.items() if not held.busy and held.last_used < oldest]:
                await self.close_session(key)
