"""Scorers: ranges, meanings, and the names by which an engine finds them."""

from __future__ import annotations

import math

import pytest
import torch

from citer_ray.engines.scorers import (
    RandomScorer,
    RouterScorer,
    StepState,
    certainty,
    find_scorer,
    margin,
    max_probability,
)

LOGITS = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)], [0.0, 0.0, 0.0]])


def state(positions: list[int], keys: list[int], logits: torch.Tensor = LOGITS) -> StepState:
    return StepState(torch.zeros(len(positions), 4), logits, positions, keys)


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (max_probability, [0.7, 1 / 3]),
        (margin, [0.5, 0.0]),
        (certainty, [math.exp(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)), 1 / 3]),
    ],
)
def test_confidence_scores(scorer: object, expected: list[float]) -> None:
    assert callable(scorer)
    torch.testing.assert_close(scorer(state([0, 0], [0, 0])), torch.tensor(expected))


def test_certainty_takes_ids_that_are_never_written() -> None:
    masked = torch.cat([LOGITS, torch.full((2, 3), -math.inf)], 1)
    torch.testing.assert_close(certainty(state([0, 0], [0, 0], masked)), certainty(state([0, 0], [0, 0])))


def test_random_scores_are_uniform_and_depend_on_seed_key_and_position() -> None:
    positions, keys = [i % 100 for i in range(5000)], [i // 100 for i in range(5000)]
    scores = RandomScorer(1)(state(positions, keys))
    assert scores.min() >= 0 and scores.max() < 1
    # Kolmogorov-Smirnov distance at 5000 draws: 1.63 / sqrt(n) is the 1 % point.
    distance = (scores.sort().values - torch.arange(5000) / 5000).abs().max()
    assert distance < 1.63 / 5000**0.5
    again = RandomScorer(1)(state(positions[::-1], keys[::-1])).flip(0)
    assert torch.equal(scores, again)
    assert not torch.equal(scores, RandomScorer(2)(state(positions, keys)))
    assert len(set(scores.tolist())) > 4900


def test_names() -> None:
    class Constant:
        def p_slm(self, hidden_BH: torch.Tensor) -> torch.Tensor:
            return torch.full((len(hidden_BH),), 0.25)

    own = {"router": RouterScorer(Constant())}
    assert find_scorer("router", own)(state([0], [0]))[0] == 0.25
    assert find_scorer("margin", own) is margin
    assert isinstance(find_scorer("random:7", own), RandomScorer)
    for bad in ("random:", "random:x", "other"):
        with pytest.raises(ValueError, match="router, certainty, margin"):
            find_scorer(bad, own)
