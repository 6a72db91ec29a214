"""Remote sessions and the ingress's backend, over stand-ins for Serve's handles: every failure that a call can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from citer_ray.config_serve import ServeConfig
from citer_ray.decoding import Request, decode
from citer_ray.engine import Finish, Sampling
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.errors import RetryableError
from citer_ray.on_ray import serve_sessions
from citer_ray.on_ray.serve_ingress import HandleBackend
from citer_ray.on_ray.serve_lanes import LOST, TurnReply
from citer_ray.on_ray.serve_routing import SuccessorRouter, session_id
from citer_ray.on_ray.serve_sessions import Limits, ReplicaEngine, TurnCall
from citer_ray.policy import AlwaysLlm, Threshold, Writer
from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.jobs import Job, Report, Run
from citer_ray.serving.responding import LlmUnavailableError
from tests.unit.serve_handles import FakeMethod, score_of, token_of

LIMITS = Limits(turn_timeout_s=0.05, unavailable_after_s=1.0)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_sessions, "_PAUSE_S", 0.0)


class FakeReplicas:
    """A handle of the LLM's deployment: one scripted engine for each number behind `#`.

    `faults` are taken one a call: an exception is raised, `hang` never answers, `restart` forgets all sessions.
    """

    def __init__(self, engine: ScriptedEngine, faults: Sequence[Any] = ()) -> None:
        self._engine, self.faults = engine, list(faults)
        self.sessions: dict[str, Any] = {}
        self.calls: list[tuple[str, TurnCall]] = []

    def options(self, *, session_id: str) -> Any:
        return _Pinned(self, session_id)

    async def turn(self, where: str, call: TurnCall) -> TurnReply:
        self.calls.append((where, call))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "restart":
            self.sessions.clear()
        session, new_ids = self.sessions.get(where), call.ids
        if session is None or session.num_tokens != call.base:
            if call.base:
                return LOST
            session, new_ids = await self._engine.open(call.ids, call.sampling), []
            self.sessions[where] = session
        turn = await session.turn(new_ids, call.max_tokens)
        return TurnReply(False, turn.token_ids, turn.logprobs, turn.finish)

    async def close_session(self, where: str) -> None:
        if where in self.sessions:
            await self.sessions.pop(where).close()


class _Pinned:
    def __init__(self, replicas: FakeReplicas, where: str) -> None:
        self.turn = FakeMethod(lambda call: replicas.turn(where, call))
        self.close_session = FakeMethod(lambda key: replicas.close_session(where))


@pytest.mark.parametrize(
    ("faults", "rebuilds"),
    [
        ([], 0),
        ([None, RayActorError()], 1),
        ([None, "hang", "hang"], 1),
        ([None, None, "restart"], 1),
        ([RetryableError("engine"), None, TimeoutError()], 1),
        ([None, RayActorError(), RayActorError(), "restart"], 1),
    ],
)
async def test_faults_change_no_token(faults: list[Any], rebuilds: int) -> None:
    request = Request([5, 6, 7], Threshold("router", 0.5), 30)
    expected = await decode(ScriptedEngine(token_of, score_of), ScriptedEngine(token_of), request)
    assert expected.visits > 4
    replicas = FakeReplicas(ScriptedEngine(token_of), faults)
    turns: list[float] = []
    remote = ReplicaEngine(replicas, 1000, LIMITS, turns.append)  # type: ignore[arg-type]
    trace = await decode(ScriptedEngine(token_of, score_of), remote, request)
    assert (trace.token_ids, trace.writers, trace.scores) == (expected.token_ids, expected.writers, expected.scores)
    assert remote.rebuilds == rebuilds and len(turns) == expected.visits and remote.num_open == 0
    while replicas.sessions:  # closing happens in the background
        await asyncio.sleep(0)


async def test_a_turn_sends_only_what_the_replica_lacks() -> None:
    replicas = FakeReplicas(ScriptedEngine(token_of))
    remote = ReplicaEngine(replicas, 1000, LIMITS, lambda _: None)  # type: ignore[arg-type]
    await decode(ScriptedEngine(token_of, score_of), remote, Request([5, 6, 7], Threshold("router", 0.5), 30))
    assert len({where for where, _ in replicas.calls}) == 1
    ends = [call.base + len(call.ids) for _, call in replicas.calls]
    # The replica holds all that it was sent; what it wrote itself is the one token that it lacks.
    assert [call.base for _, call in replicas.calls] == [0, *ends[:-1]]


async def test_a_replica_that_never_answers_makes_the_llm_unavailable() -> None:
    replicas = FakeReplicas(ScriptedEngine(token_of), ["hang"] * 100)
    limits = Limits(turn_timeout_s=0.01, unavailable_after_s=0.3)
    remote = ReplicaEngine(replicas, 1000, limits, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(LlmUnavailableError, match="no replica of the LLM"):
        await decode(None, remote, Request([5], AlwaysLlm(), 3))
    attempts = [where.rpartition("#")[2] for where, _ in replicas.calls]
    assert attempts == [str(index) for index in range(len(attempts))] and len(attempts) > 1
    assert remote.num_open == 0


async def test_a_bug_in_the_replica_is_not_retried() -> None:
    replicas = FakeReplicas(ScriptedEngine(token_of), [ZeroDivisionError("bug")])
    remote = ReplicaEngine(replicas, 1000, LIMITS, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await decode(None, remote, Request([5], AlwaysLlm(), 3))
    assert len(replicas.calls) == 1


class FakeStream:
    """Reports and then a fault, as a `DeploymentResponseGenerator`."""

    def __init__(self, items: AsyncIterator[Report]) -> None:
        self._items, self.cancelled = items, False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Report:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class FakeSlm:
    """A handle of the SLM's deployment; each attempt reports some tokens, and then its fault comes."""

    def __init__(self, faults: Sequence[Any]) -> None:
        self.faults, self.jobs, self.streams = list(faults), [], []
        self.where: list[str] = []

    def options(self, *, stream: bool, session_id: str) -> FakeSlm:
        assert stream
        self.where.append(session_id)
        return self

    @property
    def respond(self) -> Any:
        return self

    def remote(self, job: Job) -> FakeStream:
        self.jobs.append(job)
        self.streams.append(FakeStream(self._reports(job)))
        return self.streams[-1]

    async def _reports(self, job: Job) -> AsyncIterator[Report]:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "queue":
            await asyncio.Event().wait()
        yield Report([])
        for index in range(len(job.written_ids), 6):
            if fault is not None and index == len(job.written_ids) + 2:
                if isinstance(fault, Exception):
                    raise fault
                await asyncio.Event().wait()
            yield Report([Run(Writer.SLM, [100 + index], [0.9], [0.0])])
        yield Report([], Finish.LENGTH)


