"""The scoring pooler: rows of the response, whole or in chunks, with greedy tokens and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from citer_ray.engines.vllm_scored import ScoringPooler
from citer_ray.engines.vllm_settings import PROMPT_LENGTH_KEY

HIDDEN, VOCAB = 8, 20
WEIGHT_VH = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def logits(hidden_BH: torch.Tensor) -> torch.Tensor:
    return hidden_BH @ WEIGHT_VH.T


class Batch:
    """Sequences of the given lengths, with a prompt of 2 tokens each, that reach the pooler chunk by chunk."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = [torch.randn(length, HIDDEN, generator=generator) for length in lengths]
        self.ids = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
        self.states = [PoolingStates() for _ in lengths]
        self.done = [0] * len(lengths)

    def step(self, pooler: ScoringPooler, counts: list[int]) -> list[torch.Tensor | None]:
        lengths = [len(ids) for ids in self.ids]
        padded = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, ids in enumerate(self.ids):
            padded[row, : len(ids)] = ids
        params = PoolingParams(task="token_embed", extra_kwargs={PROMPT_LENGTH_KEY: 2})
        metadata = PoolingMetadata(
            prompt_lens=torch.tensor(lengths),
            prompt_token_ids=None,  # vLLM gives the host's copy only
            prompt_token_ids_cpu=padded,
            pooling_params=[params] * len(lengths),
            pooling_states=self.states,
        )
        chunks = [h[d : d + n] for h, d, n in zip(self.hidden, self.done, counts, strict=True)]
        self.done = [d + n for d, n in zip(self.done, counts, strict=True)]
        metadata.build_pooling_cursor(np.array(counts), torch.tensor(self.done), torch.device("cpu"))
        return pooler(torch.cat(chunks), metadata)

    def check(self, row: int, values: torch.Tensor | None) -> None:
        assert values is not None
        hidden_TH = self.hidden[row][1:-1]
        assert torch.equal(values[:, :-2], hidden_TH)
        logprobs_TV = logits(hidden_TH).log_softmax(-1)
        assert torch.equal(values[:, -2].long(), logprobs_TV.argmax(-1))
        expected = logprobs_TV.gather(1, self.ids[row][2:, None])[:, 0]
        torch.testing.assert_close(values[:, -1], expected)


def test_whole_sequences_in_one_pass() -> None:
    batch = Batch([5, 3, 600])
    outputs = batch.step(ScoringPooler(logits), [5, 3, 600])
    for row, values in enumerate(outputs):
        batch.check(row, values)


def test_a_prompt_in_chunks_is_put_together() -> None:
    batch = Batch([7, 4])
    pooler = ScoringPooler(logits)
    first = batch.step(pooler, [3, 4])
    assert first[0] is None
    batch.check(1, first[1])


def test_the_last_chunk_gives_everything() -> None:
    batch, pooler = Batch([7]), ScoringPooler(logits)
    assert batch.step(pooler, [1]) == [None]
    assert batch.step(pooler, [4]) == [None]
    (values,) = batch.step(pooler, [2])
    batch.check(0, values)
    assert batch.states[0].hidden_states_cache == []


def test_a_rank_without_logits_does_not_fail() -> None:
    nothing: Any = lambda hidden_BH: None  # noqa: E731
    (values,) = Batch([5]).step(ScoringPooler(nothing), [5])
    assert values is not None and values.shape == (3, HIDDEN + 2)


def test_it_offers_one_task() -> None:
    pooler = ScoringPooler(logits)
    assert pooler.get_supported_tasks() == {"token_embed"}
    assert pooler.get_pooling_updates("token_embed").requires_token_ids


@pytest.mark.parametrize("length", [2, 3])
def test_short_sequences(length: int) -> None:
    batch = Batch([length])
    (values,) = batch.step(ScoringPooler(logits), [length])
    assert values is not None and len(values) == length - 2
