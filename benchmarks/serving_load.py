"""Many streams on the served embedded pair: errors, memory, what is left behind, how soon closed streams free all.

Read by `serving`. Times here are of a whole server under load on this machine's cores, so the limits are in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from openai import APIStatusError, AsyncOpenAI
from ray import serve

from benchmarks.harness import Options, Quotient, Result
from benchmarks.untrained_router import QUESTIONS
from citer_ray.on_ray.serve_app import APP_NAME

_DECLARED = (429, 503)  # what an overloaded server answers
_IDLE_WITHIN_S = 60.0


@dataclass
class _Counts:
    """What the streams of a load saw."""

    responses: int = 0
    tokens: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)


def measure(address: str, options: Options) -> Iterator[Result]:
    """The results of this part."""
    streams, seconds, closed = (20, 5.0, 30) if options.short else (200, 120.0, 300)
    yield asyncio.run(_load(address, streams, seconds, judged=not options.short))
    for count, limit in ((1, 1.0), (closed, 5.0)):
        yield asyncio.run(_closed(address, count, limit, judged=not options.short))


async def _load(address: str, streams: int, seconds: float, *, judged: bool) -> Quotient:
    """Streams that follow each other without a pause; memory is compared with that after a third of the time."""
    counts, began = _Counts(), time.monotonic()
    async with AsyncOpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0, timeout=600) as client:
        users = [asyncio.create_task(_user(client, index, began + seconds, counts)) for index in range(streams)]
        await asyncio.sleep(seconds / 3)
        warm = await asyncio.to_thread(_memory_mb)
        await asyncio.gather(*users)
    at_end = await asyncio.to_thread(_memory_mb)
    idle_after = await _until_idle()
    facts: dict[str, Any] = {
        "responses": counts.responses,
        "tokens": counts.tokens,
        "refused": counts.refused,
        "idle_s": idle_after,
        "errors": counts.errors[:5],
    }
    note = f"{counts.responses} responses, {len(counts.errors)} errors"
    name = f"embedded: {streams} streams for {seconds:.0f} s, memory at the end over warm"
    # An error that nobody declared is a miss whatever the memory does.
    ratio_limit = 1.1 if not counts.errors else 0.0
    return Quotient(name, at_end, warm, "MB", ratio_limit if judged else None, True, note, facts)


async def _user(client: AsyncOpenAI, index: int, end: float, counts: _Counts) -> None:
    while time.monotonic() < end:
        try:
            async for chunk in await _stream(client, QUESTIONS[index % len(QUESTIONS)], 60):
                counts.tokens += bool(chunk.choices)
            counts.responses += 1
        except APIStatusError as error:
            if error.status_code not in _DECLARED:
                counts.errors.append(repr(error))
                return
            counts.refused += 1
            await asyncio.sleep(float(error.response.headers.get("retry-after", 1)))
        except Exception as error:  # noqa: BLE001 (whatever a client may see is what this counts)
            counts.errors.append(repr(error))
            return


async def _closed(address: str, count: int, limit_s: float, *, judged: bool) -> Quotient:
    """Streams that are closed together after their first chunk: seconds until nothing is in use anywhere."""
    async with AsyncOpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0, timeout=600) as client:
        gate = asyncio.Semaphore(64)

        async def start() -> Any:
            async with gate:
                stream = await _stream(client, QUESTIONS[0], 400)
                await anext(aiter(stream))
                return stream

        streams = await asyncio.gather(*(start() for _ in range(count)))
        began = time.monotonic()
        await asyncio.gather(*(stream.close() for stream in streams))
        await _until_idle()
        seconds = time.monotonic() - began
    name = f"embedded: {count} stream{'s' if count > 1 else ''} closed, seconds until nothing is in use"
    return Quotient(name, seconds, limit_s, "s", 1.0 if judged else None, True, "", {"streams": count})


async def _stream(client: AsyncOpenAI, question: str, max_tokens: int) -> Any:
    return await client.chat.completions.create(
        model="routed",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"llm_share": 0.2, "ignore_eos": True},
    )


def _replicas() -> list[dict[str, int]]:
    """What each replica has in use."""
    found: list[dict[str, int]] = []
    for name in ("RoutingIngress", "SLM", "LLM"):
        handle = serve.get_deployment_handle(name, APP_NAME)
        found += handle.broadcast("open_sessions").results(timeout_s=60)
    return found


async def _until_idle() -> float:
    """Seconds until no replica has anything in use."""
    began = time.monotonic()
    while sum(count for one in await asyncio.to_thread(_replicas) for what, count in one.items() if what != "pid"):
        if time.monotonic() - began > _IDLE_WITHIN_S:
            raise RuntimeError(f"still in use after {_IDLE_WITHIN_S:g} s: {await asyncio.to_thread(_replicas)}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def _memory_mb() -> float:
    """Resident memory of all replicas."""
    resident: int = sum(psutil.Process(one["pid"]).memory_info().rss for one in _replicas())
    return resident / 2**20