def backend(faults: Sequence[Any], max_attempts: int = 3) -> tuple[HandleBackend, FakeSlm]:
    slm = FakeSlm(faults)
    config = ServeConfig(turn_timeout_s=0.05, max_attempts=max_attempts)
    return HandleBackend(slm, slm, config), slm  # type: ignore[arg-type]


JOB = Job("key", [1, 2], 6, Sampling(), "slm")


@pytest.mark.parametrize("faults", [[], [RayActorError()], ["hang"], [RetryableError("x"), TimeoutError()]])
async def test_a_job_goes_on_with_the_tokens_so_far(faults: list[Any]) -> None:
    served, slm = backend(faults)
    reports = [report async for report in served.respond(JOB)]
    assert [run.token_ids for report in reports for run in report.runs] == [[100 + index] for index in range(6)]
    assert reports[-1].finish is Finish.LENGTH and sum(report.rebuilds for report in reports) == len(faults)
    assert [len(job.written_ids) for job in slm.jobs] == [2 * index for index in range(len(faults) + 1)]
    assert slm.where == [f"key#{index}" for index in range(len(faults) + 1)]
    assert all(stream.cancelled for stream in slm.streams[:-1])


@pytest.mark.parametrize(
    ("faults", "status"),
    [([RayActorError()] * 2, 503), ([BackPressureError(1, 1, 429, 7.0)], 429), ([LlmUnavailableError("away")], 503)],
)
async def test_what_cannot_be_mended_tells_the_client_to_come_back(faults: list[Any], status: int) -> None:
    served, _ = backend(faults, max_attempts=2)
    with pytest.raises(ApiError) as caught:
        _ = [report async for report in served.respond(JOB)]
    assert caught.value.status == status and "Retry-After" in caught.value.headers
    if status == 429:
        assert caught.value.headers["Retry-After"] == "7"


async def test_waiting_in_a_queue_is_no_failure() -> None:
    served, slm = backend(["queue"] * 5, max_attempts=1)
    reports = [report async for report in served.respond(JOB)]
    assert reports[-1].finish is Finish.LENGTH and sum(report.rebuilds for report in reports) == 0
    assert slm.where == [f"key#{index}" for index in range(6)]


async def test_closing_the_reports_cancels_the_call() -> None:
    served, slm = backend([])
    stream = served.respond(JOB)
    await anext(stream)
    await stream.aclose()
    assert slm.streams[0].cancelled


class _Ring(SuccessorRouter):
    """The ring alone, without Serve around it."""

    def __init__(self, replicas: int) -> None:
        self._num_virtual_nodes, self._num_fallback_replicas = 50, 1
        names = frozenset(_Name(f"replica-{index}") for index in range(replicas))
        self._deployment_id = "LLM"
        self._rebuild_ring(names)


class _Name(str):
    @property
    def unique_id(self) -> str:
        return str(self)


def test_each_attempt_goes_to_another_replica() -> None:
    ring = _Ring(4)
    for key in ("a", "b", "session-17"):
        firsts = [ring._lookup_ranked_replicas(session_id(key, attempt))[0] for attempt in range(8)]
        assert len(set(firsts[:4])) == 4 and firsts[:4] == firsts[4:]
        assert len(ring._lookup_ranked_replicas(session_id(key, 2))) == 2
    assert {ring._lookup_ranked_replicas(session_id(str(key), 0))[0] for key in range(50)} == set(
        ring._replica_set_snapshot
    )
    assert _Ring(0)._lookup_ranked_replicas("a#1") == []
    assert len(ring._lookup_ranked_replicas("plain-request-id")) == 2
