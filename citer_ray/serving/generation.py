"""A request in progress: its choices run side by side, and come out as a stream of events or as one response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.assembly import Assembler, summary
from citer_ray.serving.choices import Backend, Choice, Delta
from citer_ray.serving.metrics import Metrics
from citer_ray.serving.planning import Plan, ServedPair

logger = logging.getLogger(__name__)


class Generation:
    """One planned request on a backend."""

    def __init__(self, plan: Plan, pair: ServedPair, backend: Backend, metrics: Metrics, deadline_s: float) -> None:
        self.plan = plan
        self._pair, self._backend, self._metrics = pair, backend, metrics
        self._began = time.monotonic()
        self._deadline_s = deadline_s

    @property
    def degraded(self) -> bool:
        """The SLM wrote what the router wanted from the LLM."""
        return any(choice.degraded for choice in self.plan.choices)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come; closing the generator frees every session.

        Raises:
            ApiError: the deadline passed, or the backend gave up.
        """
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._run(choice, queue)) for choice in self.plan.choices]
        first, running = True, len(tasks)
        self._metrics.in_flight(1)
        try:
            while running:
                item = await self._next(queue)
                if item is None:
                    running -= 1
                    continue
                if isinstance(item, BaseException):
                    raise item
                if first:
                    first = False
                    self._metrics.first_token(self.plan.model, time.monotonic() - self._began)
                yield item
            self._record()
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled(self.plan.model)
            raise
        finally:
            self._metrics.in_flight(-1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self, assembler: Assembler) -> str:
        """The whole response as JSON."""
        found: list[list[Delta]] = [[] for _ in self.plan.choices]
        async for delta in self.deltas():
            found[delta.index].append(delta)
        return assembler.whole(found)

    async def _run(self, choice: Choice, queue: asyncio.Queue[Delta | BaseException | None]) -> None:
        try:
            async for delta in choice.run(self._backend, self._pair.tokenizer, self._pair.end_ids, self._metrics):
                queue.put_nowait(delta)
        except Exception as error:  # noqa: BLE001 - raised again where the deltas are read
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def _next(self, queue: asyncio.Queue[Delta | BaseException | None]) -> Delta | BaseException | None:
        left = self._deadline_s - (time.monotonic() - self._began)
        try:
            async with asyncio.timeout(left):
                return await queue.get()
        except TimeoutError:
            raise ApiError(
                f"the response was not finished within its deadline of {self._deadline_s:g} s",
                status=504,
                code="deadline_exceeded",
            ) from None

    def _record(self) -> None:
        values = summary(self.plan.choices, self.plan, self._pair.cost)
        saved = (values["gigabytes_llm_only"] or 0.0) - (values["gigabytes"] or 0.0)
        self._metrics.response(self.plan.model, self.plan.router, values["llm_share"], values["visits"], saved)
