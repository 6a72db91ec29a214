"""Speculative decoding in vLLM: the same tokens as the LLM alone, or one line that says why not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from transformers import LlamaForCausalLM

from citer_ray.decoding import Request, decode_many
from citer_ray.engine import Sampling
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_launch import Speculation, VLLMOptions
from citer_ray.policy import AlwaysLlm
from tests.conformance import naive_generate, prompts
from tests.conftest import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_writes_what_the_llm_writes(
    tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM, tmp_path: Path, method: Literal["draft_model", "ngram"]
) -> None:
    tiny_slm.save_pretrained(tmp_path / "slm")
    tiny_llm.save_pretrained(tmp_path / "llm")
    engine = VLLMEngine(
        str(tmp_path / "llm"),
        shared_vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        options=VLLMOptions(
            dtype="float32",
            kv_cache_gib=0.25,
            enforce_eager=True,
            max_num_seqs=8,
            speculation=Speculation(method, str(tmp_path / "slm") if method == "draft_model" else None, 3),
        ),
    )

    async def compare() -> None:
        requests = [Request(prompt, AlwaysLlm(), 24) for prompt in prompts(6, 71)]
        traces = await decode_many(None, engine, requests, in_flight=6)
        for request, trace in zip(requests, traces, strict=True):
            assert trace.token_ids == naive_generate(tiny_llm, request.prompt_ids, 24, stop_at_eos=True)
        with pytest.raises(ValueError, match="greedy"):
            await engine.open([5], Sampling(temperature=1.0))
        await engine.close()

    asyncio.run(compare())
