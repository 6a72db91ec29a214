"""Thresholds for LLM shares: the quantile rule and the measured table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from citer_ray.calibration import CalibrationPoint, CalibrationTable, threshold_for_share
from citer_ray.policy import LLM_ONLY_THRESHOLD, hands_off

SHARES = st.floats(0, 1)


def handed_off(scores: np.ndarray, threshold: float) -> float:
    return float(np.mean([hands_off(score, threshold) for score in scores]))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_the_quantile_gives_the_share(share: float) -> None:
    scores = np.random.default_rng(0).random(1000)
    assert handed_off(scores, threshold_for_share(scores, share)) == pytest.approx(share, abs=5e-4)


def test_the_ends_hold_for_saturated_scores() -> None:
    scores = np.array([0.0, 1.0, 1.0])
    assert handed_off(scores, threshold_for_share(scores, 0)) == 0
    assert handed_off(scores, threshold_for_share(scores, 1)) == 1


@pytest.mark.parametrize(("share", "expected"), [(0.2, 0.1), (0.4, 0.1), (0.6, 0.9), (0.8, 0.9)])
def test_ties_go_to_the_nearer_side(share: float, expected: float) -> None:
    scores = np.concatenate([np.full(10, 0.1), np.full(80, 0.5), np.full(10, 0.9)])
    assert handed_off(scores, threshold_for_share(scores, share)) == pytest.approx(expected)


@pytest.mark.parametrize(("scores", "share"), [([], 0.5), ([0.5, float("nan")], 0.5), ([0.5], -0.1), ([0.5], 1.1)])
def test_bad_input_is_refused(scores: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"share|scores"):
        threshold_for_share(scores, share)


TABLE = CalibrationTable.fit([(0.3, 0.99), (0.02, 0.4), (0.1, 0.9)])


def test_measured_points_are_met() -> None:
    for point in TABLE.points:
        assert TABLE.threshold_for(point.llm_share) == pytest.approx(point.threshold)
        assert TABLE.share_for(point.threshold) == pytest.approx(point.llm_share)


def test_the_ends_need_no_measuring() -> None:
    for table in (TABLE, CalibrationTable()):
        assert (table.threshold_for(0), table.share_for(0)) == (0, 0)
        assert (table.threshold_for(1), table.share_for(LLM_ONLY_THRESHOLD)) == (LLM_ONLY_THRESHOLD, 1)


@settings(deadline=None, max_examples=50)
@given(SHARES, SHARES)
def test_both_directions_are_monotone(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert TABLE.threshold_for(low) <= TABLE.threshold_for(high)
    assert TABLE.share_for(low) <= TABLE.share_for(high)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.02, 0.3))
def test_the_directions_invert_each_other(share: float) -> None:
    assert TABLE.share_for(TABLE.threshold_for(share)) == pytest.approx(share, abs=1e-6)


def test_noise_that_falls_is_evened_out() -> None:
    table = CalibrationTable.fit([(0.1, 0.5), (0.3, 0.8), (0.2, 0.9), (0.4, 0.95)])
    assert [point.llm_share for point in table.points] == pytest.approx([0.1, 0.25, 0.25, 0.4])
    assert table.threshold_for(0.25) == pytest.approx(0.8)


def test_equal_thresholds_are_averaged() -> None:
    table = CalibrationTable.fit([(0.1, 0.5), (0.2, 0.5)])
    assert [(point.llm_share, point.threshold) for point in table.points] == [(pytest.approx(0.15), 0.5)]


def test_it_survives_json() -> None:
    assert CalibrationTable.model_validate_json(TABLE.model_dump_json()) == TABLE


def test_points_out_of_order_are_refused() -> None:
    points = (CalibrationPoint(llm_share=0.2, threshold=0.5), CalibrationPoint(llm_share=0.1, threshold=0.6))
    with pytest.raises(ValidationError, match="ascend"):
        CalibrationTable(points=points)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="llm_share"):
        TABLE.threshold_for(bad)
