"""Lanes over real gRPC on localhost: turns, closings, and every way in which one fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from citer_ray.decoding import Request, decode
from citer_ray.engine import Finish
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.errors import RetryableError
from citer_ray.on_ray import serve_lanes
from citer_ray.on_ray.serve_autoscaling import DIRECT_TURNS, replicas_for_turns
from citer_ray.on_ray.serve_lanes import LOST, Lane, LaneAddress, LaneBrokenError, Lanes, LaneServer, TurnReply
from citer_ray.on_ray.serve_sessions import Limits, ReplicaEngine, TurnCall
from citer_ray.policy import Threshold
from tests.unit.serve_handles import FakeMethod, score_of, token_of

HERE = "10.1.2.3"
REPLY = TurnReply(False, [7, 8], [-0.1, -0.25], Finish.EOS)


class Replica:
    """Does turns as it is told: returns, raises, or waits for ever."""

    def __init__(self) -> None:
        self.outcome: TurnReply | Exception | None = REPLY
        self.turns: list[tuple[str, int, list[int], int]] = []
        self.closed: list[str] = []
        self.cancelled = asyncio.Event()

    async def turn(self, key: str, held: int, new_ids: list[int], max_tokens: int) -> TurnReply:
        self.turns.append((key, held, new_ids, max_tokens))
        if self.outcome is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    async def close_session(self, key: str) -> None:
        self.closed.append(key)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(serve_lanes, "get_node_ip_address", lambda: HERE)
    return Replica()


@pytest.fixture
async def server(replica: Replica) -> AsyncIterator[LaneServer]:
    server = LaneServer(replica.turn, replica.close_session)
    yield server
    await server.close()


async def lane_to(server: LaneServer) -> Lane:
    address = await server.address_for(HERE)
    assert address is not None
    return Lane(address)


async def test_a_turn_and_a_closing(server: LaneServer, replica: Replica) -> None:
    lane = await lane_to(server)
    assert await lane.turn("one", 40, [5, 6], 3, timeout_s=30) == REPLY
    assert replica.turns == [("one", 40, [5, 6], 3)]
    replica.outcome = LOST  # what a replica says that took the session's memory
    assert (await lane.turn("one", 42, [5], 3, timeout_s=30)).lost
    await lane.close_session("one", timeout_s=30)
    assert replica.closed == ["one"] and server.num_turns == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address for themselves")
async def test_callers_of_this_node_find_it_on_localhost(server: LaneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = await server.address_for(HERE)
    assert address is not None and address.target.startswith("127.0.0.1:")
    assert await server.address_for(HERE) == address
    monkeypatch.setattr(serve_lanes, "get_node_ip_address", lambda: "127.0.0.2")  # an address that exists here, too
    other = await server.address_for("10.9.9.9")
    assert other is not None and other.target.startswith("127.0.0.2:")
    assert await Lane(other).turn("one", 1, [2], 1, timeout_s=30) == REPLY


async def test_no_lane_where_it_cannot_listen(server: LaneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_lanes, "get_node_ip_address", lambda: "203.0.113.7")  # nobody's address (RFC 5737)
    assert await server.address_for(HERE) is None
    assert await server.address_for("203.0.113.7") is not None  # callers of this node are not concerned


async def test_no_lane_beside_encrypted_calls(server: LaneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert await server.address_for(HERE) is None


async def test_who_does_not_know_the_token_gets_nothing(server: LaneServer, replica: Replica) -> None:
    address = await server.address_for(HERE)
    assert address is not None
    stranger = Lane(LaneAddress(address.target, "guessed"))
    with pytest.raises(LaneBrokenError, match="UNAUTHENTICATED"):
        await stranger.turn("one", 1, [2], 1, timeout_s=30)
    with pytest.raises(LaneBrokenError, match="UNAUTHENTICATED"):
        await stranger.close_session("one", timeout_s=30)
    assert replica.turns == [] and replica.closed == []


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (RetryableError("the engine died"), RetryableError, "the engine died"),
        (ValueError("too long"), ValueError, "too long"),
        (KeyError("a bug"), LaneBrokenError, "KeyError"),
    ],
)
async def test_errors_reach_the_caller(
    outcome: Exception, error: type[Exception], message: str, server: LaneServer, replica: Replica
) -> None:
    replica.outcome = outcome
    with pytest.raises(error, match=message):
        await (await lane_to(server)).turn("one", 1, [2], 1, timeout_s=30)
    assert server.num_turns == 0


async def test_a_turn_that_takes_too_long_is_cancelled_on_both_sides(server: LaneServer, replica: Replica) -> None:
    replica.outcome = None
    with pytest.raises(TimeoutError):
        await (await lane_to(server)).turn("one", 1, [2], 1, timeout_s=0.05)
    await replica.cancelled.wait()


async def test_a_caller_that_leaves_cancels_its_turn(server: LaneServer, replica: Replica) -> None:
    replica.outcome = None
    lane = await lane_to(server)
    turn = asyncio.create_task(lane.turn("one", 1, [2], 1, timeout_s=30))
    while not replica.turns:
        await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await replica.cancelled.wait()


async def test_a_lane_that_broke_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, address = Lanes(), LaneAddress("127.0.0.1:1", "token")
    first = lanes.get(address)
    assert first is not None and lanes.get(address) is first and lanes.get(None) is None
    with pytest.raises(LaneBrokenError, match="UNAVAILABLE"):
        await first.turn("one", 1, [2], 1, timeout_s=30)
    lanes.give_up(first)
    assert lanes.get(address) is None
    monkeypatch.setattr(serve_lanes, "_BROKEN_S", 0.0)
    assert lanes.get(address) not in (None, first)


# -- sessions ------------------------------------------------------------------------------------------------------


class Deployment:
    """A handle of a deployment with one replica, whose sessions are a scripted engine's; it counts the calls."""

    def __init__(self, token_of: Any) -> None:
        self.engine = ScriptedEngine(token_of)
        self.sessions: dict[str, Any] = {}
        self.server = LaneServer(self.continued, self.closed)
        self.through_serve = self.on_lanes = 0
        self.break_lanes = False
        self.turn, self.close_session = FakeMethod(self.called), FakeMethod(self.closed)

    def options(self, *, session_id: str) -> Deployment:
        return self

    async def called(self, call: TurnCall) -> TurnReply:
        self.through_serve += 1
        if call.base == 0:
            self.sessions[call.key] = await self.engine.open(call.ids, call.sampling)
        reply = await self._run(call.key, call.base or len(call.ids), call.ids if call.base else [], call.max_tokens)
        return reply if call.caller is None else reply._replace(lane=await self.server.address_for(call.caller))

    async def continued(self, key: str, held: int, new_ids: list[int], max_tokens: int) -> TurnReply:
        self.on_lanes += 1
        if self.break_lanes:
            raise KeyError("a bug")
        return await self._run(key, held, new_ids, max_tokens)

    async def _run(self, key: str, held: int, new_ids: list[int], max_tokens: int) -> TurnReply:
        session = self.sessions.get(key)
        if session is None or session.num_tokens != held:
            return LOST
        turn = await session.turn(new_ids, max_tokens)
        return TurnReply(False, turn.token_ids, turn.logprobs, turn.finish)

    async def closed(self, key: str) -> None:
        await self.sessions.pop(key).close()

    def forget_once(self, seconds: float) -> None:
        """After the third turn, as a replica that needs the memory."""
        if self.through_serve + self.on_lanes == 3:
            self.sessions.clear()


