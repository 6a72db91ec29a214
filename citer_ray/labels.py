"""The label rule: which model should write a token, from greedy tokens and the outcomes of rollouts.

Pure functions of arrays. `labelling.py` computes what they need with engines; the tests hold the rule as a table.
Label 1 prefers the SLM, 0 the LLM; a position without a label is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from citer_ray.config import CollectConfig


class Case(IntEnum):
    """Greedy tokens against the reference token at one position (CITER, section 3)."""

    SLM_CORRECT = 0
    LLM_CORRECT = 1
    BOTH_WRONG = 2


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rollouts of one position, graded.

    Attributes:
        slm: for every sample, whether the rollout that begins with the SLM's token ended in the right answer.
        llm: the same with the LLM's token; None where only the SLM's branch is rolled out.
    """

    slm: Sequence[bool]
    llm: Sequence[bool] | None = None


def classify(slm_ids: npt.ArrayLike, llm_ids: npt.ArrayLike, reference_ids: npt.ArrayLike) -> npt.NDArray[np.int8]:
    """int8 [T]; the `Case` of every position. `llm_ids` counts only where the SLM is wrong."""
    reference_T = np.asarray(reference_ids)
    llm_right_T = np.asarray(llm_ids) == reference_T
    wrong_T = np.where(llm_right_T, Case.LLM_CORRECT, Case.BOTH_WRONG)
    return np.where(np.asarray(slm_ids) == reference_T, Case.SLM_CORRECT, wrong_T).astype(np.int8)


def shortcut_labels(case_T: npt.NDArray[np.int8], settings: CollectConfig) -> npt.NDArray[np.float32]:
    """float32 [T]; labels that need no rollout, NaN elsewhere (CITER, the shortcut)."""
    label_T = np.full(len(case_T), np.nan, np.float32)
    if not settings.shortcut:
        return label_T
    label_T[case_T == Case.SLM_CORRECT] = 1
    if settings.branches != "mismatches":
        label_T[case_T == Case.LLM_CORRECT] = 0
    if settings.both_wrong == "slm":
        label_T[case_T == Case.BOTH_WRONG] = 1
    return label_T


def rollout_positions(
    case_T: npt.NDArray[np.int8],
    slm_ids: npt.ArrayLike,
    llm_ids: npt.ArrayLike,
    settings: CollectConfig,
    chosen_T: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """int64; the positions whose label rollouts decide.

    Args:
        case_T: the cases.
        slm_ids: the SLM's greedy tokens.
        llm_ids: the LLM's, where known.
        settings: the labelling.
        chosen_T: the sampled positions, for `shortcut: false`.
    """
    if settings.shortcut:
        return np.flatnonzero(np.isnan(shortcut_labels(case_T, settings)))
    if settings.branches == "none":
        return np.flatnonzero(chosen_T)
    # Where both models write the same token the two branches are one: see `same_branch_labels`.
    return np.flatnonzero(chosen_T & (np.asarray(slm_ids) != np.asarray(llm_ids)))


def same_branch_labels(
    slm_ids: npt.ArrayLike, llm_ids: npt.ArrayLike, settings: CollectConfig, chosen_T: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """bool [T]; sampled positions at which both models write the same token: a tie, which goes to the SLM."""
    if settings.shortcut or settings.branches == "none":
        return np.zeros(len(chosen_T), np.bool_)
    same_T: npt.NDArray[np.bool_] = np.equal(np.asarray(slm_ids), np.asarray(llm_ids))
    return chosen_T & same_T


def outcome_label(outcomes: Outcomes, llm_price: float) -> float:
    """The label of one rolled-out position.

    One branch: the fraction of rollouts after the SLM's token that end right (CITER, the long-term reward). Two
    branches: 0 where only the LLM-first rollout is right, else 1, averaged over samples; a gain in accuracy of at
    most `llm_price` is a tie, and ties go to the SLM.
    """
    slm = np.asarray(outcomes.slm, np.float64)
    if outcomes.llm is None:
        return float(slm.mean())
    llm = np.asarray(outcomes.llm, np.float64)
    if llm.mean() - slm.mean() <= llm_price:
        return 1.0
    return float(1.0 - (llm * (1.0 - slm)).mean())
