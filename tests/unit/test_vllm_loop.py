"""The engine's loop: any loop may call it, cancelling passes through, closing ends what waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from citer_ray.engines.vllm_loop import EngineLoop, without_running_loop
from citer_ray.errors import RetryableError


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop("test")
    yield loop
    loop.close()


async def thread_name() -> str:
    return threading.current_thread().name


def test_several_loops_may_call(loop: EngineLoop) -> None:
    for _ in range(2):
        assert asyncio.run(loop.call(thread_name())) == "test"


async def test_errors_come_back(loop: EngineLoop) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await loop.call(fail())


async def test_cancelling_the_caller_cancels_the_work(loop: EngineLoop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(loop.call(work()))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)


async def test_closing_ends_what_waits_with_a_retryable_error(loop: EngineLoop) -> None:
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(loop.call(work()))
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.to_thread(loop.close)
    with pytest.raises(RetryableError):
        await task
    with pytest.raises(RetryableError):
        await loop.call(thread_name())
    loop.close()


async def test_a_client_is_made_where_no_loop_runs() -> None:
    def loop_runs() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    assert loop_runs()
    assert without_running_loop(loop_runs) is False
