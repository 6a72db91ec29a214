"""An event loop in a thread of its own, where a vLLM client lives.

vLLM binds its sockets and tasks to the loop that first uses it. Callers come from many loops (`asyncio.run`
once per chunk of labels, a serving replica's loop), and a caller's busy loop must not hold back the engine's
outputs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from citer_ray.errors import RetryableError

R = TypeVar("R")


class EngineLoop:
    """Runs coroutines for callers of any loop; cancelling the caller cancels the coroutine."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def call(self, coroutine: Coroutine[object, object, R]) -> R:
        """Run `coroutine` in the engine's loop and wait for it.

        Raises:
            RetryableError: the loop was closed before or meanwhile.
        """
        if self._closing.is_set():
            coroutine.close()
            raise RetryableError("the engine is closed")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._closing.is_set() and task is not None and not task.cancelling():
                raise RetryableError("the engine was closed meanwhile") from error
            raise

    def close(self) -> None:
        """Stop the thread; what still runs is cancelled. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def without_running_loop(start: Callable[[], R]) -> R:
    """Call `start` where no event loop runs.

    A vLLM client that is made inside a running loop (a serving replica's) starts its output handler there, apart from
    the loop that its requests come from, and no turn would ever end.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(start).result()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
