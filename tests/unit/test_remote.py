"""`RemoteEngine`: the conformance suite over HTTP in this process, and what servers do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from citer_ray.config_loading import load_config
from citer_ray.config_remote import RemoteConfig
from citer_ray.engine import Engine, Finish, Sampling, TokenSequence
from citer_ray.engines.build import EngineSpec, build_engine, check_engines
from citer_ray.engines.remote import RemoteEngine
from citer_ray.engines.remote_client import RemoteClient
from citer_ray.errors import ConfigError, RetryableError
from tests.conformance import FREE, GREEDY, EngineConformance, decode_in_turns, naive_generate, prompts
from tests.conftest import EOS_ID, VOCAB_SIZE
from tests.vllm_dialect import URL, Dialect

KEY = "sk-very-secret"
CONFIG = RemoteConfig(url=URL, max_attempts=3, backoff_s=0.5)


class Waits(list[float]):
    """Seconds that were asked for; nobody waits."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


class Away(RetryableError):
    """What the caller wants to hear."""


@pytest.fixture
def model(tiny_llm: LlamaForCausalLM) -> PreTrainedModel:
    return tiny_llm


@pytest.fixture
def server(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Dialect:
    monkeypatch.setenv(CONFIG.api_key_env, KEY)
    return Dialect(model)


def make_engine(http: httpx.AsyncClient, waits: Waits | None = None, config: RemoteConfig = CONFIG) -> RemoteEngine:
    client = RemoteClient(config, away=Away, http_client=http, sleep=waits if waits is not None else Waits())
    return RemoteEngine(client, shared_vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID], max_model_len=256)


class TestConformance(EngineConformance):
    """All that does not need a scorer or hidden states; those tests hold the refusal instead."""

    @pytest.fixture
    async def engine(self, server: Dialect) -> AsyncIterator[Engine]:
        engine = make_engine(server.http())
        yield engine
        await engine.close()

    async def test_scores_equal_a_full_forward_pass(self, engine: Engine, model: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="hidden states"):
            await engine.score([TokenSequence([5], [6])], hidden=True)
        batch = [TokenSequence(prompt, response) for prompt, response in zip(prompts(5), prompts(5, 1), strict=True)]
        for sequence, scores in zip(batch, await engine.score(batch), strict=True):
            for index in range(len(sequence.response_ids)):
                state = [*sequence.prompt_ids, *sequence.response_ids[:index]]
                assert [int(scores.greedy[index])] == naive_generate(model, state, 1, stop_at_eos=False)
            assert scores.hidden is None and (scores.reference_logprob <= 0).all()

    async def test_many_sessions_at_once_equal_one_at_a_time(self, engine: Engine) -> None:
        sampling = Sampling(temperature=1.0, top_k=20, seed=3, ignore_eos=True)  # a call a token: few will do
        many = prompts(4, 2)
        together = await asyncio.gather(*(decode_in_turns(engine, prompt, [3, 2], sampling) for prompt in many))
        assert together == [await decode_in_turns(engine, prompt, [5], sampling) for prompt in many]

    async def _refuses_scorers(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="only the LLM can be remote"):
            await engine.open([5], FREE, scorer="router", threshold=0.5)

    async def test_threshold_zero_never_hands_off(self, engine: Engine) -> None:
        await self._refuses_scorers(engine)

    async def test_threshold_above_one_hands_off_at_once(self, engine: Engine) -> None:
        await self._refuses_scorers(engine)

    async def test_handoff_stops_where_the_score_falls_below(self, engine: Engine, model: PreTrainedModel) -> None:
        await self._refuses_scorers(engine)

    async def test_a_session_goes_on_after_a_handoff(self, engine: Engine, model: PreTrainedModel) -> None:
        await self._refuses_scorers(engine)


async def test_a_greedy_turn_is_one_call_with_the_whole_context(server: Dialect) -> None:
    engine = make_engine(server.http())
    session = await engine.open([5, 6, 7], FREE)
    turn = await session.turn([], 4)
    await session.turn([*turn.token_ids[-1:], 9], 2)
    assert [body["prompt"] for body in server.bodies] == [[5, 6, 7], [5, 6, 7, *turn.token_ids, 9]]
    assert [(body["max_tokens"], body["model"], body["temperature"]) for body in server.bodies] == [
        (4, "big", 0.0),
        (2, "big", 0.0),
    ]
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert (engine.read_ids, engine.written_ids) == (3 + 8, 6)


async def test_the_responses_end_is_the_pairs(server: Dialect) -> None:
    prompt = prompts(1)[0]
    free = await decode_in_turns(make_engine(server.http()), prompt, [6], FREE)
    client = RemoteClient(CONFIG, http_client=server.http())
    ends = RemoteEngine(client, shared_vocab_size=VOCAB_SIZE, eos_token_ids=[free[3]], max_model_len=256)
    session = await ends.open(prompt, GREEDY)
    turn = await session.turn([], 6)
    assert (turn.token_ids, turn.finish) == (free[: free.index(free[3]) + 1], Finish.EOS)


