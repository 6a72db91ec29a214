"""Labels of other methods, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from citer_ray.baseline_labels import marginal_labels, query_label, query_row
from citer_ray.label_rows import LabelRow
from citer_ray.objectives import make_objective


@pytest.mark.parametrize(
    ("slm_correct", "llm_correct", "label"), [(True, True, 1), (True, False, 1), (False, False, 1), (False, True, 0)]
)
def test_ties_go_to_the_slm(slm_correct: bool, llm_correct: bool, label: float) -> None:
    assert query_label(slm_correct=slm_correct, llm_correct=llm_correct) == label


def test_a_query_has_one_label_at_the_end_of_its_prompt() -> None:
    row = LabelRow("a", [1], [2, 3, 4], [2, 3, 4], [None] * 3, [0] * 3, [1.0, 0.5, 0.0], np.zeros((3, 2)), 1, 7, 9, 0)
    assert query_row(row, 0.0).label == [0.0, None, None]
    assert query_row(row, 0.0).rollouts == 0


def test_marginal_labels_are_shares_of_probability() -> None:
    assert marginal_labels(np.log([0.3, 0.2]), np.log([0.1, 0.6])) == pytest.approx([0.75, 0.25])
    assert marginal_labels(np.array([-900.0, -0.1]), np.array([-0.1, -900.0])) == pytest.approx([0.0, 1.0])


def test_the_marginal_objective_is_co_llms_likelihood_up_to_a_constant() -> None:
    """-log[(1 - d) P_slm + d P_llm], its value less log(P_slm + P_llm), and its gradient."""
    slm, llm = torch.tensor([0.3, 0.2, 1e-6]), torch.tensor([0.1, 0.6, 0.9])
    label_B = torch.tensor(marginal_labels(slm.log().numpy(), llm.log().numpy()))
    objective = make_objective("marginal", "none", dpo_beta=1.0, label_mean=0.5)
    logit_B = torch.tensor([-1.5, 0.3, 2.0], requires_grad=True)
    losses_B = objective.losses(logit_B, label_B)
    p_slm = torch.sigmoid(logit_B)
    expected_B = -(p_slm * slm + (1 - p_slm) * llm).log()
    constant_B = (slm + llm).log()
    torch.testing.assert_close(losses_B, expected_B + constant_B, atol=1e-5, rtol=1e-5)
    (ours,) = torch.autograd.grad(losses_B.sum(), logit_B, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected_B.sum(), logit_B)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_marginal_objective_is_the_cross_entropy_for_hard_labels() -> None:
    logit_B = torch.tensor([-30.0, -2.0, 0.5, 30.0], requires_grad=True)
    label_B = torch.tensor([0.0, 1.0, 0.0, 1.0])
    marginal = make_objective("marginal", "none", dpo_beta=1.0, label_mean=0.5).losses(logit_B, label_B)
    preference = make_objective("preference", "none", dpo_beta=1.0, label_mean=0.5).losses(logit_B, label_B)
    torch.testing.assert_close(marginal, preference)
    (gradient,) = torch.autograd.grad(marginal.sum(), logit_B)
    assert torch.isfinite(gradient).all() and math.isfinite(float(marginal.detach().sum()))
