"""Edge mode in the terminal: colours, counts, and a server that goes away in the middle of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from benchmarks.untrained_router import write_router
from citer_ray.cli.edge_chat import NOTE, EdgeChat, EdgeSettings, open_chat
from citer_ray.cli.respond import chat
from citer_ray.config import ModelConfig
from citer_ray.config_loading import load_config
from citer_ray.config_remote import RemoteConfig
from citer_ray.engine import GREEDY, Engine
from citer_ray.engines.remote import RemoteEngine
from citer_ray.engines.remote_client import RemoteClient
from citer_ray.errors import ConfigError
from citer_ray.pair.models import load_model
from citer_ray.serving.jobs import Job, RouterRef
from citer_ray.serving.responding import LlmUnavailableError
from tests.unit.serving_world import EOS, VOCAB_SIZE, World, pair_cost
from tests.vllm_dialect import URL, Dialect

TEXT = "The answer is 42."
CONFIGS = Path(__file__).parents[2] / "configs"


def terminal() -> Console:
    return Console(file=StringIO(), record=True, width=300, height=50, force_terminal=True, color_system="standard")


def edge(world: World, llm: Engine, console: Console, on_llm_unavailable: str = "error") -> EdgeChat:
    return EdgeChat(
        world.slm,
        llm,
        tokenizer=world.encoder._tokenizer,
        encode=world.chat_prompt,
        job=Job("", [], 100, GREEDY, "routed", RouterRef("r1", "nowhere"), 0.5),
        max_model_len=300,
        end_ids=frozenset([EOS]),
        cost=pair_cost(),
        console=console,
        on_llm_unavailable=on_llm_unavailable,
    )


async def no_wait(seconds: float) -> None:
    """Nobody waits in tests."""


def server(world: World, answers: Callable[[int], bool]) -> RemoteEngine:
    """The world's LLM behind HTTP; call n is answered iff `answers(n)`."""
    calls = iter(range(1000))

    def handle(request: httpx.Request) -> httpx.Response:
        if not answers(next(calls)):
            raise httpx.ConnectError("the network is down")
        token = world.llm.next_token(json.loads(request.content)["prompt"])
        logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.1], "top_logprobs": None, "text_offset": [0]}
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs, "token_ids": [token]}
        body = {"id": "1", "object": "text_completion", "created": 0, "model": "big", "choices": [choice]}
        return httpx.Response(200, json=body)

    client = RemoteClient(
        RemoteConfig(url=URL, model="big", max_attempts=2),
        away=LlmUnavailableError,
        http_client=httpx.AsyncClient(transport=httpx.MockTransport(handle)),
        sleep=no_wait,
    )
    return RemoteEngine(client, shared_vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], max_model_len=300)


async def test_tokens_are_coloured_and_counted() -> None:
    world, console = World(TEXT, lambda position: position in (4, 14)), terminal()
    tally = await edge(world, server(world, lambda call: True), console).ask("Hi")
    shown = console.export_text(styles=True)
    assert "\x1b[1;30;103ma\x1b[0m" in shown and "\x1b[1;30;103m4\x1b[0m" in shown
    assert (tally.slm_tokens, tally.llm_tokens, tally.visits) == (16, 2, 2)
    answer, counts = "".join(shown.replace("\x1b[1;30;103m", "").replace("\x1b[0m", "")).splitlines()
    assert answer == TEXT
    assert "18 tokens, 2 by the LLM (11.1%), 2 visits" in counts
    sent = 2 * world.prompt_length + 4 + 14
    assert f"{sent} ids sent to the LLM" in counts and "GB by the LLM alone" in counts


async def test_the_slm_goes_on_alone_with_a_note() -> None:
    world, console = World(TEXT, lambda position: position in (4, 14)), terminal()
    chat = edge(world, server(world, lambda call: call == 0), console, "slm")
    tally = await chat.ask("Hi")
    shown = console.export_text()
    assert shown.count(NOTE) == 1
    assert shown.replace(f" {NOTE} ", "").replace(f"{NOTE}\n", "").startswith(TEXT)
    assert (tally.slm_tokens, tally.llm_tokens) == (17, 1)
    assert world.slm.num_open == 0


async def test_without_leave_the_answer_ends_with_an_error() -> None:
    world, console = World(TEXT, lambda position: position in (4, 14)), terminal()
    with pytest.raises(LlmUnavailableError, match="did not answer in 2 attempts"):
        await edge(world, server(world, lambda call: call == 0), console).ask("Hi")
    assert world.slm.num_open == 0


async def test_a_question_that_does_not_fit() -> None:
    world = World(TEXT)
    with pytest.raises(ConfigError, match="the pair takes 300"):
        await edge(world, world.llm, terminal()).ask("Hi" * 200)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "both"}, "--model"),
        ({"on_llm_unavailable": "wait"}, "--on-llm-unavailable"),
        ({}, "--router"),
        ({"router": Path(), "threshold": 0.5, "llm_share": 0.2}, "exclude each other"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EdgeSettings("slm", URL, **changes).check()  # type: ignore[arg-type]


def test_the_command_needs_one_way_or_the_other() -> None:
    for options in ({}, {"slm": "somewhere"}, {"slm": "a", "llm_url": URL, "config": Path("b.yaml")}):
        with pytest.raises(ConfigError, match="either --config"):
            chat(**options)  # type: ignore[arg-type]


async def test_the_embedded_pair_over_http(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "embedded.yaml", [f"output_dir={tmp_path}"])
    await write_router(config, tmp_path / "router")
    settings = EdgeSettings(
        "embedded:slm", URL, "embedded:llm", router=tmp_path / "router", llm_share=0.2, max_tokens=24
    )
    dialect = Dialect(load_model(ModelConfig(path="embedded:llm")))
    console = terminal()
    opened = await open_chat(settings, console, dialect.http())
    tally = await opened.ask("What is 12 + 30?")
    assert tally.llm_tokens == len(dialect.bodies) > 0 and tally.slm_tokens > 0
    assert "GB by the LLM alone" in console.export_text()
    await opened.close()