async def test_masked_ids_and_penalties(server: Dialect, model: PreTrainedModel) -> None:
    prompt = prompts(1)[0]
    free = await decode_in_turns(make_engine(server.http()), prompt, [8], FREE)
    client = RemoteClient(CONFIG, http_client=server.http())
    masked = RemoteEngine(
        client, shared_vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID], max_model_len=256, masked_ids=[free[0]]
    )
    assert free[0] not in await decode_in_turns(masked, prompt, [8], FREE)
    sampling = replace(FREE, presence_penalty=2.0, frequency_penalty=2.0, response_start=len(prompt))
    whole = await decode_in_turns(make_engine(server.http()), prompt, [9], sampling)
    assert await decode_in_turns(make_engine(server.http()), prompt, [4, 5], sampling) == whole
    counts = {str(token): -2.0 - 2.0 * whole[:-1].count(token) for token in whole[:-1]}
    assert server.bodies[-1]["logit_bias"] == counts


async def test_what_may_pass_is_tried_again(server: Dialect) -> None:
    waits = Waits()
    engine = make_engine(server.http(), waits)
    server.answers = [(503, {}), (429, {"retry-after": "7"})]
    tokens = await decode_in_turns(engine, [5, 6], [3], FREE)
    assert waits == [0.5, 7.0]
    assert tokens == await decode_in_turns(engine, [5, 6], [3], FREE)


async def test_a_server_that_stays_away(server: Dialect) -> None:
    waits = Waits()
    engine = make_engine(server.http(), waits)
    session = await engine.open([5, 6], FREE)
    server.answers = [(503, {})] * 3
    with pytest.raises(Away, match="3 attempts; the last: HTTP 503"):
        await session.turn([], 3)
    assert waits == [0.5, 1.0] and session.num_tokens == 0
    assert len((await session.turn([5, 6][session.num_tokens :], 3)).token_ids) == 3

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    unreachable = make_engine(httpx.AsyncClient(transport=httpx.MockTransport(refuse)))
    with pytest.raises(Away, match=f"{URL} did not answer"):
        await decode_in_turns(unreachable, [5, 6], [3], FREE)


@pytest.mark.parametrize(("status", "message"), [(401, "set CITER_LLM_API_KEY"), (400, "HTTP 400"), (404, "HTTP 404")])
async def test_refusals_are_final(server: Dialect, status: int, message: str, caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    server.answers = [(status, {})]
    with caplog.at_level("DEBUG", "citer_ray"), pytest.raises(ConfigError, match=message) as caught:
        await decode_in_turns(make_engine(server.http(), waits), [5, 6], [3], FREE)
    assert waits == []
    assert status != 401 or KEY not in str(caught.value)
    assert KEY not in caplog.text


async def test_a_server_without_token_ids(server: Dialect) -> None:
    server.extensions = False
    engine = make_engine(server.http())
    with pytest.raises(ConfigError, match="does not return token ids"):
        await decode_in_turns(engine, [5, 6], [3], FREE)


async def test_foreign_ids_and_no_page_of_json(server: Dialect) -> None:
    client = RemoteClient(CONFIG, http_client=server.http())
    narrow = RemoteEngine(client, shared_vocab_size=3, eos_token_ids=[EOS_ID], max_model_len=256)
    with pytest.raises(ConfigError, match="the pair shares the ids below 3"):
        await decode_in_turns(narrow, [5, 6], [30], FREE)
    page = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>hello</html>"))
    with pytest.raises(ConfigError, match="http://llm"):
        await decode_in_turns(make_engine(httpx.AsyncClient(transport=page)), [5, 6], [3], FREE)


async def test_the_servers_model(server: Dialect) -> None:
    assert await RemoteClient(CONFIG, http_client=server.http()).max_model_len() == 256
    wrong = RemoteClient(CONFIG.model_copy(update={"model": "other"}), http_client=server.http())
    with pytest.raises(ConfigError, match="no model 'other'"):
        await wrong.max_model_len()


async def test_sampling_is_sent_as_it_is(server: Dialect) -> None:
    engine = make_engine(server.http())
    await decode_in_turns(engine, [5, 6], [2], Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=3))
    first, second = server.bodies[:2]
    assert (first["temperature"], first["top_p"], first["top_k"], first["max_tokens"]) == (0.7, 0.9, 5, 1)
    assert first["seed"] != second["seed"] and 0 <= first["seed"] < 2**63


def test_the_configuration_names_the_server() -> None:
    smoke = Path(__file__).parents[2] / "configs" / "smoke.yaml"
    config = load_config(smoke, ["engine.kind=vllm", "engine.remote.url=http://llm.test:1", "pair.llm.path=nowhere"])
    assert config.engine.remote.url == "http://llm.test:1/v1"
    spec = EngineSpec(config, 491, frozenset([2]), 512, 4, "slm")
    check_engines(spec)
    assert isinstance(build_engine("llm", spec), RemoteEngine)
    with pytest.raises(ConfigError, match="credentials"):
        load_config(smoke, ["engine.remote.url=http://me:secret@host/v1"])
    with pytest.raises(ConfigError, match="http://host:8000/v1"):
        load_config(smoke, ["engine.remote.url=host/v1"])
