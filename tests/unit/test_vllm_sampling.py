"""Seeded sampling inside vLLM draws what the shared sampler draws, row by row, wherever the row sits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from citer_ray.engine import Sampling
from citer_ray.engines.sampling import sample
from citer_ray.engines.vllm_sampling import SeededSamplingProcessor
from citer_ray.engines.vllm_settings import CONFIG_KEY, SAMPLING_KEY, ModelSettings

SHARED, VOCAB = 30, 32
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=12, seed=4)


def make_processor() -> SeededSamplingProcessor:
    hf_config = SimpleNamespace(**{CONFIG_KEY: ModelSettings(SHARED).to_config()})
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
    return SeededSamplingProcessor(config, torch.device("cpu"), False)


def request(row: int, written: list[int], position: int | None) -> Any:
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "seed": 4, "position": position}
    extra = None if position is None else {SAMPLING_KEY: values}
    return row, SamplingParams(extra_args=extra), [1], written


def logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def expected(logits_V: torch.Tensor, position: int) -> int:
    return sample(logits_V[:SHARED].double().numpy(), SAMPLING, position)


def test_the_draw_is_that_of_the_shared_sampler_at_the_absolute_position() -> None:
    processor, written = make_processor(), [5, 6]
    processor.update_state(BatchUpdate(2, [], [request(0, [], None), request(1, written, 100)], []))
    before = logits(2)
    after = processor.apply(before.clone())
    assert torch.equal(after[0], before[0])
    assert after[1].argmax().item() == expected(before[1], 102)
    assert (after[1] == -math.inf).sum().item() == VOCAB - 1
    written.append(7)
    assert processor.apply(before.clone())[1].argmax().item() == expected(before[1], 103)


def test_a_moved_row_keeps_its_seed_and_position() -> None:
    processor = make_processor()
    processor.update_state(BatchUpdate(2, [], [request(0, [], None), request(1, [9], 50)], []))
    processor.update_state(BatchUpdate(1, [0], [], [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    before = logits(1)
    assert processor.apply(before.clone())[0].argmax().item() == expected(before[0], 51)


def test_a_handed_off_row_stays_as_it_is() -> None:
    processor = make_processor()
    processor.update_state(BatchUpdate(1, [], [request(0, [], 10)], []))
    for handoff in (3, SHARED + 1):
        row = torch.full((1, VOCAB), -math.inf)
        row[0, handoff] = 0.0
        assert processor.apply(row.clone())[0].argmax().item() == handoff