async def test_a_session_that_is_lost_on_a_lane_is_rebuilt(replica: Replica) -> None:
    request = Request([5, 6, 7], Threshold("router", 0.5), 40)
    expected = await decode(ScriptedEngine(token_of, score_of), ScriptedEngine(token_of), request)
    deployment = Deployment(token_of)
    remote = ReplicaEngine(deployment, 1000, Limits(30.0, 60.0), deployment.forget_once, HERE)  # type: ignore[arg-type]
    trace = await decode(ScriptedEngine(token_of, score_of), remote, request)
    assert trace.token_ids == expected.token_ids and remote.rebuilds == 1 and deployment.through_serve == 2
    while deployment.sessions:
        await asyncio.sleep(0)
    await deployment.server.close()


@pytest.mark.parametrize(("caller", "broken"), [(HERE, False), (HERE, True), (None, False)])
async def test_sessions_take_the_lane_and_fall_back_to_serve(
    caller: str | None, broken: bool, replica: Replica
) -> None:
    request = Request([5, 6, 7], Threshold("router", 0.5), 40)
    expected = await decode(ScriptedEngine(token_of, score_of), ScriptedEngine(token_of), request)
    deployment = Deployment(token_of)
    deployment.break_lanes = broken
    remote = ReplicaEngine(deployment, 1000, Limits(30.0, 60.0), lambda _: None, caller)  # type: ignore[arg-type]
    trace = await decode(ScriptedEngine(token_of, score_of), remote, request)
    assert (trace.token_ids, trace.writers, trace.visits) == (expected.token_ids, expected.writers, expected.visits)
    if caller is None:
        assert deployment.on_lanes == 0 and deployment.through_serve == trace.visits
    elif broken:  # one try, and none for a while
        assert deployment.on_lanes == 1 and deployment.through_serve == trace.visits
    else:
        assert deployment.through_serve == 1 and deployment.on_lanes == trace.visits - 1
    assert remote.rebuilds == 0 and trace.visits > 4
    while deployment.sessions:  # closing happens in the background
        await asyncio.sleep(0)
    await deployment.server.close()


# -- autoscaling ---------------------------------------------------------------------------------------------------


class Context:
    """What the policy reads of Serve's `AutoscalingContext`."""

    def __init__(self, replicas: int, through_serve: float, on_lanes: Sequence[float]) -> None:
        self.current_num_replicas, self.target_num_replicas = replicas, 3
        self.total_num_requests = through_serve
        self.aggregated_metrics = {DIRECT_TURNS: dict(enumerate(on_lanes))} if on_lanes else None
        self.config = AutoscalingConfig(target_ongoing_requests=4)


@pytest.mark.parametrize(
    ("replicas", "through_serve", "on_lanes", "wanted"),
    [(1, 4, [], 1), (1, 4, [8], 3), (2, 0, [1, 1], 0.5), (2, 0, [0, 0], 0), (0, 0, [], 3)],
)
def test_turns_on_lanes_count_as_load(
    replicas: int, through_serve: float, on_lanes: list[float], wanted: float
) -> None:
    assert replicas_for_turns(Context(replicas, through_serve, on_lanes)) == (wanted, {})  # type: ignore[arg-type]
