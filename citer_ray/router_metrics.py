"""How good a router's `p_slm` is on validation labels: ranking, calibration, and confusion for each case.

Fed by scores of the validation part after fitting; `router.json`, the tracker and the report carry the
result. A soft label (a fraction of rollouts) counts as "prefer the SLM" from 0.5 on where a metric needs
classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from sklearn.metrics import roc_auc_score

from citer_ray.labels import Case

CALIBRATION_BINS = 15
CONFUSION_THRESHOLD = 0.5


class Confusion(BaseModel):
    """Positions by label and by what the router would do at the threshold 0.5."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slm_kept: int = Field(description="Label SLM, and the SLM would write.")
    slm_handed_off: int = Field(description="Label SLM, but the LLM would write: cost without need.")
    llm_kept: int = Field(description="Label LLM, but the SLM would write: a mistake let through.")
    llm_handed_off: int = Field(description="Label LLM, and the LLM would write.")


class ReliabilityBin(BaseModel):
    """Positions whose p_slm lies in one of `CALIBRATION_BINS` equal intervals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: int = Field(ge=1, description="How many.")
    p_slm: float = Field(description="Their mean p_slm.")
    label: float = Field(description="Their mean label; a calibrated router has the same value.")


class RouterMetrics(BaseModel):
    """Metrics of one set of positions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: int = Field(description="Labelled positions.")
    label_mean: float = Field(description="Mean label: the share that prefers the SLM.")
    log_loss: float = Field(description="Mean cross-entropy of p_slm against the labels, in nats.")
    brier: float = Field(description="Mean squared difference of p_slm and label.")
    calibration_error: float = Field(description=f"Expected calibration error, {CALIBRATION_BINS} equal-width bins.")
    auc: float | None = Field(description="Area under the ROC curve; null where all labels are of one class.")
    confusion: dict[str, Confusion] = Field(description="Confusion of each case that occurs, by its lower-case name.")
    reliability: tuple[ReliabilityBin, ...] = Field((), description="Calibration by intervals of p_slm, ascending.")

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Numbers by name, for a tracker; what is not defined is left out."""
        values = self.model_dump(exclude={"confusion", "reliability"})
        numbers = {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}
        for case, confusion in self.confusion.items():
            numbers |= {f"{prefix}{case}/{name}": float(count) for name, count in confusion.model_dump().items()}
        return numbers


def router_metrics(
    p_slm_B: npt.ArrayLike,
    label_B: npt.ArrayLike,
    case_B: npt.ArrayLike,
    *,
    logit_B: npt.ArrayLike | None = None,
) -> RouterMetrics:
    """Compute all metrics.

    Args:
        p_slm_B: scores in [0, 1].
        label_B: labels in [0, 1], without NaN.
        case_B: a `Case` for each position.
        logit_B: the scores' logits; with them the log loss is finite and exact even where `p_slm` saturates.

    Raises:
        ValueError: no positions, or lengths that differ.
    """
    p_slm, label = np.asarray(p_slm_B, np.float64), np.asarray(label_B, np.float64)
    case = np.asarray(case_B)
    if not 0 < len(p_slm) == len(label) == len(case):
        raise ValueError(f"need equally many scores, labels and cases: {len(p_slm)}, {len(label)}, {len(case)}")
    prefers_slm = label >= CONFUSION_THRESHOLD
    one_class = prefers_slm.all() or not prefers_slm.any()
    return RouterMetrics(
        positions=len(label),
        label_mean=float(label.mean()),
        log_loss=_log_loss(p_slm, label, None if logit_B is None else np.asarray(logit_B, np.float64)),
        brier=float(np.mean((p_slm - label) ** 2)),
        calibration_error=expected_calibration_error(p_slm, label),
        auc=None if one_class else float(roc_auc_score(prefers_slm, p_slm if logit_B is None else logit_B)),
        confusion={
            member.name.lower(): _confusion(p_slm[case == member], prefers_slm[case == member])
            for member in Case
            if (case == member).any()
        },
        reliability=reliability_bins(p_slm, label),
    )


def reliability_bins(
    p_B: npt.NDArray[np.float64], label_B: npt.NDArray[np.float64], bins: int = CALIBRATION_BINS
) -> tuple[ReliabilityBin, ...]:
    """Mean p and mean label of every interval of p that holds a position."""
    index_B = np.minimum((p_B * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(index_B):
        members = index_B == number
        found.append(
            ReliabilityBin(
                positions=int(members.sum()), p_slm=float(p_B[members].mean()), label=float(label_B[members].mean())
            )
        )
    return tuple(found)


def expected_calibration_error(p_B: npt.ArrayLike, label_B: npt.ArrayLike, bins: int = CALIBRATION_BINS) -> float:
    """Mean of |mean label - mean p| over equal-width bins of p, weighted by count (Guo et al., 2017)."""
    p, label = np.asarray(p_B, np.float64), np.asarray(label_B, np.float64)
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=label - p, minlength=bins)
    return float(np.abs(gap).sum() / len(p))


def _log_loss(
    p_slm: npt.NDArray[np.float64], label: npt.NDArray[np.float64], logit: npt.NDArray[np.float64] | None
) -> float:
    """Mean cross-entropy; without logits, p is cut to what float32 can tell from 0 and 1."""
    if logit is None:
        cut = np.clip(p_slm, 1e-7, 1 - 1e-7)
        logit = np.log(cut) - np.log1p(-cut)
    return float(np.mean(label * np.logaddexp(0, -logit) + (1 - label) * np.logaddexp(0, logit)))


def _confusion(p_slm: npt.NDArray[np.float64], prefers_slm: npt.NDArray[np.bool_]) -> Confusion:
    kept = p_slm >= CONFUSION_THRESHOLD
    return Confusion(
        slm_kept=int(np.sum(prefers_slm & kept)),
        slm_handed_off=int(np.sum(prefers_slm & ~kept)),
        llm_kept=int(np.sum(~prefers_slm & kept)),
        llm_handed_off=int(np.sum(~prefers_slm & ~kept)),
    )
