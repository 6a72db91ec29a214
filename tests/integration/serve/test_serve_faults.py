"""Replicas that are killed or hang, and clients that go away: no response is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from benchmarks.untrained_router import QUESTIONS
from citer_ray.engine import Sampling
from citer_ray.policy import Threshold
from citer_ray.router_artifact import read_metadata
from tests.integration.localhost import wait_until
from tests.integration.serve.conftest import Reference, Server

pytestmark = pytest.mark.ray

LENGTH = 300
SEEDED = Sampling(0.7, seed=3, ignore_eos=True)


class Stream:
    """A long routed stream whose first tokens are read."""

    def __init__(self, server: Server, sampling: Sampling, share: float = 0.4) -> None:
        self.content, self.sampling, self.share = QUESTIONS[0], sampling, share
        self.chunks = server.openai().chat.completions.create(
            model="routed",
            messages=[{"role": "user", "content": self.content}],
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=LENGTH,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"llm_share": share, "ignore_eos": True, "citer": {"trace": True}},
        )
        self.iterator = iter(self.chunks)
        self.tokens: list[dict[str, Any]] = []
        self.usage: Any = None
        self.read(3)

    def read(self, count: int | None = None) -> None:
        """Read chunks: some, or all that are left."""
        for number, chunk in enumerate(self.iterator, 1):
            if chunk.choices:
                self.tokens += chunk.choices[0].model_extra["citer"]["tokens"]
            else:
                self.usage = chunk.usage
            if number == count:
                return

    def check(self, server: Server, reference: Reference) -> None:
        """The whole stream holds the same tokens as without the fault."""
        self.read()
        threshold = read_metadata(server.router).calibration.threshold_for(self.share)
        expected = reference.decode(self.content, Threshold("router", threshold), LENGTH, self.sampling)
        assert [token["id"] for token in self.tokens] == expected.token_ids
        assert [token["writer"] for token in self.tokens] == [str(writer) for writer in expected.writers]


def fault_during_a_stream(
    server: Server, reference: Reference, deployment: str, sampling: Sampling, fault: Callable[[int], None]
) -> Stream:
    """A stream whose replica gets the fault while it works for it, and that holds the right tokens nevertheless.

    A response is short: one that ended before the fault hit it holds the right tokens, too, and says nothing.
    """
    for _ in range(10):
        server.wait_until_whole()
        stream = Stream(server, sampling)
        pid = server.busy(deployment, "jobs" if deployment == "SLM" else "llm")
        if pid is not None:
            fault(pid)
        stream.check(server, reference)
        if stream.usage.model_extra["citer"]["rebuilds"] >= 1:
            return stream
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    pytest.fail("none of ten faults hit a stream in progress")


@pytest.mark.parametrize("sampling", [Sampling(ignore_eos=True), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("deployment", ["SLM", "LLM"])
def test_a_killed_replica_loses_no_response(
    server: Server, reference: Reference, deployment: str, sampling: Sampling
) -> None:
    stream = fault_during_a_stream(server, reference, deployment, sampling, lambda pid: os.kill(pid, signal.SIGKILL))
    assert not stream.usage.model_extra["citer"]["degraded"]
    server.wait_until_idle()


@pytest.mark.parametrize("deployment", ["SLM", "LLM"])
def test_a_replica_that_hangs_is_left(
    server: Server, reference: Reference, stopped: Callable[[int], None], deployment: str
) -> None:
    fault_during_a_stream(server, reference, deployment, Sampling(ignore_eos=True), stopped)


def test_without_any_llm_the_slm_goes_on_and_says_so(server: Server, stopped: Callable[[int], None]) -> None:
    server.wait_until_whole()
    server.wait_until_idle()
    for one in server.replicas("LLM"):
        stopped(one["pid"])
    with server.http() as http:
        body = {"model": "routed", "temperature": 0, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
        response = http.post("/v1/chat/completions", json={**body, "max_tokens": 30, "threshold": 1.5})
        usage = response.json()["usage"]["citer"]
        assert response.headers["x-citer-degraded"] == "true" and usage["degraded"] and usage["llm_tokens"] == 0
        response = http.post("/v1/chat/completions", json={**body, "max_tokens": 30, "threshold": 0})
        assert "x-citer-degraded" not in response.headers and response.json()["usage"]["citer"]["degraded"] is False


async def test_streams_that_are_closed_leave_nothing(server: Server) -> None:
    await asyncio.to_thread(server.wait_until_whole)
    await asyncio.to_thread(server.wait_until_idle)
    client = server.async_openai()
    started = asyncio.Semaphore(64)

    async def start() -> Any:
        async with started:
            stream = await client.chat.completions.create(
                model="routed",
                messages=[{"role": "user", "content": QUESTIONS[0]}],
                max_tokens=400,
                stream=True,
                extra_body={"llm_share": 0.2, "ignore_eos": True},
            )
            await anext(aiter(stream))
            return stream

    streams = await asyncio.gather(*(start() for _ in range(300)))
    await asyncio.gather(*(stream.close() for stream in streams))
    await asyncio.to_thread(server.wait_until_idle, 60)


def test_a_killed_ingress_gives_a_clean_error_and_leaks_nothing(server: Server) -> None:
    server.wait_until_whole()
    stream = Stream(server, Sampling(ignore_eos=True))
    (ingress,) = server.replicas("RoutingIngress")
    os.kill(ingress["pid"], signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        stream.read()
        assert stream.usage is not None, "the stream ended as if it were complete"
    server.wait_until_whole()
    wait_until(lambda: sum(one["jobs"] for one in server.replicas("SLM")) == 0, 10, "no response goes on for nobody")
    server.wait_until_idle()
