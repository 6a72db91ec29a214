"""`TransformersEngine`: the conformance suite, row reuse, shared prefixes, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from citer_ray.engine import Engine, Sampling
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import StepState
from tests.conformance import FREE, EngineConformance, SpeculativeConformance, decode_in_turns, naive_generate, prompts
from tests.conftest import EOS_ID, VOCAB_SIZE


def hash_scorer(state: StepState) -> torch.Tensor:
    """A deterministic function of the hidden state with values spread over [0, 1]."""
    return torch.sigmoid(4 * torch.sin(17 * state.hidden_BH.float().mean(-1)))


def make_engine(model: PreTrainedModel, **settings: object) -> TransformersEngine:
    return TransformersEngine(
        model,
        shared_vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        max_model_len=256,
        scorers={"router": hash_scorer},
        **settings,  # type: ignore[arg-type]
    )


@pytest.fixture
def model(tiny_slm: LlamaForCausalLM) -> PreTrainedModel:
    return tiny_slm


class TestConformance(EngineConformance, SpeculativeConformance):
    @pytest.fixture
    async def engine(self, model: PreTrainedModel) -> AsyncIterator[Engine]:
        engine = make_engine(model)
        yield engine
        await engine.close()


class TestConformanceInThread(EngineConformance):
    @pytest.fixture
    async def engine(self, model: PreTrainedModel) -> AsyncIterator[Engine]:
        with ThreadPoolExecutor(1) as executor:
            engine = make_engine(model, executor=executor)
            yield engine
            await engine.close()


class TestConformanceFewRowsSmallPasses(EngineConformance):
    @pytest.fixture
    async def engine(self, model: PreTrainedModel) -> AsyncIterator[Engine]:
        engine = make_engine(model, max_rows=3, max_pass_tokens=16)
        yield engine
        await engine.close()


async def test_sessions_share_passes(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    await asyncio.gather(*(decode_in_turns(engine, prompt, [20], FREE) for prompt in prompts(30)))
    # 20 tokens each; prefills of different lengths and copies of prefixes add a few passes, sessions do not.
    assert engine.num_passes < 20 + 10


async def test_rollouts_of_one_example_share_their_prefix(model: PreTrainedModel) -> None:
    base = prompts(1, 8)[0] * 6
    states = [[*base[:end], token] for end in range(20, len(base), 5) for token in (7, 9)]
    engine = make_engine(model)
    outputs = await asyncio.gather(*(decode_in_turns(engine, state, [6], FREE) for state in states))
    for state, output in zip(states, outputs, strict=True):
        assert output == naive_generate(model, state, 6, stop_at_eos=False)


async def test_cancelled_sessions_leave_no_row_behind(model: PreTrainedModel) -> None:
    with ThreadPoolExecutor(1) as executor:
        engine = make_engine(model, max_rows=16, executor=executor)
        free = engine.num_free_rows

        async def one(prompt: list[int]) -> None:
            session = await engine.open(prompt, FREE)
            try:
                await session.turn([], 200)
            finally:
                await session.close()

        tasks = [asyncio.create_task(one(prompt)) for prompt in prompts(500)]
        while engine.num_free_rows == free:  # until some of them have begun
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, asyncio.CancelledError) for result in results)
        await decode_in_turns(engine, [5, 6, 7], [3], FREE)  # the pass that ran during the cancellation has ended
        assert engine.num_free_rows == free


async def test_masked_and_unshared_ids_are_never_written(model: PreTrainedModel) -> None:
    plain = make_engine(model)
    tokens = await decode_in_turns(plain, [5, 6, 7], [30], FREE)
    engine = TransformersEngine(
        model, shared_vocab_size=90, eos_token_ids=[EOS_ID], max_model_len=256, masked_ids=[tokens[0]]
    )
    for sampling in (FREE, Sampling(temperature=5.0, seed=1, ignore_eos=True)):
        written = await decode_in_turns(engine, [5, 6, 7], [60], sampling)
        assert tokens[0] not in written and max(written) < 90


async def test_a_failing_pass_reaches_its_callers_and_no_others(model: PreTrainedModel) -> None:
    engine = make_engine(model)

    def broken(state: StepState) -> torch.Tensor:
        raise RuntimeError("router broke")

    engine.set_scorer("broken", broken)
    bad = await engine.open([5, 6], FREE, scorer="broken", threshold=0.5)
    with pytest.raises(Exception, match="router broke"):
        await bad.turn([], 3)
    await bad.close()
    assert await decode_in_turns(engine, [5, 6], [3], FREE) == naive_generate(model, [5, 6], 3, stop_at_eos=False)
