"""What fitting minimises: the preference's cross-entropy, its DPO-style form, Co-LLM's marginal likelihood.

`training.py` sums these losses over a batch; labels are 1 for "prefer the SLM", 0 for "prefer the LLM", or a
fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from citer_ray.errors import DataError

# A label mean of exactly 0 or 1 would put the reference policy at an infinite logit.
_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss for each position: -w(y) [y log sigma(m) + (1 - y) log sigma(-m)].

    `preference`: the margin m is the router's logit. Bradley-Terry with p_slm as the probability that the
        SLM's action
    is preferred (CITER, arXiv 2502.01976, section 3).

    `dpo`: m = beta (logit - reference logit). The router is a policy pi over the two actions, and m is the
        difference
    of its implicit rewards, beta log(pi / reference), as in DPO (Rafailov et al., arXiv 2305.18290, equation
    7). The reference policy takes the SLM as often as the labels prefer it. The order of the positions is
    that of the preference; p_slm is tilted by the reference, so it is not a calibrated preference.

    `marginal`: -log[p y + (1 - p) (1 - y)] with p = sigma(m). With y = P_slm(x) / (P_slm(x) + P_llm(x)) for a reference
    token x this is Co-LLM's negative log marginal likelihood over who writes x (Shen et al., arXiv 2403.03870,
    equation 3), less a term that no weight changes. It equals the cross-entropy for labels of 0 and 1.

    Attributes:
        beta: 1 for `preference`.
        reference_logit: 0 for `preference`.
        slm_weight: weight of a label 1.
        llm_weight: weight of a label 0; a fraction gets the mean of the two, weighted by it.
    """

    beta: float
    reference_logit: float
    slm_weight: float
    llm_weight: float
    marginal: bool = False

    def losses(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Weighted loss of each position, float32 [B]."""
        margin_B = self.beta * (logit_B - self.reference_logit)
        if self.marginal:
            joint_2B = torch.stack(
                [F.logsigmoid(margin_B) + label_B.log(), F.logsigmoid(-margin_B) + torch.log1p(-label_B)]
            )
            loss_B = -torch.logsumexp(joint_2B, 0)
        else:
            loss_B = F.binary_cross_entropy_with_logits(margin_B, label_B, reduction="none")
        return loss_B * torch.lerp(logit_B.new_tensor(self.llm_weight), logit_B.new_tensor(self.slm_weight), label_B)


def make_objective(
    kind: Literal["preference", "dpo", "marginal"],
    class_weights: Literal["none", "balanced"],
    *,
    dpo_beta: float,
    label_mean: float,
) -> Objective:
    """Build the objective for training labels of a known mean.

    Args:
        kind: which margin.
        class_weights: `balanced` gives both labels the same total weight, and a mean weight of 1.
        dpo_beta: inverse temperature of `dpo`.
        label_mean: mean label of the training positions.

    Raises:
        DataError: `balanced` with labels of one kind only.
    """
    slm_weight = llm_weight = 1.0
    if class_weights == "balanced":
        if not 0 < label_mean < 1:
            raise DataError(
                f"all training labels are {label_mean:g}, so fit.class_weights: balanced is not defined; "
                "set it to none, or label more examples"
            )
        slm_weight, llm_weight = 0.5 / label_mean, 0.5 / (1 - label_mean)
    if kind != "dpo":
        return Objective(1.0, 0.0, slm_weight, llm_weight, marginal=kind == "marginal")
    share = min(max(label_mean, _SMALLEST_SHARE), 1 - _SMALLEST_SHARE)
    return Objective(dpo_beta, math.log(share / (1 - share)), slm_weight, llm_weight)
