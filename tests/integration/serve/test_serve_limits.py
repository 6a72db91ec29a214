"""A candidate router's part of the traffic, refusals under overload, and an end that waits for running responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from ray import serve

from benchmarks.untrained_router import QUESTIONS, write_router
from citer_ray.config_loading import load_config
from citer_ray.on_ray.serve_app import build_application
from citer_ray.on_ray.serve_run import drain
from tests.integration.localhost import wait_until
from tests.integration.serve.conftest import Server

pytestmark = pytest.mark.ray
NAME = "limits"
LIMIT = 4  # requests of the ingress in progress, and as many that wait


@dataclass(frozen=True)
class Limited:
    """A second application beside the first."""

    url: str

    async def ask(self, max_tokens: int, **fields: Any) -> Any:
        extra = {"llm_share": 0.2, "ignore_eos": True, **fields.pop("extra_body", {})}
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        client = AsyncOpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=300)
        return await client.chat.completions.create(
            model="routed",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            extra_body=extra,
            **fields,
        )


@pytest.fixture(scope="module")
def limited(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    candidate: Path = tmp_path_factory.mktemp("candidate") / "router"
    asyncio.run(write_router(server.config, candidate, seed=7))
    settings = [
        f"output_dir={server.config.output_dir}",
        f"serve.router={server.router}",
        f"serve.canary_router={candidate}",
        "serve.canary_fraction=0.5",
        f"serve.ingress={{num_cpus: 0.1, max_ongoing: {LIMIT}}}",
        f"serve.max_queued={LIMIT}",
        "serve.overload_status=429",
        "serve.retry_after_s=3",
        "serve.drain_s=60",
        "serve.slm={num_cpus: 0.1}",
        "serve.llm={num_cpus: 0.1}",
    ]
    application = build_application(load_config("configs/embedded.yaml", settings))
    serve.run(application, name=NAME, route_prefix=f"/{NAME}")
    yield Limited(f"{server.url}/{NAME}")
    serve.delete(NAME)


async def test_a_candidate_gets_its_part(limited: Limited) -> None:
    used: Counter[str] = Counter()
    for _ in range(40):
        answer = await limited.ask(2)
        used[answer.usage.model_extra["citer"]["router"]] += 1
    # Each response draws by itself: 3 and fewer of 40 happen once in a hundred million runs.
    assert len(used) == 2 and min(used.values()) > 3


async def test_a_response_that_ends_frees_its_session_by_itself(limited: Limited) -> None:
    """Not by the sweep of idle sessions, which here comes after two minutes."""
    answers = await asyncio.gather(*(limited.ask(40) for _ in range(LIMIT)))
    assert all(answer.usage.model_extra["citer"]["visits"] > 0 for answer in answers)
    handle = serve.get_deployment_handle("LLM", NAME)

    def held() -> int:
        return sum(one["llm"] + one["kv"] for one in handle.broadcast("open_sessions").results(timeout_s=30))

    await asyncio.to_thread(wait_until, lambda: held() == 0, 30, "no session is left")


async def test_overload_is_refused_with_a_time_to_retry(limited: Limited) -> None:
    answers = await asyncio.gather(*(limited.ask(200) for _ in range(40)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert refused and len(answers) - len(refused) >= LIMIT
    for error in refused:
        assert isinstance(error, APIStatusError), error
        assert error.status_code == 429 and error.response.headers["retry-after"] == "3"
    assert (await limited.ask(2)).usage.completion_tokens == 2


async def test_an_end_waits_for_running_responses(limited: Limited) -> None:
    """The last test: the application takes no requests afterwards."""
    stream = await limited.ask(400, stream=True, extra_body={"citer": {"trace": True}})
    chunks = aiter(stream)
    tokens = list((await anext(chunks)).choices[0].model_extra["citer"]["tokens"])
    draining = asyncio.create_task(asyncio.to_thread(drain, NAME, 60.0))
    async for chunk in chunks:
        tokens += chunk.choices[0].model_extra["citer"]["tokens"]
    assert len(tokens) == 400
    assert await draining, "all responses have ended"
    with pytest.raises(APIStatusError, match="the server is stopping"):
        await limited.ask(2)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{limited.url}/ready")).status_code == 503
