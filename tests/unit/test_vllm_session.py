"""A session's bookkeeping against a scripted vLLM: what is sent, what is held, and what a failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from citer_ray.engine import Finish, Sampling
from citer_ray.engines.visit_gate import VisitGate
from citer_ray.engines.vllm_loop import EngineLoop
from citer_ray.engines.vllm_score_column import encode_scores
from citer_ray.engines.vllm_scorers import ColumnScores
from citer_ray.engines.vllm_session import RequestStream, TurnRecord, VLLMSession
from citer_ray.errors import RetryableError

HANDOFF = 9


def column(score: float) -> float:
    import torch

    return float(encode_scores(torch.tensor([score]))[0])


def output(tokens: list[int], scores: list[float], reason: str | None, stop: int | None = None) -> Any:
    """A vLLM output that brings `tokens`."""
    logprobs = [
        {token: SimpleNamespace(logprob=-0.5), HANDOFF: SimpleNamespace(logprob=column(score))}
        for token, score in zip(tokens, scores, strict=True)
    ]
    completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(outputs=[completion])


class Host:
    """A `SessionHost` whose requests follow a script: for each turn, the outputs or an error."""

    def __init__(self, *turns: list[Any] | Exception) -> None:
        self.loop = EngineLoop("test")
        self.handoff_token_id = HANDOFF
        self.keeps_requests = True
        self.closed = False
        self.gate = VisitGate(0, lambda: 0)
        self.turns = list(turns)
        self.sent: list[list[int]] = []
        self.positions: list[int] = []
        self.aborted = 0

    def check_turn(self, total: int, max_tokens: int) -> None:
        assert total >= 0 and max_tokens >= 1

    async def make_room(self, session: VLLMSession, needed: int) -> None: ...

    async def end_turn(self, session: VLLMSession) -> None: ...

    def forget(self, session: VLLMSession) -> None: ...

    def turn_params(self, session: VLLMSession, context: Sequence[int], max_tokens: int) -> Any:
        self.positions.append(len(context))
        return object()

    def start_stream(self) -> RequestStream:
        return RequestStream(self._generate)

    async def _generate(self, inputs: AsyncGenerator[Any, None], params: Any) -> AsyncGenerator[Any, None]:
        try:
            async for piece in inputs:
                self.sent.append(piece.prompt["prompt_token_ids"])
                turn = self.turns.pop(0)
                if isinstance(turn, Exception):
                    raise turn
                for one in turn:
                    await asyncio.sleep(0)
                    yield one
        except BaseException:
            self.aborted += 1
            raise


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        host.loop.close()


def open_session(hosts: list[Host], *turns: list[Any] | Exception, threshold: float | None = 0.5) -> VLLMSession:
    hosts.append(Host(*turns))
    scorer = None if threshold is None else ColumnScores(HANDOFF)
    return VLLMSession(hosts[-1], [1, 2, 3], Sampling(), scorer, threshold or 0.0)


async def test_the_last_sampled_token_is_not_held(hosts: list[Host]) -> None:
    session = open_session(
        hosts, [output([4], [0.9], None), output([5], [0.8], "length")], [output([6], [1], "length")]
    )
    turn = await session.turn([], 2)
    assert (turn.token_ids, turn.finish) == ([4, 5], Finish.LENGTH)
    assert turn.scores == pytest.approx([0.9, 0.8])
    assert session.num_tokens == 4  # 1 2 3 4
    await session.turn([7], 1)
    assert hosts[0].sent == [[1, 2, 3], [7]]  # only what the engine has not seen
    assert hosts[0].positions == [3, 5]


async def test_a_handoff_leaves_everything_held_and_is_no_token(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4, HANDOFF], [0.9, 0.2], "stop", HANDOFF)], [output([8], [1], "stop", 8)])
    turn = await session.turn([], 9)
    assert (turn.token_ids, turn.logprobs, turn.finish) == ([4], [-0.5], Finish.HANDOFF)
    assert turn.scores == pytest.approx([0.9, 0.2])
    assert session.num_tokens == 4
    ended = await session.turn([6], 9)
    assert (ended.token_ids, ended.finish) == ([8], Finish.EOS)
    assert session.num_tokens == 5
    assert hosts[0].sent == [[1, 2, 3], [6]]


async def test_without_a_scorer_there_are_no_scores(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4], [0.9], "length")], threshold=None)
    assert (await session.turn([], 1)).scores == []


async def test_a_dropped_session_sends_everything_again(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4, 5], [1, 1], "length")], [output([6], [1], "length")])
    await session.turn([], 2)
    await hosts[0].loop.call(session.drop())
    assert (hosts[0].aborted, session.num_tokens) == (1, 4)
    await session.turn([7], 1)
    assert hosts[0].sent == [[1, 2, 3], [1, 2, 3, 4, 7]]


async def test_a_host_that_keeps_no_requests_gets_everything_each_turn(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4], [1], "length")], [output([6], [1], "length")])
    hosts[0].keeps_requests = False
    await session.turn([], 1)
    await session.turn([4], 1)
    assert hosts[0].sent == [[1, 2, 3], [1, 2, 3, 4]]
    assert hosts[0].aborted == 2


@pytest.mark.parametrize("failure", [[output([4], [1], "abort")], RuntimeError("the pass failed")])
async def test_a_failed_turn_loses_the_session_and_can_be_rebuilt(hosts: list[Host], failure: Any) -> None:
    session = open_session(hosts, failure, [output([6], [1], "length")])
    with pytest.raises((RetryableError, RuntimeError)):
        await session.turn([], 1)
    assert session.num_tokens == 0
    with pytest.raises(ValueError, match="nothing to compute"):
        await session.turn([], 1)
    await session.turn([1, 2, 3, 4], 1)
    assert hosts[0].sent == [[1, 2, 3], [1, 2, 3, 4]]
    assert session.num_tokens == 4


async def test_a_cancelled_turn_aborts_the_request_and_holds_nothing(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4], [1], None)] * 10_000, [output([6], [1], "length")])
    task = asyncio.create_task(session.turn([], 20_000))
    while not hosts[0].sent:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert session.num_tokens == 0
    await session.turn([1, 2], 1)
    assert hosts[0].aborted == 1
    assert hosts[0].sent[-1] == [1, 2]


async def test_no_new_ids_are_refused_once_the_prompt_is_computed(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4], [1], "length")])
    await session.turn([], 1)
    with pytest.raises(ValueError, match=r"ids\[num_tokens:\]"):
        await session.turn([], 1)


async def test_close_aborts_once_and_refuses_more(hosts: list[Host]) -> None:
    session = open_session(hosts, [output([4], [1], "length")])
    await session.turn([], 1)
    await session.close()
    await session.close()
    assert hosts[0].aborted == 1
    with pytest.raises(ValueError, match="closed"):
        await session.turn([5], 1)


def test_an_aborted_record_is_retryable() -> None:
    record = TurnRecord()
    assert record.add(output([4], [1], "abort"))
    with pytest.raises(RetryableError, match="abort"):
        record.to_turn(HANDOFF, ColumnScores(HANDOFF), position=3)
