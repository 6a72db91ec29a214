"""Metrics of scores: worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss

from citer_ray.labels import Case
from citer_ray.router_metrics import Confusion, expected_calibration_error, router_metrics

P = np.array([0.9, 0.8, 0.3, 0.6, 0.2, 0.5])
LABEL = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
CASE = np.array([0, 0, 2, 1, 1, 2])


def test_metrics_agree_with_scikit_learn() -> None:
    metrics = router_metrics(P, LABEL, CASE)
    assert metrics.positions == 6
    assert metrics.label_mean == 0.5
    assert metrics.log_loss == pytest.approx(log_loss(LABEL, P))
    assert metrics.brier == pytest.approx(brier_score_loss(LABEL, P))
    assert metrics.auc == pytest.approx(7 / 9)


def test_confusion_of_each_case_at_one_half() -> None:
    confusion = router_metrics(P, LABEL, CASE).confusion
    assert confusion == {
        Case.SLM_CORRECT.name.lower(): Confusion(slm_kept=2, slm_handed_off=0, llm_kept=0, llm_handed_off=0),
        Case.LLM_CORRECT.name.lower(): Confusion(slm_kept=0, slm_handed_off=0, llm_kept=1, llm_handed_off=1),
        Case.BOTH_WRONG.name.lower(): Confusion(slm_kept=0, slm_handed_off=1, llm_kept=1, llm_handed_off=0),
    }


def test_calibration_error_weighs_bins_by_count() -> None:
    # Bin of 0.1: mean p 0.1, mean label 0.5 (2 positions); bin of 0.95: mean p 0.95, mean label 1 (2
    # positions).
    error = expected_calibration_error([0.1, 0.1, 0.95, 0.95], [0, 1, 1, 1])
    assert error == pytest.approx(0.5 * 0.4 + 0.5 * 0.05)
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0


def test_logits_keep_the_log_loss_exact_where_p_saturates() -> None:
    logit = np.array([40.0, -200.0])
    p = 1 / (1 + np.exp(-logit))
    metrics = router_metrics(p, [0.0, 0.0], [0, 0], logit_B=logit)
    assert metrics.log_loss == pytest.approx(20.0)
    assert math.isfinite(router_metrics(p, [0.0, 0.0], [0, 0]).log_loss)


def test_one_class_has_no_auc() -> None:
    metrics = router_metrics([0.2, 0.4], [1.0, 0.6], [0, 2])
    assert metrics.auc is None
    assert "auc" not in metrics.flat()
    assert metrics.flat("validation/")["validation/both_wrong/slm_handed_off"] == 1


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="equally many"):
        router_metrics([0.2], [1.0, 0.0], [0, 0])
    with pytest.raises(ValueError, match="equally many"):
        router_metrics([], [], [])
