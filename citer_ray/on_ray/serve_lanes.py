"""Lanes: turns that go straight to the replica that holds their session, over gRPC and past Serve's router.

Serve picks a replica for the first turn of a session; the reply names that replica's lane, which takes the turns after
it. A call of Serve costs several times what a small pair's passes do, and the session leaves no choice of replica.
Nothing depends on a lane: where one fails, the same turn goes through Serve. A lane listens on localhost for callers of
its own node, on the node's address for others, and answers only those that know its token, which Serve hands out.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc
from ray.util import get_node_ip_address

from citer_ray.engine import Finish
from citer_ray.errors import RetryableError

logger = logging.getLogger(__name__)

_SERVICE = "citer_ray.Lane"
_KEY = "authorization"
_LOCALHOST = "127.0.0.1"
_BROKEN_S = 30.0
# No proxy of the environment's, and no second try: the caller goes through Serve.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0))


class TurnReply(NamedTuple):
    """What a replica answers.

    Attributes:
        lost: the replica does not hold the session.
        lane: where the next turns may go; only in replies through Serve.
    """

    lost: bool
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    lane: LaneAddress | None = None


class LaneAddress(NamedTuple):
    """Where a replica listens, and what it wants to hear."""

    target: str
    token: str


LOST = TurnReply(True, [], [], Finish.LENGTH)


class LaneBrokenError(Exception):
    """The turn may not have reached the replica; Serve knows whether it is still there."""


Turn = Callable[[str, int, list[int], int], Awaitable[TurnReply]]
Close = Callable[[str], Awaitable[None]]


class LaneServer:
    """A replica's end of its lanes. Starts to listen when the first caller asks for the address.

    Args:
        turn: does a turn of a session: key, ids held, new ids, most tokens.
        close: frees a session, by its key.

    Attributes:
        num_turns: turns in progress.
    """

    def __init__(self, turn: Turn, close: Close) -> None:
        self._do_turn, self._do_close = turn, close
        self._token = secrets.token_hex(16)
        self._listening: dict[str, asyncio.Task[tuple[grpc.aio.Server, str] | None]] = {}  # by host
        self.num_turns = 0

    async def address_for(self, caller: str) -> LaneAddress | None:
        """The lane for a caller on the node of this IP.

        None where it cannot listen, and where Ray encrypts its calls, which lanes do not.
        """
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return None
        own = get_node_ip_address()
        host = _LOCALHOST if caller == own else own
        if host not in self._listening:
            self._listening[host] = asyncio.create_task(self._listen(host))
        found = await asyncio.shield(self._listening[host])
        return None if found is None else LaneAddress(found[1], self._token)

    async def close(self) -> None:
        """Stop listening; turns in progress are cancelled."""
        for task in self._listening.values():
            if (found := await task) is not None:
                await found[0].stop(None)

    async def _listen(self, host: str) -> tuple[grpc.aio.Server, str] | None:
        server = grpc.aio.server()
        methods = {"Turn": self._turn, "Close": self._close}
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        address = f"[{host}]" if ":" in host else host
        try:
            port = server.add_insecure_port(f"{address}:0")
        except (RuntimeError, OSError) as error:  # the node's address may belong to its host
            logger.warning("no lane on %s, visits from other nodes go through Serve: %s", address, error)
            return None
        await server.start()
        return server, f"{address}:{port}"

    async def _turn(self, request: bytes, context: Any) -> bytes:
        await self._check(context)
        key, held, new_ids, max_tokens = json.loads(request)
        self.num_turns += 1
        try:
            reply = await self._do_turn(key, held, new_ids, max_tokens)
        except RetryableError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error)[:1000])
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:1000])
        finally:
            self.num_turns -= 1
        return json.dumps(reply[:4]).encode()

    async def _close(self, request: bytes, context: Any) -> bytes:
        await self._check(context)
        await self._do_close(json.loads(request))
        return b"null"

    async def _check(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get(_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not this replica's token")


class Lane:
    """A caller's end: one connection for all sessions of a replica."""

    def __init__(self, address: LaneAddress) -> None:
        self.address = address
        # Not closed by hand, which would cancel the calls of other sessions; it goes with the last of them.
        self._channel = grpc.aio.insecure_channel(address.target, options=_OPTIONS)
        self._metadata = ((_KEY, address.token),)
        self._turn, self._close = (self._channel.unary_unary(f"/{_SERVICE}/{name}") for name in ("Turn", "Close"))

    async def turn(self, key: str, held: int, new_ids: list[int], max_tokens: int, timeout_s: float) -> TurnReply:
        """A turn of a session.

        Raises:
            TimeoutError: no answer in time.
            RetryableError: the engine failed.
            ValueError: the turn cannot be computed.
            LaneBrokenError: the lane failed.
        """
        reply = await self._call(self._turn, (key, held, new_ids, max_tokens), timeout_s)
        lost, token_ids, logprobs, finish = reply
        return TurnReply(lost, token_ids, logprobs, Finish(finish))

    async def close_session(self, key: str, timeout_s: float) -> None:
        """Free a session.

        Raises:
            TimeoutError, LaneBrokenError: as in `turn`.
        """
        await self._call(self._close, key, timeout_s)

    async def _call(self, method: Any, request: object, timeout_s: float) -> Any:
        try:
            return json.loads(await method(json.dumps(request).encode(), timeout=timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            match error.code():
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError(f"no answer in {timeout_s:g} s") from None
                case grpc.StatusCode.ABORTED:
                    raise RetryableError(error.details() or "the engine failed") from None
                case grpc.StatusCode.INVALID_ARGUMENT:
                    raise ValueError(error.details()) from None
            raise LaneBrokenError(f"{error.code()}: {error.details()}") from None


class Lanes:
    """A caller's lanes, one for each replica that named one."""

    def __init__(self) -> None:
        self._lanes: dict[LaneAddress, Lane] = {}
        self._broken: dict[LaneAddress, float] = {}  # when each was given up

    def get(self, address: LaneAddress | None) -> Lane | None:
        """The lane to a replica; None if it has none, or its lane broke a moment ago."""
        if address is None:
            return None
        address = LaneAddress(*address)
        if time.monotonic() - self._broken.get(address, -math.inf) < _BROKEN_S:
            return None
        self._broken.pop(address, None)
        if address not in self._lanes:
            self._lanes[address] = Lane(address)
        return self._lanes[address]

    def give_up(self, lane: Lane) -> None:
        """A lane failed: its sessions go through Serve for a while."""
        self._lanes.pop(lane.address, None)
        self._broken[lane.address] = time.monotonic()
