"""The handoff processor: thresholds follow their requests through every change of the batch, and masks hold."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from citer_ray.engines.scorers import random_scores
from citer_ray.engines.vllm_handoff import HandoffLogitsProcessor
from citer_ray.engines.vllm_score_column import encode_scores
from citer_ray.engines.vllm_settings import CONFIG_KEY, RANDOM_KEY, THRESHOLD_KEY, ModelSettings
from citer_ray.policy import hands_off

VOCAB, SHARED, HANDOFF, MASKED = 12, 10, 7, 3


def make_processor(**changes: Any) -> HandoffLogitsProcessor:
    values: dict[str, Any] = {"shared_vocab_size": SHARED, "masked_ids": (MASKED, HANDOFF), "handoff_token_id": HANDOFF}
    settings = ModelSettings(**(values | changes))
    hf_config = SimpleNamespace(**{CONFIG_KEY: settings.to_config()})
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
    return HandoffLogitsProcessor(config, torch.device("cpu"), False)


def params(threshold: object = None) -> SamplingParams:
    return SamplingParams(extra_args=None if threshold is None else {THRESHOLD_KEY: threshold})


def update(
    size: int,
    added: list[tuple[int, float | None]] | None = None,
    removed: list[int] | None = None,
    moved: list[tuple[int, int, MoveDirectionality]] | None = None,
) -> BatchUpdate:
    requests = [(row, params(threshold), [1], []) for row, threshold in added or []]
    return BatchUpdate(batch_size=size, removed=removed or [], added=requests, moved=moved or [])


def logits(scores: list[float]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(len(scores), VOCAB, generator=generator)
    logits_BV[:, HANDOFF] = encode_scores(torch.tensor(scores))
    return logits_BV


def decisions(processor: HandoffLogitsProcessor, scores: list[float]) -> list[bool]:
    """Whether each row is handed off; also checks what the other columns must be."""
    before = logits(scores)
    after = processor.apply(before.clone())
    handed = (after[:, HANDOFF] == 0).tolist()
    free = [token for token in range(SHARED) if token not in (MASKED, HANDOFF)]
    for row, off in enumerate(handed):
        others = torch.cat([after[row, :HANDOFF], after[row, HANDOFF + 1 :]])
        if off:
            assert torch.all(others == -math.inf)
        else:
            assert torch.equal(after[row, free], before[row, free])
            assert torch.all(after[row, [MASKED, HANDOFF, SHARED, SHARED + 1]] == -math.inf)
    return handed


def test_every_request_has_its_own_threshold() -> None:
    processor = make_processor()
    processor.update_state(update(4, added=[(0, 0.5), (1, None), (2, 0.0), (3, 1.5)]))
    assert decisions(processor, [0.4, 0.0, 0.0, 1.0]) == [True, False, False, True]
    assert decisions(processor, [0.6, 0.0, 0.0, 1.0]) == [False, False, False, True]


def test_the_comparison_is_the_policys() -> None:
    for threshold in (0.9, 0.1, 0.5, 1.0, 1.0000001):
        score = float(np.float32(threshold))
        for value in (score, float(np.nextafter(np.float32(score), np.float32(0))), min(score, 1.0)):
            processor = make_processor()
            processor.update_state(update(1, added=[(0, threshold)]))
            assert decisions(processor, [value]) == [hands_off(value, threshold)]


def test_thresholds_follow_moves_swaps_removals_and_replacements() -> None:
    processor = make_processor()
    processor.update_state(update(4, added=[(0, 0.9), (1, None), (2, 0.3), (3, 0.9)]))
    assert decisions(processor, [0.5] * 4) == [True, False, False, True]
    processor.update_state(update(4, moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert decisions(processor, [0.5] * 4) == [False, True, False, True]
    processor.update_state(update(3, removed=[0], moved=[(3, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert decisions(processor, [0.5] * 3) == [True, True, False]
    processor.update_state(update(3, added=[(1, None), (2, 0.7)]))
    assert decisions(processor, [0.5] * 3) == [True, False, True]
    processor.update_state(None)
    assert decisions(processor, [0.8] * 3) == [True, False, False]
    processor.update_state(update(1, removed=[1, 2]))
    assert decisions(processor, [0.5]) == [True]


def test_a_random_life_of_the_batch_matches_a_table() -> None:
    generator = np.random.default_rng(0)
    processor, table = make_processor(), list[float | None]()
    for _ in range(300):
        added, removed, moved = [], [], []
        if table and generator.random() < 0.4:
            last, row = len(table) - 1, int(generator.integers(len(table)))
            removed = [row]
            if row != last:
                moved = [(last, row, MoveDirectionality.UNIDIRECTIONAL)]
                table[row] = table[last]
            table.pop()
        elif len(table) < 8:
            threshold = None if generator.random() < 0.3 else round(float(generator.random()), 2)
            added = [(len(table), threshold)]
            table.append(threshold)
        processor.update_state(update(len(table), added, removed, moved))
        scores = generator.random(len(table)).astype(np.float32).tolist()
        if table:
            expected = [t is not None and s < t for s, t in zip(scores, table, strict=True)]
            assert decisions(processor, scores) == expected


def test_random_rows_draw_their_scores_and_leave_the_columns_to_others() -> None:
    processor, written = make_processor(), [5, 6]
    draw = SamplingParams(extra_args={THRESHOLD_KEY: 0.5, RANDOM_KEY: {"seed": 3, "key": 9, "position": 40}})
    both = BatchUpdate(2, removed=[], added=[(0, draw, [1], written), (1, params(0.5), [1], [])], moved=[])
    processor.update_state(both)
    seen = []
    for _ in range(20):
        (score,) = random_scores(3, [9], [40 + len(written)]).tolist()
        handed = decisions(processor, [0.5, 0.4])
        assert handed == [score < 0.5, True]
        seen.append(handed[0])
        written.append(7)  # as vLLM does
    assert len(set(seen)) == 2
    processor.update_state(update(1, removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert decisions(processor, [0.6]) == [False]


def test_without_a_handoff_token_only_the_masks_apply() -> None:
    processor = make_processor(handoff_token_id=None)
    processor.update_state(update(1, added=[(0, None)]))
    after = processor.apply(logits([0.5]))
    assert torch.all(after[0, [MASKED, HANDOFF, SHARED, SHARED + 1]] == -math.inf)


@pytest.mark.parametrize("threshold", [-0.1, math.nan, math.inf, "0.5", True, [0.5]])
def test_bad_thresholds_are_refused_at_admission(threshold: object) -> None:
    with pytest.raises(VLLMValidationError, match=r"citer_threshold must be a number in \[0, inf\)"):
        HandoffLogitsProcessor.validate_params(params(threshold))


@pytest.mark.parametrize("threshold", [None, 0, 0.5, 1.5])
def test_good_thresholds_pass(threshold: object) -> None:
    HandoffLogitsProcessor.validate_params(params(threshold))


def test_a_whitelist_without_the_handoff_token_is_refused() -> None:
    both = SamplingParams(extra_args={THRESHOLD_KEY: 0.5}, allowed_token_ids=[1, 2])
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        HandoffLogitsProcessor.validate_params(both)


def test_a_minimum_of_tokens_would_forbid_the_handoff() -> None:
    both = SamplingParams(extra_args={THRESHOLD_KEY: 0.5}, min_tokens=3)
    with pytest.raises(VLLMValidationError, match="min_tokens"):
        HandoffLogitsProcessor.validate_params(both)
