"""One job on a replica: the routed loop in the background, and reports of it as they are due.

`decoding.decode` is the only loop; an observer collects its tokens. When the LLM is away for too long, the rest of the
response is decoded by the SLM alone, if so configured: the same loop, begun again from the tokens so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from citer_ray.decoding import Request, decode
from citer_ray.engine import Engine, Finish, Turn
from citer_ray.errors import RetryableError
from citer_ray.policy import Policy, Threshold, Writer
from citer_ray.serving.jobs import Job, Report, Run
from citer_ray.serving.pacing import Pace


class LlmUnavailableError(RetryableError):
    """No replica of the LLM has answered for longer than the configured time."""


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """How a replica treats its responses.

    Attributes:
        on_llm_unavailable: `error` ends a routed response, `slm` lets the SLM write the rest.
        heartbeat_s: a report is due after this time, with or without tokens.
    """

    on_llm_unavailable: str = "error"
    heartbeat_s: float = 1.0


class _Collector:
    """Observes the loop; keeps what was not reported yet."""

    def __init__(self, interval_s: float) -> None:
        self.runs: list[Run] = []
        self.written: list[int] = []
        self.degraded = False
        self.news = asyncio.Event()
        self._pace = Pace(interval_s, time.monotonic)

    def turn_limit(self, writer: Writer) -> int:
        return self._pace.next_limit()

    def on_turn(self, writer: Writer, turn: Turn, scores: Sequence[float | None]) -> None:
        self._pace.ended(len(turn.token_ids))
        if turn.token_ids:
            self.runs.append(Run(writer, list(turn.token_ids), list(scores), list(turn.logprobs)))
            self.written += turn.token_ids
            self.news.set()

    def take(self, finish: Finish | None = None, rebuilds: int = 0) -> Report:
        """What is new."""
        runs, self.runs = self.runs, []
        self.news.clear()
        return Report(runs, finish, self.degraded, rebuilds)


async def respond(
    job: Job, slm: Engine | None, llm: Engine | None, settings: ResponseSettings
) -> AsyncGenerator[Report, None]:
    """Decode a job; the last report has `finish`.

    Closing the generator ends the response and frees both sessions.

    Raises:
        RetryableError: the engine failed; another replica can go on.
        LlmUnavailableError: the LLM is away.
        ValueError: the job cannot be decoded.
    """
    collector = _Collector(job.interval_s)
    decoding = asyncio.create_task(_decode(job, slm, llm, settings, collector))
    counter = _Rebuilds(llm)
    try:
        yield Report([])  # the job has begun: from now on silence is a fault
        while not decoding.done():
            await _news(decoding, collector, settings.heartbeat_s)
            if decoding.done():
                break
            yield collector.take(rebuilds=counter.new())
            # What comes within the interval shares a report; the end does not wait for it.
            await asyncio.wait([decoding], timeout=job.interval_s)
        yield collector.take(decoding.result(), counter.new())
    finally:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)


async def _news(decoding: asyncio.Task[Finish], collector: _Collector, timeout_s: float) -> None:
    """Wait for tokens, for the end, or for the time."""
    news = asyncio.ensure_future(collector.news.wait())
    try:
        await asyncio.wait([decoding, news], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        news.cancel()


async def _decode(
    job: Job, slm: Engine | None, llm: Engine | None, settings: ResponseSettings, collector: _Collector
) -> Finish:
    policy = job.policy()
    try:
        return await _continue(job, policy, slm, llm, collector)
    except LlmUnavailableError:
        if settings.on_llm_unavailable != "slm" or not isinstance(policy, Threshold):
            raise
        collector.degraded = True
        collector.news.set()
        # The threshold of 0 never hands off, and still shows p_slm.
        return await _continue(job, Threshold(policy.scorer, 0.0), slm, None, collector)


async def _continue(job: Job, policy: Policy, slm: Engine | None, llm: Engine | None, collector: _Collector) -> Finish:
    """The response from the tokens so far to its end."""
    context = [*job.prompt_ids, *job.written_ids, *collector.written]
    left = job.max_new_tokens - len(job.written_ids) - len(collector.written)
    if left < 1:
        return Finish.LENGTH
    trace = await decode(slm, llm, Request(context, policy, left, job.sampling), observer=collector)
    return trace.finish


class _Rebuilds:
    """Rebuilt sessions since the last question."""

    def __init__(self, engine: object) -> None:
        self._engine, self._seen = engine, getattr(engine, "rebuilds", 0)

    def new(self) -> int:
        total = getattr(self._engine, "rebuilds", 0)
        seen, self._seen = self._seen, total
        return int(total - seen)
