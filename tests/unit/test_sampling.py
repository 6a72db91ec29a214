"""Sampling: the right distribution, and a function of (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest

from citer_ray.engine import Sampling
from citer_ray.engines.sampling import gumbel_noise, keep_candidates, sample

PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = np.log(PROBABILITIES)


def draws(sampling: Sampling, count: int = 4000) -> np.ndarray:
    return np.array([sample(LOGITS, sampling, position) for position in range(count)])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    counts = np.bincount(draws(Sampling(temperature=temperature, seed=3)), minlength=4)
    expected = PROBABILITIES ** (1 / temperature)
    expected = 4000 * expected / expected.sum()
    # Chi-squared with 3 degrees of freedom: 16.3 is the 0.1 % point.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_top_k_and_top_p_cut() -> None:
    assert set(draws(Sampling(temperature=1.0, top_k=2))) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.75))) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.81))) == {0, 1, 2}
    assert np.isfinite(keep_candidates(LOGITS, 0, 1.0)).all()
    assert np.isfinite(keep_candidates(LOGITS, 99, 1e-9)).sum() == 1


def test_seed_and_position_decide() -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    assert [sample(LOGITS, sampling, p) for p in (5, 6, 7)] == [sample(LOGITS, sampling, p) for p in (5, 6, 7)]
    assert not np.array_equal(gumbel_noise(1, 2, 8), gumbel_noise(1, 3, 8))
    assert not np.array_equal(gumbel_noise(1, 2, 8), gumbel_noise(2, 2, 8))
    assert gumbel_noise(-1, 0, 4).shape == (4,)
