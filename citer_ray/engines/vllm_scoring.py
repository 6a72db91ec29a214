"""Teacher-forced scores from vLLM: one prefill a sequence, read back as prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from citer_ray.engine import Scores, TokenSequence
from citer_ray.engines.vllm_settings import ModelSettings

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.async_llm import AsyncLLM

_SPARE_CANDIDATES = 4  # a stock class does not mask: look past this many ids that are never written


async def score_sequence(
    llm: AsyncLLM, request_id: str, sequence: TokenSequence, settings: ModelSettings, masked: bool
) -> Scores:
    """Score one sequence.

    Args:
        llm: the vLLM client.
        request_id: unused so far.
        sequence: prompt and response.
        settings: which ids are never written.
        masked: the model class masks them itself.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    if len(sequence.response_ids) == 0:
        return Scores(np.empty(0, np.int32), np.empty(0, np.float32))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=1 if masked else 1 + _SPARE_CANDIDATES,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = tokens_input([*sequence.prompt_ids, *sequence.response_ids])
    flat: FlatLogprobs | None = None
    async for output in llm.generate(prompt, params, request_id):
        flat = output.prompt_logprobs  # type: ignore[assignment]
    assert flat is not None, "vLLM returns prompt logprobs when they are asked for"
    return _scores(flat, len(sequence.prompt_ids), sequence.response_ids, settings)


def _scores(flat: FlatLogprobs, start: int, response_ids: Sequence[int], settings: ModelSettings) -> Scores:
    """Positions `start` and up of vLLM's lists; each holds the response's own token first, then the candidates."""
    never = set(settings.masked_ids)
    greedy = np.empty(len(response_ids), np.int32)
    logprobs = np.empty(len(response_ids), np.float32)
    for position in range(len(response_ids)):
        first, end = flat.start_indices[start + position], flat.end_indices[start + position]
        logprobs[position] = flat.logprobs[first]
        candidates = flat.token_ids[first + 1 : end]
        greedy[position] = next(
            token for token in candidates if token < settings.shared_vocab_size and token not in never
        )
    return Scores(greedy, logprobs)
