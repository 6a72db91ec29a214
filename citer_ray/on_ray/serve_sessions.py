"""The LLM's replicas as an `Engine`: sessions that follow their KV cache, and are rebuilt where it is lost.

Runs beside the SLM's engine, so that one turn of the LLM is one call: through Serve, which picks a replica, and then on
that replica's lane. A session keeps the ids itself: if the replica died, hangs, was restarted or scaled away, the next
one on the ring gets the whole context, and the response goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ray.serve.handle import DeploymentHandle

from citer_ray.engine import Sampling, Scores, TokenSequence, Turn
from citer_ray.on_ray.serve_calls import call, is_retryable
from citer_ray.on_ray.serve_lanes import Lane, LaneBrokenError, Lanes, TurnReply
from citer_ray.on_ray.serve_routing import session_id
from citer_ray.serving.responding import LlmUnavailableError

_PAUSE_S = 0.1  # before a turn is tried again
_CLOSE_TIMEOUT_S = 5.0


class TurnCall(NamedTuple):
    """A turn, on its way to a replica through Serve.

    Attributes:
        key: of the session.
        base: ids that the replica should hold; 0 opens the session anew.
        ids: the ids after those.
        caller: IP of the node that wants to know the replica's lane; None wants no lane.
    """

    key: str
    base: int
    ids: list[int]
    max_tokens: int
    sampling: Sampling
    caller: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a turn is tried.

    Attributes:
        turn_timeout_s: on one replica.
        unavailable_after_s: in all.
    """

    turn_timeout_s: float
    unavailable_after_s: float


class ReplicaEngine:
    """See the module.

    Args:
        handle: of the LLM's deployment.
        max_model_len: longest context.
        limits: how long a turn is tried.
        on_turn: is told the seconds of every turn.
        node_ip: of this node, for turns on lanes; None takes all turns through Serve.

    Attributes:
        rebuilds: sessions that were rebuilt so far.
        num_open: sessions that are open.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        max_model_len: int,
        limits: Limits,
        on_turn: Callable[[float], None],
        node_ip: str | None = None,
    ) -> None:
        self.handle, self.limits, self.on_turn, self.node_ip = handle, limits, on_turn, node_ip
        self.lanes = Lanes()
        self.max_model_len = max_model_len
        self.rebuilds = self.num_open = 0
        self._keys = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefix = f"{time.time_ns():x}-{id(self):x}"

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> ReplicaSession:
        """Start a response; the replica hears of it with the first turn."""
        if scorer is not None:
            raise ValueError("the LLM's replicas have no scorers")
        self.num_open += 1
        return ReplicaSession(self, f"{self._prefix}-{next(self._keys)}", prompt_ids, sampling)

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        """Not part of serving."""
        raise NotImplementedError("replicas decode, they do not score")

    async def close(self) -> None:
        """Nothing to free here: sessions close themselves."""

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for, and that the end of a request does not end.

        Serve cancels the calls that a request has made, which it knows by the context, when its caller leaves: a
        session's end would be lost with the response's.
        """
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ReplicaSession:
    """A response on one replica at a time; made by `ReplicaEngine.open`."""

    def __init__(self, engine: ReplicaEngine, key: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._engine, self._key, self._sampling = engine, key, sampling
        self._ids = list(prompt_ids)
        self._held = 0  # leading ids that the replica holds
        self._attempt = 0
        self._asked = self._closed = False
        self._handle = self._pinned()
        self._lane: Lane | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        if self._closed:
            raise ValueError("the session is closed")
        self._ids.extend(new_ids)
        began = time.monotonic()
        reply = await self._until_answered(max_tokens, began)
        self._ids.extend(reply.token_ids[:-1])
        self._held = len(self._ids)
        self._engine.on_turn(time.monotonic() - began)
        return Turn(reply.token_ids, reply.logprobs, [], reply.finish)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._engine.num_open -= 1
        if self._asked:  # a turn that was cancelled may have been answered meanwhile
            self._engine.in_background(self._forget(self._handle, self._lane))

    async def _until_answered(self, max_tokens: int, began: float) -> TurnReply:
        limits = self._engine.limits
        while True:
            base, self._held, self._asked = self._held, 0, True
            left = limits.unavailable_after_s - (time.monotonic() - began)
            try:
                reply = await self._ask(base, max_tokens, max(0.05, min(limits.turn_timeout_s, left)))
            except Exception as error:
                if not is_retryable(error):
                    raise
                await self._next_replica(error, base, began)
                continue
            if not reply.lost:
                return reply
            self._engine.rebuilds += 1

    async def _ask(self, base: int, max_tokens: int, timeout_s: float) -> TurnReply:
        """Have the turn done by the replica that holds the session, or, with a base of 0, by any."""
        lane, self._lane = self._lane, None
        if lane is not None and base:
            try:
                reply = await lane.turn(self._key, base, self._ids[base:], max_tokens, timeout_s)
            except LaneBrokenError:
                self._engine.lanes.give_up(lane)
            else:
                self._lane = lane
                return reply
        request = TurnCall(self._key, base, self._ids[base:], max_tokens, self._sampling, self._engine.node_ip)
        reply = TurnReply(*await call(self._handle.turn.remote(request), timeout_s))
        self._lane = self._engine.lanes.get(reply.lane)
        return reply

    async def _next_replica(self, error: Exception, base: int, began: float) -> None:
        limits = self._engine.limits
        seconds = time.monotonic() - began
        if seconds + _PAUSE_S > limits.unavailable_after_s:
            raise LlmUnavailableError(
                f"no replica of the LLM answered for {seconds:.1f} s; the last failure: {type(error).__name__}: {error}"
            ) from error
        self._engine.in_background(self._forget(self._handle, None))
        self._engine.rebuilds += base > 0
        self._attempt += 1
        self._handle = self._pinned()
        await asyncio.sleep(_PAUSE_S)

    def _pinned(self) -> DeploymentHandle[Any]:
        return self._engine.handle.options(session_id=session_id(self._key, self._attempt))

    async def _forget(self, handle: DeploymentHandle[Any], lane: Lane | None) -> None:
        try:
            if lane is not None:
                with suppress(LaneBrokenError):
                    await lane.close_session(self._key, _CLOSE_TIMEOUT_S)
                    return
            await call(handle.close_session.remote(self._key), _CLOSE_TIMEOUT_S)
        except Exception as error:
            if not is_retryable(error):
                raise
