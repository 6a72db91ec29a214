"""Delayed batching: visits wait a moment at the gate of the LLM's engine, so that more of them share a pass.

Visits of many responses arrive one by one. An engine that starts a pass for the first of them makes the others wait
for the whole pass. The gate lets visits in together: when the pass before has ended and most of the open sessions
wait, or when the first has waited for as long as a pass takes. `VLLMEngine` has one; `benchmarks/paced.py` measures
what it brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_MOST = 0.75  # of the open sessions: the others are busy elsewhere (measured: 0.6 to 0.75 is best from 2 to 32)
_VISIT_TOKENS = 8  # a turn of more tokens is no visit, and does not wait


class VisitGate:
    """Lets visits into an engine in groups. All calls belong to one event loop.

    Args:
        hold: how long a visit waits for others at most, in passes; 0 lets every turn in at once.
        num_sessions: tells how many sessions are open.
    """

    def __init__(self, hold: float, num_sessions: Callable[[], int]) -> None:
        self.hold, self._num_sessions = hold, num_sessions
        self._waiting: list[asyncio.Future[None]] = []
        self._inside = 0
        self._timer: asyncio.TimerHandle | None = None
        self._let_in_at = self._pass_seconds = 0.0

    @asynccontextmanager
    async def turn(self, max_tokens: int) -> AsyncIterator[None]:
        """Wait until a turn of at most `max_tokens` may start; the block is the turn."""
        if self.hold == 0 or max_tokens > _VISIT_TOKENS:
            yield
            return
        await self._enter()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._pass_seconds = asyncio.get_running_loop().time() - self._let_in_at
            self.look()

    async def _enter(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.look()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled():  # it was let in at the same moment
                self._inside -= 1
                self.look()
            raise

    def look(self) -> None:
        """Let visits in, or set the clock, if some wait and none is inside. Also when a session was closed."""
        if not self._waiting or self._inside > 0:
            return
        if len(self._waiting) >= _MOST * self._num_sessions():
            self._let_in()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.hold * self._pass_seconds, self._let_in)

    def _let_in(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self._let_in_at = asyncio.get_running_loop().time()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
                self._inside += 1
