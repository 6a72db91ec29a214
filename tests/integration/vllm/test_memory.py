"""Too little memory, and engines that end: an engine with a tiny KV cache, which the last tests kill and close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from citer_ray.decoding import Request, decode_many
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.errors import RetryableError
from citer_ray.policy import Threshold, Writer
from tests.conformance import FREE
from tests.conftest import EOS_ID
from tests.integration.vllm.settings import OPTIONS
from tests.integration.vllm.traces import assert_same

pytestmark = pytest.mark.vllm

# One block takes 2 layers x 2 heads x 32 values x 32 positions x 2 (keys, values) x 4 bytes = 32 KiB.
NUM_BLOCKS = 24
processes: list[psutil.Process] = []


@pytest.fixture(scope="module")
def small_engine(slm_folder: str, router: Path, shared: int) -> Iterator[VLLMEngine]:
    others = psutil.Process().children(recursive=True)
    engine = VLLMEngine(
        slm_folder,
        shared_vocab_size=shared,
        eos_token_ids=[EOS_ID],
        router=router,
        slm_fingerprint="slm",
        options=replace(OPTIONS, kv_cache_gib=NUM_BLOCKS * 32 / 2**20),
    )
    started = [process for process in psutil.Process().children(recursive=True) if process not in others]
    processes.extend(process for process in started if "VLLM" in process.name())
    yield engine
    asyncio.run(engine.close())


async def test_preempted_requests_write_the_same(
    small_engine: VLLMEngine, reference: TransformersEngine, slm_model: Any, problem_prompts: list[list[int]]
) -> None:
    assert small_engine.num_kv_tokens <= 32 * NUM_BLOCKS
    policy = Threshold("router", 0.02)
    requests = [Request(prompt, policy, 80, FREE) for prompt in problem_prompts[100:124]]

    async def decode(engine: Any) -> Any:
        # The SLM in both roles: one engine is enough to run out of memory.
        return await decode_many(engine, engine, requests, in_flight=len(requests))

    ours, theirs = await decode(small_engine), await decode(reference)
    assert small_engine.watch.num_preemptions > 0
    models = {Writer.SLM: slm_model, Writer.LLM: slm_model}
    assert assert_same(requests, ours, theirs, models) <= 1


async def test_a_request_that_can_never_fit_is_refused_by_its_length(small_engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match=str(small_engine.max_model_len)):
        await small_engine.open([5] * (small_engine.max_model_len + 1), FREE)


async def test_a_dead_engine_is_a_retryable_error(small_engine: VLLMEngine) -> None:
    """Kills the processes."""
    session = await small_engine.open([5, 6], FREE)
    await session.turn([], 1)
    waiting = asyncio.create_task((await small_engine.open([7, 8], FREE)).turn([], 400))
    await asyncio.sleep(0)
    for process in processes:
        process.kill()
    with pytest.raises(RetryableError, match="died"):
        await waiting
    with pytest.raises(RetryableError, match="died"):
        await session.turn([7], 1)
    await session.close()
    with pytest.raises(RetryableError, match="died"):
        await small_engine.open([5], FREE)


async def test_a_closed_engine_says_so(small_engine: VLLMEngine) -> None:
    """Last: nothing comes back after it."""
    await small_engine.close()
    with pytest.raises(RetryableError, match="closed"):
        await small_engine.open([5], FREE)
    await small_engine.close()
