"""The LLM grows with its share alone, and goes to zero where nothing is routed to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from ray import serve

from benchmarks.untrained_router import QUESTIONS
from citer_ray.config_loading import load_config
from citer_ray.on_ray.serve_app import build_application
from tests.integration.localhost import wait_until
from tests.integration.serve.conftest import Server

pytestmark = pytest.mark.ray

NAME = "scaling"


def replicas(deployment: str) -> int:
    return sum(serve.status().applications[NAME].deployments[deployment].replica_states.values())


@pytest.fixture
def scaling(server: Server) -> Iterator[AsyncOpenAI]:
    """A second application whose LLM starts with no replica."""
    scaled = "num_cpus: 0.1, upscale_delay_s: 0.2, downscale_delay_s: 1, target_ongoing: 2"
    settings = [
        f"output_dir={server.config.output_dir}",
        f"serve.router={server.router}",
        "serve.ingress={num_cpus: 0.1}",
        "serve.llm_unavailable_after_s=300",
        f"serve.slm={{{scaled.replace('target_ongoing: 2', 'target_ongoing: 100')}, max_replicas: 2}}",
        f"serve.llm={{{scaled}, min_replicas: 0, max_replicas: 2}}",
    ]
    application = build_application(load_config("configs/embedded.yaml", settings))
    serve.run(application, name=NAME, route_prefix="/scaling")
    yield AsyncOpenAI(api_key="none", base_url=f"{server.url}/scaling/v1", max_retries=0, timeout=300)
    serve.delete(NAME)


async def test_the_llm_follows_its_share(scaling: AsyncOpenAI) -> None:
    async def ask(threshold: float, max_tokens: int = 100) -> Any:
        answer = await scaling.chat.completions.create(
            model="routed",
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"threshold": threshold, "ignore_eos": True},
        )
        return answer.usage.model_extra["citer"]

    used = await asyncio.gather(*(ask(0.0) for _ in range(8)))
    assert {one["llm_tokens"] for one in used} == {0} and replicas("LLM") == 0

    stop = asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            assert (await ask(1.5))["llm_share"] == 1.0

    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(load())
        await asyncio.to_thread(wait_until, lambda: replicas("LLM") == 2, 120, "two replicas of the LLM")
        assert replicas("SLM") == 1
        stop.set()
    await asyncio.to_thread(wait_until, lambda: replicas("LLM") == 0, 120, "no replica of the LLM")
    assert (await ask(0.0))["llm_tokens"] == 0 and replicas("SLM") == 1
