"""vLLM's own sampling parameters on a routed engine: they act on the tokens that are sampled, and on nothing else.

Requests go straight to vLLM here, past our sessions, as another client of the engine could send them.
"""

from __future__ import annotations

from typing import Any

import pytest

from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_score_column import decode_score
from citer_ray.engines.vllm_settings import THRESHOLD_KEY
from tests.conformance import FREE

pytestmark = pytest.mark.vllm


async def generate(
    engine: VLLMEngine, prompt: list[int], handoff_id: int, threshold: float, **params: Any
) -> tuple[list[int], list[dict[int, float]]]:
    """Token ids and returned log-probabilities of one request."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    values: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 24,
        "ignore_eos": True,
        "stop_token_ids": [handoff_id],
        "logprob_token_ids": [handoff_id],
        "detokenize": False,
        "extra_args": {THRESHOLD_KEY: threshold},
    }
    request = SamplingParams(**(values | params))

    async def collect() -> Any:
        assert engine._decoder is not None
        last = None
        async for output in engine._decoder.generate(
            tokens_input(prompt), request, f"test-{next(engine._request_ids)}"
        ):
            last = output
        return last

    (completion,) = (await engine.loop.call(collect())).outputs
    columns = [{token: entry.logprob for token, entry in one.items()} for one in completion.logprobs]
    return list(completion.token_ids), columns


@pytest.fixture
def prompt(problem_prompts: list[list[int]]) -> list[int]:
    return problem_prompts[180]


@pytest.fixture
async def greedy(engine: VLLMEngine, prompt: list[int]) -> list[int]:
    session = await engine.open(prompt, FREE)
    turn = await session.turn([], 24)
    await session.close()
    return turn.token_ids


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-2, "top_k": 1, "min_p": 0.99}]
)
async def test_a_single_candidate_is_the_greedy_token(
    engine: VLLMEngine, prompt: list[int], greedy: list[int], handoff_id: int, params: dict[str, float]
) -> None:
    ids, _ = await generate(engine, prompt, handoff_id, 0.0, **({"temperature": 1.0, "seed": 3} | params))
    assert ids == greedy


async def test_penalties_change_the_tokens_and_not_the_handoffs(
    engine: VLLMEngine, prompt: list[int], greedy: list[int], handoff_id: int
) -> None:
    free, columns = await generate(engine, prompt, handoff_id, 0.0)
    assert free == greedy and len(set(free)) < len(free)
    frequent: dict[str, Any] = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 5.0}
    ids, _ = await generate(engine, prompt, handoff_id, 0.0, **frequent)
    assert ids != free and len(set(ids)) > len(set(free)) and handoff_id not in ids
    scores = [decode_score(column[handoff_id]) for column in columns]
    threshold = sorted(scores)[len(scores) // 2]
    first = next(index for index, score in enumerate(scores) if score < threshold)
    for params in (
        {},
        {"top_k": 5, "min_p": 0.1},
        {"logit_bias": {handoff_id: 100.0}},
        {"logit_bias": {handoff_id: -100}},
    ):
        ids, _ = await generate(engine, prompt, handoff_id, threshold, **params)
        assert ids == [*free[:first], handoff_id]


async def test_the_handoff_token_is_never_sampled_without_a_handoff(
    engine: VLLMEngine, prompt: list[int], handoff_id: int, shared: int
) -> None:
    wild: dict[str, Any] = {"temperature": 2.0, "seed": 1, "max_tokens": 200, "logit_bias": {handoff_id: 100.0}}
    for extra in ({THRESHOLD_KEY: 0.0}, None):  # without a threshold a request is plain decoding
        ids, columns = await generate(engine, prompt, handoff_id, 0.0, **wild, extra_args=extra)
        assert len(ids) == 200 and handoff_id not in ids and max(ids) < shared
        assert all(0 <= decode_score(column[handoff_id]) <= 1 for column in columns)


async def test_vllms_seed_repeats(engine: VLLMEngine, prompt: list[int], handoff_id: int) -> None:
    drawn = [(await generate(engine, prompt, handoff_id, 0.0, temperature=1.5, seed=seed))[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_log_probabilities_are_the_models_own(
    engine: VLLMEngine, prompt: list[int], greedy: list[int], handoff_id: int
) -> None:
    session = await engine.open(prompt, FREE)
    alone = await session.turn([], 24)
    await session.close()
    for params in ({}, {"repetition_penalty": 1.0, "top_k": 3}):
        ids, columns = await generate(engine, prompt, handoff_id, 0.0, **params)
        logprobs = [column[token] for token, column in zip(ids, columns, strict=True)]
        assert logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    _, columns = await generate(engine, prompt, handoff_id, 0.0, logprobs=3, logprob_token_ids=None)
    assert all(len(column) >= 3 and handoff_id not in list(column)[:3] for column in columns)
