"""The label rule as tables."""

from __future__ import annotations

import numpy as np
import pytest

from citer_ray.config import CollectConfig
from citer_ray.labels import (
    Case,
    Outcomes,
    classify,
    outcome_label,
    rollout_positions,
    same_branch_labels,
    shortcut_labels,
)

S, L, B = Case.SLM_CORRECT, Case.LLM_CORRECT, Case.BOTH_WRONG
NAN = float("nan")
ALL = np.ones(4, bool)


def test_cases() -> None:
    reference, slm, llm = [5, 5, 5, 5], [5, 6, 6, 5], [5, 5, 7, 9]
    assert classify(slm, llm, reference).tolist() == [S, L, B, S]
    assert classify(slm, [-1] * 4, reference).tolist() == [S, B, B, S]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 0, NAN, 1]),
        ({"both_wrong": "slm"}, [1, 0, 1, 1]),
        ({"branches": "both_wrong"}, [1, 0, NAN, 1]),
        ({"branches": "mismatches"}, [1, NAN, NAN, 1]),
        ({"shortcut": False}, [NAN] * 4),
    ],
)
def test_labels_without_rollouts(settings: dict[str, object], expected: list[float]) -> None:
    labels = shortcut_labels(np.array([S, L, B, S], np.int8), CollectConfig(**settings))  # type: ignore[arg-type]
    np.testing.assert_array_equal(labels, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("settings", "chosen", "expected"),
    [
        ({}, [True] * 4, [2]),
        ({"branches": "mismatches"}, [True] * 4, [1, 2]),
        ({"both_wrong": "slm"}, [True] * 4, []),
        ({"shortcut": False}, [True, False, True, False], [0, 2]),
        # Where both write the same token (position 3) there is nothing to compare.
        ({"shortcut": False, "branches": "both_wrong"}, [True] * 4, [0, 1, 2]),
    ],
)
def test_positions_that_rollouts_decide(settings: dict[str, object], chosen: list[bool], expected: list[int]) -> None:
    case, slm, llm = np.array([S, L, B, S], np.int8), [5, 6, 6, 5], [9, 5, 7, 5]
    config = CollectConfig(**settings)  # type: ignore[arg-type]
    assert rollout_positions(case, slm, llm, config, np.array(chosen)).tolist() == expected
    ties = same_branch_labels(slm, llm, config, np.array(chosen)).tolist()
    assert ties == [False, False, False, not config.shortcut and config.branches != "none"]


@pytest.mark.parametrize(
    ("slm", "llm", "price", "expected"),
    [
        ([True], None, 0.0, 1.0),
        ([False], None, 0.0, 0.0),
        ([True, False, False, True], None, 0.0, 0.5),
        ([True], [True], 0.0, 1.0),  # ties go to the SLM
        ([False], [False], 0.0, 1.0),
        ([True], [False], 0.0, 1.0),
        ([False], [True], 0.0, 0.0),
        ([True, False], [True, True], 0.0, 0.5),
        ([True, False], [True, True], 0.5, 1.0),  # a gain that is not above the price is a tie
        ([False, False], [True, True], 0.5, 0.0),
    ],
)
def test_outcomes(slm: list[bool], llm: list[bool] | None, price: float, expected: float) -> None:
    assert outcome_label(Outcomes(slm, llm), price) == expected
