"""The application over real HTTP with the official clients: the same tokens as without Serve, and operations."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from typing import Any

import httpx
import pytest
import ray

from benchmarks.untrained_router import QUESTIONS, write_router
from citer_ray.engine import Sampling
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Threshold, Writer
from citer_ray.router_artifact import read_metadata
from tests.integration.localhost import wait_until
from tests.integration.serve.conftest import Reference, Server

pytestmark = pytest.mark.ray


def request(content: str, **fields: Any) -> dict[str, Any]:
    values = {"model": "routed", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return values | fields


def test_tokens_are_those_of_the_loop_without_serve(server: Server, reference: Reference) -> None:
    client = server.openai()
    metadata = read_metadata(server.router)
    threshold = metadata.calibration.threshold_for(0.4)
    trace = {"citer": {"trace": True}}
    policies = [("routed", Threshold("router", threshold)), ("slm", AlwaysSlm()), ("llm", AlwaysLlm())]
    for name, policy in policies:
        for content in QUESTIONS:
            extra = trace | ({"threshold": threshold} if name == "routed" else {})
            answer = client.chat.completions.create(**request(content, model=name, max_tokens=60), extra_body=extra)
            expected = reference.decode(content, policy, 60)
            tokens = answer.choices[0].model_extra["citer"]["tokens"]
            assert [token["id"] for token in tokens] == expected.token_ids
            assert [token["writer"] for token in tokens] == [str(writer) for writer in expected.writers]
            usage = answer.usage.model_extra["citer"]
            assert usage["visits"] == expected.visits and usage["llm_tokens"] == expected.num_llm_tokens
            assert usage["gigabytes"] > 0
    assert expected.num_llm_tokens > 0


async def test_async_client_streams_sampled_tokens(server: Server, reference: Reference) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 40, "presence_penalty": 0.5}
    stream = await server.async_openai().chat.completions.create(
        **request(QUESTIONS[0], **sampling, stream=True, stream_options={"include_usage": True}),
        extra_body={"llm_share": 0.4, "ignore_eos": True, "citer": {"trace": True}},
    )
    chunks = [chunk async for chunk in stream]
    tokens = [token for chunk in chunks[:-1] for token in chunk.choices[0].model_extra["citer"]["tokens"]]
    prompt = reference.prompt(QUESTIONS[0])
    threshold = read_metadata(server.router).calibration.threshold_for(0.4)
    expected = await asyncio.to_thread(
        reference.decode,
        QUESTIONS[0],
        Threshold("router", threshold),
        40,
        Sampling(0.8, 0.9, 0, 11, True, presence_penalty=0.5, response_start=len(prompt)),
    )
    assert [token["id"] for token in tokens] == expected.token_ids
    assert Writer.LLM in expected.writers
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "".join(token["text"] for token in tokens) and chunks[-1].usage.completion_tokens == 40
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_many_streams_at_once(server: Server) -> None:
    client = server.async_openai()

    async def one(index: int) -> int:
        stream = await client.chat.completions.create(
            **request(QUESTIONS[index % 3], max_tokens=30, stream=True), extra_body={"llm_share": 0.4}
        )
        return len([chunk async for chunk in stream])

    counts = await asyncio.gather(*(one(index) for index in range(32)))
    assert all(counts)
    await asyncio.to_thread(server.wait_until_idle)


def test_health_models_and_errors(server: Server) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"} and http.get("/ready").status_code == 200
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["routed", "slm", "llm"]
        for path, status in (("/v2", 404), ("/v1/chat/completions", 405)):
            response = http.get(path)
            assert response.status_code == status and response.json()["error"]["message"]
        assert http.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"


def fuzzed_bodies(count: int) -> list[bytes]:
    """Malformed bodies: broken JSON, wrong types, NaN, huge numbers, invalid UTF-8, deep nesting, large bodies."""
    draw = random.Random(0)
    good = request("Hi")
    wrong: list[Any] = [[], {}, "x", -1, 1e308, 10**40, True, [[1]], {"a": {}}, [None], 3.7]
    fields = ["model", "messages", "temperature", "max_tokens", "top_p", "n", "seed", "stop", "stream", "llm_share"]
    text = json.dumps(good).encode()
    makers = [
        lambda: text[: draw.randrange(1, len(text) - 1)],
        lambda: json.dumps(good | {draw.choice(fields): {"wrong": draw.choice(wrong)}}).encode(),
        lambda: json.dumps(good | {f"unknown{draw.randrange(99)}": draw.choice(wrong)}).encode(),
        lambda: text.replace(
            b'"temperature": 0', b'"temperature": ' + draw.choice([b"NaN", b"Infinity", b"1e999", b"-1"])
        ),
        lambda: text.replace(b"Hi", bytes(draw.choices(range(128, 256), k=9))),
        lambda: b'{"messages":' + b"[" * draw.randrange(500, 20000),
        lambda: bytes(draw.choices(range(256), k=draw.randrange(1, 200))),
        lambda: json.dumps(good | {"messages": draw.choice(wrong)}).encode(),
        lambda: json.dumps(draw.choice([1, None, [], "text", [good]])).encode(),
        lambda: b"",
    ]
    return [draw.choice(makers)() for _ in range(count - 4)] + [b"x" * 10_000_000, b" " * 10_000_000] * 2


async def test_malformed_bodies(server: Server) -> None:
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def post(body: bytes) -> None:
            async with gate:
                response = await http.post("/v1/chat/completions", content=body)
            assert 400 <= response.status_code < 500, (body[:200], response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], body[:200]

        await asyncio.gather(*(post(body) for body in fuzzed_bodies(1000)))
        good = await http.post("/v1/chat/completions", json=request("Hi", max_tokens=3))
        assert good.status_code == 200


def test_metrics_are_exported(server: Server) -> None:
    server.openai().chat.completions.create(**request(QUESTIONS[0], max_tokens=20), extra_body={"llm_share": 0.4})
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    names = (
        "tokens_total llm_share_bucket p_slm_bucket visits_total turn_seconds_bucket visit_seconds_bucket "
        "direct_visits_total first_token_seconds_bucket inter_token_seconds_bucket requests_total responses_in_flight"
    )
    wanted = [f"ray_citer_{name}" for name in names.split()]
    wait_until(lambda: all(name in httpx.get(url, timeout=30).text for name in wanted), 60, f"metrics {wanted}")


def test_a_new_router_is_taken_in_without_a_restart(server: Server) -> None:
    def version() -> str:
        with server.http() as http:
            return str(http.get("/v1/models/routed").json()["citer"]["router"])

    old, pids = version(), {one["pid"] for one in server.replicas("SLM")}
    kept = server.router.with_name("kept")
    shutil.copytree(server.router, kept)
    try:
        asyncio.run(write_router(server.config, server.router, seed=5))
        wait_until(lambda: version() != old, 30, "the new router is in service")
        answer = server.openai().chat.completions.create(**request(QUESTIONS[0], max_tokens=30))
        assert answer.usage.model_extra["citer"]["router"] == version() != old
    finally:
        shutil.copytree(kept, server.router, dirs_exist_ok=True)
        wait_until(lambda: version() == old, 30, "the old router is in service again")
    assert {one["pid"] for one in server.replicas("SLM")} == pids
