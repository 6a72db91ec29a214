"""The API over scripted engines, with the official client: answers, streams, traces, usage, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from citer_ray.config_serve import ServeConfig
from citer_ray.serving.requests import ChatRequest, CompletionRequest
from citer_ray.serving.responding import LlmUnavailableError, ResponseSettings
from tests.unit.serving_world import BOS, EOS, World

HI = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"model": "routed", "messages": HI, "temperature": 0}


async def streamed(world: World, **request: Any) -> list[Any]:
    """Chunks of a stream, through the official client."""
    stream = await world.openai().chat.completions.create(**{**GREEDY, "stream": True, **request})
    return [chunk async for chunk in stream]


def joined(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def traced(chunks: list[Any]) -> list[dict[str, Any]]:
    return [token for chunk in chunks if chunk.choices for token in chunk.choices[0].citer["tokens"]]


async def test_chat_answer_with_trace_and_usage() -> None:
    world = World("The answer is 42.", lambda position: position in (4, 5, 14))
    world.chat_prompt()
    answer = await world.openai().chat.completions.create(**GREEDY, extra_body={"citer": {"trace": True}})
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The answer is 42.", "stop")
    tokens = choice.citer["tokens"]
    assert [token["writer"] == "llm" for token in tokens] == [index in (4, 5, 14) for index in range(18)]
    assert [token["p_slm"] for token in tokens] == [0.3 if index in (4, 5, 14) else 0.9 for index in range(18)]
    assert "".join(token["text"] for token in tokens) == "The answer is 42."
    assert tokens[-1] == {"id": EOS, "text": "", "writer": "slm", "p_slm": 0.9}
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        world.prompt_length,
        18,
        18 + world.prompt_length,
    )
    extra = usage.citer
    assert (extra["slm_tokens"], extra["llm_tokens"], extra["visits"], extra["llm_share"]) == (15, 3, 3, 3 / 18)
    assert (extra["threshold"], extra["router"], extra["degraded"], extra["rebuilds"]) == (0.5, "r1", False, 0)
    assert extra["gigabytes"] > 0 and extra["gigabytes_llm_only"] > 0
    assert world.slm.num_open == world.llm.num_open == 0


async def test_both_models_see_the_same_ids_with_one_bos() -> None:
    world = World(llm_writes=lambda position: position == 2)
    prompt = world.chat_prompt()
    await world.openai().chat.completions.create(**GREEDY)
    assert prompt.count(BOS) == 1
    (visit,) = world.llm.turns
    assert visit.held == len(prompt) + 2 and visit.turn.token_ids == [ord("e")]


async def test_stream_equals_the_whole_answer() -> None:
    world = World("One, two, three and so on. " * 4)
    world.chat_prompt()
    whole = await world.openai().chat.completions.create(**GREEDY, extra_body={"citer": {"trace": True}})
    chunks = await streamed(world, extra_body={"citer": {"trace": True}})
    assert joined(chunks) == whole.choices[0].message.content
    assert traced(chunks) == whole.choices[0].citer["tokens"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("switch", range(16))
async def test_a_switch_of_models_inside_a_character(switch: int) -> None:
    text = "a👩‍🚀𠮷é"  # bytes 1 to 15 lie inside characters
    world = World(text, lambda position: position == switch)
    world.chat_prompt()
    chunks = await streamed(world, extra_body={"citer": {"trace": True}})
    assert joined(chunks) == text
    assert "\ufffd" not in "".join(chunk.model_dump_json() for chunk in chunks)
    assert "".join(token["text"] for token in traced(chunks)) == text
    assert [token["writer"] for token in traced(chunks)].count("llm") == 1


async def test_a_stop_string_that_spans_both_models() -> None:
    world = World("stop at the END of it", lambda position: position == 13)  # the N of END
    world.chat_prompt()
    for stop in ("END", ["zzz", "END"]):
        answer = await world.openai().chat.completions.create(
            **GREEDY, stop=stop, extra_body={"citer": {"trace": True}}
        )
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("stop at the ", "stop")
        assert [token["writer"] for token in choice.citer["tokens"][12:]] == ["slm", "llm", "slm"]
        assert answer.usage.completion_tokens == 15
        assert joined(await streamed(world, stop=stop)) == "stop at the "
    assert world.slm.num_open == world.llm.num_open == 0


async def test_usage_of_a_stream() -> None:
    world = World()
    world.chat_prompt()
    chunks = await streamed(world, stream_options={"include_usage": True})
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 18 and chunks[-1].usage.citer["llm_tokens"] > 0
    for options in (None, {"include_usage": False}):
        chunks = await streamed(world, stream_options=options)
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_a_stream_ends_with_done() -> None:
    world = World()
    world.chat_prompt()
    response = await world.http().post("/v1/chat/completions", json={**GREEDY, "stream": True})
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_switch_on_the_last_token(limit: int) -> None:
    world = World("abcdef", lambda position: position == limit - 1)
    world.chat_prompt()
    answer = await world.openai().chat.completions.create(
        **GREEDY, max_tokens=limit, extra_body={"citer": {"trace": True}}
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abcdef"[:limit], "length")
    assert [token["writer"] for token in choice.citer["tokens"]] == ["slm"] * (limit - 1) + ["llm"]
    assert answer.usage.completion_tokens == limit


@pytest.mark.parametrize("writer", ["slm", "llm"])
async def test_eos_ends_the_answer_whoever_wrote_it(writer: str) -> None:
    world = World("abc", lambda position: (position == 3) == (writer == "llm"))
    world.chat_prompt()
    answer = await world.openai().chat.completions.create(**GREEDY, extra_body={"citer": {"trace": True}})
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    assert choice.citer["tokens"][3] == {
        "id": EOS,
        "text": "",
        "writer": writer,
        "p_slm": choice.citer["tokens"][3]["p_slm"],
    }


@pytest.mark.parametrize(("path", "kind"), [("chat/completions", ChatRequest), ("completions", CompletionRequest)])
async def test_every_optional_field_as_null(path: str, kind: type[BaseModel]) -> None:
    world = World()
    world.prompt_length = len(world.chat_prompt()) if kind is ChatRequest else 2
    optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
    assert len(optional) > 20
    given = {"messages": HI} if kind is ChatRequest else {"prompt": "x"}
    body = {**dict.fromkeys(optional), **given, "model": "routed", "max_tokens": 3}
    response = await world.http().post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text


async def test_content_as_parts() -> None:
    world = World()
    world.chat_prompt("Hi there")
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    request = {**GREEDY, "messages": [{"role": "user", "content": parts}]}
    answer = await world.openai().chat.completions.create(**request)
    assert answer.usage.prompt_tokens == world.prompt_length
    assert answer.choices[0].message.content == "The answer is 42."


async def test_models_alone() -> None:
    world = World()
    world.chat_prompt()
    client = world.openai()
    assert [model.id async for model in client.models.list()] == ["routed", "slm", "llm"]
    for name in ("slm", "llm"):
        answer = await client.chat.completions.create(
            **{**GREEDY, "model": name}, extra_body={"citer": {"trace": True}}
        )
        tokens = answer.choices[0].citer["tokens"]
        assert {token["writer"] for token in tokens} == {name} and {token["p_slm"] for token in tokens} == {None}
        assert answer.usage.citer["visits"] == (name == "llm")
    alone = answer.usage.citer
    assert alone["gigabytes"] == pytest.approx(alone["gigabytes_llm_only"])


@pytest.mark.parametrize(
    ("fields", "threshold"),
    [({}, 0.5), ({"threshold": 0.7}, 0.7), ({"llm_share": 0.2}, 0.4), ({"llm_share": 0}, 0.0), ({"threshold": 0}, 0.0)],
)
async def test_threshold_of_a_request(fields: dict[str, float], threshold: float) -> None:
    world = World()
    world.chat_prompt()
    answer = await world.openai().chat.completions.create(**GREEDY, extra_body=fields)
    assert answer.usage.citer["threshold"] == pytest.approx(threshold)
    assert (answer.usage.citer["llm_tokens"] > 0) == (threshold > 0.3)


async def test_completions_with_texts_ids_and_several_prompts() -> None:
    world = World("abc", lambda position: False)
    client = world.openai()
    world.prompt_length = 4  # BOS and three bytes
    answer = await client.completions.create(model="routed", prompt=["one", "two"], n=2, temperature=0, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"abc"} and answer.usage.prompt_tokens == 8
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c", ""]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    answer = await client.completions.create(model="routed", prompt=[BOS, 1, 2, 3], temperature=0)
    assert answer.choices[0].text == "abc"
    stream = await client.completions.create(model="routed", prompt="one", temperature=0, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"


async def test_logprobs_of_a_chat() -> None:
    world = World("ab")
    world.chat_prompt()
    answer = await world.openai().chat.completions.create(**GREEDY, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.bytes, entry.logprob) for entry in content] == [
        ("a", [97], 0.0),
        ("b", [98], 0.0),
        ("", [], 0.0),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": [""]}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"threshold": -1}, "threshold"),
        ({"llm_share": 1.1}, "llm_share"),
        ({"threshold": 0.5, "llm_share": 0.5}, None),
        ({"unknown": 1}, "unknown"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"model": "slm", "threshold": 0.5}, "model"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages"),
    ],
)
async def test_bad_fields_are_refused(fields: dict[str, Any], param: str | None) -> None:
    world = World()
    response = await world.http().post("/v1/chat/completions", json={**GREEDY, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and error["message"]
    assert world.slm.turns == world.llm.turns == []


async def test_a_prompt_that_does_not_fit_names_the_numbers() -> None:
    world = World()
    with pytest.raises(openai.BadRequestError, match=r"300 tokens.* 419 in the prompt") as caught:
        await world.openai().chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": "x" * 400}]})
    assert caught.value.code == "context_length_exceeded"


async def test_unknown_models_and_paths() -> None:
    world = World()
    with pytest.raises(openai.NotFoundError, match="routed, slm, llm"):
        await world.openai().chat.completions.create(**{**GREEDY, "model": "gpt-5"})
    for method, path, status in (
        ("GET", "/v2", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        response = await world.http().request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]


async def test_keys() -> None:
    world = World(api_keys=("first", "second"))
    world.chat_prompt()
    for key in ("first", "second"):
        assert (await world.openai(key).chat.completions.create(**GREEDY)).choices
    for headers in (
        {},
        {"authorization": "Bearer third"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
    ):
        response = await world.http().post("/v1/chat/completions", json=GREEDY, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert (await world.http().get("/v1/models")).status_code == 401
    assert (await world.http().get("/health")).status_code == 200


async def test_request_ids_and_cors() -> None:
    world = World()
    response = await world.http().get("/health", headers={"x-request-id": "mine", "origin": "http://a"})
    assert response.headers["x-request-id"] == "mine" and "access-control-allow-origin" not in response.headers
    assert len((await world.http().get("/ready")).headers["x-request-id"]) == 24
    world = World(config=ServeConfig(allow_origins=("http://a",)))
    response = await world.http().get("/health", headers={"origin": "http://a"})
    assert response.headers["access-control-allow-origin"] == "http://a"


async def test_large_bodies_are_refused() -> None:
    world = World(config=ServeConfig(max_body_bytes=1000))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b"x" * 600

    for content in (b"x" * 1001, pieces()):
        response = await world.http().post("/v1/chat/completions", content=content)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


class HangingEngine:
    """An LLM that never answers; counts its open sessions."""

    max_model_len = 300

    def __init__(self) -> None:
        self.num_open = 0

    async def open(self, *args: Any, **kwargs: Any) -> HangingEngine:
        self.num_open += 1
        return self

    num_tokens = 0

    async def turn(self, *args: Any) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.num_open -= 1


def hanging_world() -> tuple[World, HangingEngine]:
    world = World(llm_writes=lambda position: position == 6)
    world.chat_prompt()
    engine = HangingEngine()
    world.service.backend._llm = engine  # type: ignore[attr-defined]
    return world, engine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_both_sessions(stream: bool) -> None:
    world, llm = hanging_world()
    body = json.dumps({**GREEDY, "stream": stream}).encode()
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    serving = asyncio.create_task(world.app(scope, incoming.get, send))
    while llm.num_open == 0:
        await asyncio.sleep(0)
    assert world.slm.num_open == 1
    incoming.put_nowait({"type": "http.disconnect"})
    async with asyncio.timeout(10):
        await serving
    assert (world.slm.num_open, llm.num_open) == (0, 0)


async def test_deadlines() -> None:
    world, llm = hanging_world()
    headers = {"x-deadline-seconds": "0.05"}
    response = await world.http().post("/v1/chat/completions", json=GREEDY, headers=headers)
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    response = await world.http().post("/v1/chat/completions", json={**GREEDY, "stream": True}, headers=headers)
    events = [event for event in response.text.split("\n\n") if event]
    assert "deadline_exceeded" in events[-1] and "[DONE]" not in response.text
    assert (world.slm.num_open, llm.num_open) == (0, 0)
    for wrong in ("soon", "nan", "-1", "0", "inf"):
        response = await world.http().post("/v1/chat/completions", json=GREEDY, headers={"x-deadline-seconds": wrong})
        assert response.status_code == 400


async def test_sampling_draws_by_seed() -> None:
    world = World()
    world.chat_prompt()
    seen: list[Any] = []
    opened = world.slm.open

    async def record(prompt_ids: Any, sampling: Any, **rest: Any) -> Any:
        seen.append(sampling)
        return await opened(prompt_ids, sampling, **rest)

    world.slm.open = record  # type: ignore[method-assign]
    request = {**GREEDY, "temperature": None, "n": 2, "seed": 7, "top_p": 0.5, "presence_penalty": 1.0}
    await world.http().post("/v1/chat/completions", json={**request, "top_k": -1})
    assert [sampling.seed for sampling in seen] == [7, 8]
    first = seen[0]
    assert (first.temperature, first.top_p, first.top_k, first.presence_penalty) == (1.0, 0.5, 0, 1.0)
    assert first.response_start == world.prompt_length


async def test_the_slm_goes_on_without_the_llm() -> None:
    world = World("abcdef", lambda position: position == 3, settings=ResponseSettings("slm"))
    world.chat_prompt()

    async def away(*args: Any, **kwargs: Any) -> Any:
        raise LlmUnavailableError("no replica")

    world.llm.open = away  # type: ignore[method-assign]
    response = await world.http().post("/v1/chat/completions", json={**GREEDY, "citer": {"trace": True}})
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == "abcdef"
    assert response.headers["x-citer-degraded"] == "true" and answer["usage"]["citer"]["degraded"] is True
    assert answer["usage"]["citer"]["llm_tokens"] == 0
    assert [token["p_slm"] for token in answer["choices"][0]["citer"]["tokens"]] == [0.9] * 3 + [0.3] + [0.9] * 3
    assert world.slm.num_open == 0
