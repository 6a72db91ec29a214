"""Teacher-forced scores from vLLM: one prefill a sequence.

Without hidden states they are prompt log-probabilities of the decoding engine, which any vLLM model gives.
With hidden states they come from the pooling engine (`vllm_scored.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from citer_ray.engine import Scores, TokenSequence
from citer_ray.engines.vllm_settings import PROMPT_LENGTH_KEY, ModelSettings

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.async_llm import AsyncLLM

_BELOW_REAL = -(2.0**39)  # encoded scores are at or below -2**40 (`vllm_score_column.py`)
_SPARE_CANDIDATES = 4  # a stock class does not mask: look past this many ids that are never written


async def score_by_logprobs(
    llm: AsyncLLM, request_id: str, sequence: TokenSequence, settings: ModelSettings, masked: bool
) -> Scores:
    """Greedy tokens and log-probabilities of one sequence.

    Args:
        llm: a decoding engine's client.
        request_id: unused so far.
        sequence: prompt and response; the response is not empty.
        settings: which ids are never written.
        masked: the model class masks them itself.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

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


async def score_by_states(llm: AsyncLLM, request_id: str, sequence: TokenSequence) -> Scores:
    """As `score_by_logprobs`, with hidden states; `llm` is a pooling engine's client."""
    from vllm import PoolingParams
    from vllm.inputs import tokens_input

    params = PoolingParams(
        task="token_embed", use_activation=False, extra_kwargs={PROMPT_LENGTH_KEY: len(sequence.prompt_ids)}
    )
    prompt = tokens_input([*sequence.prompt_ids, *sequence.response_ids])
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]] | None = None
    async for output in llm.encode(prompt, params, request_id):
        values = output.outputs.data.numpy()
    assert values is not None, "the pooling engine answers every request"
    if len(values) != len(sequence.response_ids):
        raise RuntimeError(f"sent {len(sequence.response_ids)} response tokens, got the states of {len(values)}")
    return Scores(
        greedy=values[:, -2].astype(np.int32),
        reference_logprob=_with_infinity(values[:, -1]),
        hidden=np.ascontiguousarray(values[:, :-2]),
    )


def _scores(flat: FlatLogprobs, start: int, response_ids: Sequence[int], settings: ModelSettings) -> Scores:
    """Positions `start` and up of vLLM's lists: the response's own token first, then the candidates."""
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
    return Scores(greedy, _with_infinity(logprobs))


def _with_infinity(
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """-inf for what is never written: the handoff column holds an encoded score, a logit below any real one."""
    return np.where(logprobs < _BELOW_REAL, -np.inf, logprobs).astype(np.float32)
