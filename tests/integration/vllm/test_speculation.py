"""Speculative decoding in vLLM: the same tokens as the LLM alone, or a row that says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from citer_ray.engine import Sampling
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_launch import Speculation
from citer_ray.engines.vllm_speculative import measure_speculation
from citer_ray.errors import ConfigError
from tests.conformance import naive_generate
from tests.conftest import EOS_ID
from tests.integration.vllm.settings import LLM_OPTIONS

pytestmark = pytest.mark.vllm


async def test_speculation_writes_what_the_llm_writes(
    slm_folder: str,
    llm_folder: str,
    llm_model: PreTrainedModel,
    shared: int,
    handoff_id: int,
    problem_prompts: list[list[int]],
) -> None:
    def start(speculation: Speculation | None) -> VLLMEngine:
        return VLLMEngine(
            llm_folder,
            shared_vocab_size=shared,
            eos_token_ids=[EOS_ID],
            masked_ids=[handoff_id],
            options=replace(LLM_OPTIONS, max_num_seqs=8, speculation=speculation),
        )

    prompts = problem_prompts[:6]
    expected = [naive_generate(llm_model, prompt, 24, stop_at_eos=True) for prompt in prompts]
    rows = measure_speculation(
        start, slm_folder, prompts, max_new_tokens=24, in_flight=6, num_tokens=3, methods=("ngram", "draft_model")
    )
    async for row in rows:
        if row.refused is not None:  # another release may refuse one: then it says why, in one line
            assert "\n" not in row.refused and row.tokens_per_second is None
            continue
        assert row.responses == tuple(map(tuple, expected))
        assert 0 <= row.accepted <= row.drafted
        assert row.tokens_per_second is not None and row.tokens_per_second > 0
        if row.method == "draft_model":
            assert row.accepted > 0


async def test_a_refused_method_is_a_row_with_the_reason() -> None:
    def start(speculation: Speculation | None) -> VLLMEngine:
        raise ConfigError("vLLM could not start 'llm': no drafts here")

    rows = [row async for row in measure_speculation(start, "slm", [[5]], max_new_tokens=4, methods=("ngram",))]
    assert [(row.method, row.refused, row.responses) for row in rows] == [
        ("ngram", "vLLM could not start 'llm': no drafts here", None)
    ]


async def test_a_speculating_engine_is_greedy(llm_engine: VLLMEngine) -> None:
    options = llm_engine._options
    llm_engine._options = replace(options, speculation=Speculation("ngram"))
    try:
        with pytest.raises(ValueError, match="greedy"):
            await llm_engine.open([5], Sampling(temperature=1.0))
        with pytest.raises(ValueError, match="because it speculates"):
            await llm_engine.open([5], Sampling(), scorer="random:1", threshold=0.5)
    finally:
        llm_engine._options = options
