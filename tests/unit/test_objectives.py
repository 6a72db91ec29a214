"""Objectives: worked examples of the losses and their weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from citer_ray.errors import DataError
from citer_ray.objectives import make_objective

LOGIT = torch.tensor([-2.0, 0.5, 3.0, 0.1])
LABEL = torch.tensor([0.0, 1.0, 1.0, 0.25])


def test_preference_is_the_cross_entropy_with_soft_labels() -> None:
    objective = make_objective("preference", "none", dpo_beta=9.0, label_mean=0.7)
    p = torch.sigmoid(LOGIT)
    expected = -(LABEL * p.log() + (1 - LABEL) * (1 - p).log())
    torch.testing.assert_close(objective.losses(LOGIT, LABEL), expected)


def test_balanced_gives_both_labels_the_same_total_weight() -> None:
    label = torch.tensor([1.0] * 8 + [0.0] * 2)
    objective = make_objective("preference", "balanced", dpo_beta=1.0, label_mean=0.8)
    losses = objective.losses(torch.zeros(10), label)
    assert losses[:8].sum() == pytest.approx(losses[8:].sum().item())
    assert losses.mean() == pytest.approx(math.log(2))


def test_a_fraction_gets_a_weight_between_the_two() -> None:
    objective = make_objective("preference", "balanced", dpo_beta=1.0, label_mean=0.8)
    weight = objective.losses(torch.zeros(1), torch.tensor([0.5])).item() / math.log(2)
    assert weight == pytest.approx((objective.slm_weight + objective.llm_weight) / 2)


def test_dpo_measures_the_logit_against_the_reference() -> None:
    objective = make_objective("dpo", "none", dpo_beta=0.5, label_mean=0.9)
    margin = 0.5 * (LOGIT - math.log(9))
    expected = -(LABEL * F.logsigmoid(margin) + (1 - LABEL) * F.logsigmoid(-margin))
    torch.testing.assert_close(objective.losses(LOGIT, LABEL), expected)


def test_dpo_with_an_even_reference_and_beta_1_is_the_preference() -> None:
    dpo = make_objective("dpo", "none", dpo_beta=1.0, label_mean=0.5)
    preference = make_objective("preference", "none", dpo_beta=1.0, label_mean=0.5)
    torch.testing.assert_close(dpo.losses(LOGIT, LABEL), preference.losses(LOGIT, LABEL))


def test_labels_of_one_kind_have_a_finite_reference_but_no_balance() -> None:
    objective = make_objective("dpo", "none", dpo_beta=1.0, label_mean=1.0)
    assert math.isfinite(objective.reference_logit)
    with pytest.raises(DataError, match="all training labels are 1"):
        make_objective("preference", "balanced", dpo_beta=1.0, label_mean=1.0)
