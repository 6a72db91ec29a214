"""Thresholds for LLM shares: a quantile rule on scores, and a table of measured points.

The quantile rule gives the threshold at which a share of the scores falls below it; it aims. The table says
what share a threshold gave when a validation split was decoded; `router.json` carries it, and evaluation and
serving turn a wanted LLM share into a threshold with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sklearn.isotonic import IsotonicRegression

from citer_ray.policy import LLM_ONLY_THRESHOLD

# Thresholds are interpolated on the logit scale, because scores crowd near 1; beyond these ends it is cut.
_LOWEST, _HIGHEST = 1e-6, 1 - 1e-7


def threshold_for_share(scores: npt.ArrayLike, share: float) -> float:
    """The threshold below which about `share` of the scores lie (RouteLLM calibrates in the same way).

    Equal scores cannot be parted: of the two thresholds around a block of ties, the one nearer to `share` is
        taken.

    Args:
        scores: [N], `p_slm` or another score; the LLM writes where the score is below the threshold.
        share: wanted LLM share in [0, 1]; 0 gives 0, and 1 gives `LLM_ONLY_THRESHOLD`.

    Raises:
        ValueError: no scores, NaN among them, or a share outside [0, 1].
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64).ravel())
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    if ordered.size == 0 or np.isnan(ordered).any():
        raise ValueError("scores must hold at least one number and no NaN")
    if share == 0:
        return 0.0
    if share == 1:
        return LLM_ONLY_THRESHOLD
    value = ordered[min(round(share * ordered.size), ordered.size - 1)]
    above = float(np.nextafter(value, np.inf))
    candidates = [float(value), above]
    shares = [np.searchsorted(ordered, candidate, side="left") / ordered.size for candidate in candidates]
    return min(zip(candidates, shares, strict=True), key=lambda pair: abs(pair[1] - share))[0]


class CalibrationPoint(BaseModel):
    """One measured point: the LLM share that decoding with a threshold gave."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    llm_share: float = Field(ge=0, le=1, description="LLM tokens / all tokens on the validation split.")
    threshold: float = Field(ge=0, description="Threshold that gave it.")


class CalibrationTable(BaseModel):
    """Measured points, made monotone, and the interpolation between them.

    The ends are known without measuring: threshold 0 gives share 0, and `LLM_ONLY_THRESHOLD` gives 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    points: tuple[CalibrationPoint, ...] = Field((), description="By ascending threshold and share.")

    @field_validator("points")
    @classmethod
    def _monotone(cls, points: tuple[CalibrationPoint, ...]) -> tuple[CalibrationPoint, ...]:
        if any(a.threshold >= b.threshold or a.llm_share > b.llm_share for a, b in pairwise(points)):
            raise ValueError("points must ascend in threshold and share; CalibrationTable.fit makes them so")
        return points

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, float]]) -> CalibrationTable:
        """Build a table from measured (llm_share, threshold) pairs in any order.

        A share that falls while the threshold rises is noise of a small split: isotonic regression evens it
            out.
        """
        pairs = sorted((threshold, share) for share, threshold in measured)
        if not pairs:
            return cls(points=())
        thresholds = np.unique([threshold for threshold, _ in pairs])
        shares = IsotonicRegression(y_min=0, y_max=1).fit(*zip(*pairs, strict=True)).predict(thresholds)
        return cls(
            points=tuple(
                CalibrationPoint(llm_share=float(share), threshold=float(threshold))
                for threshold, share in zip(thresholds, shares, strict=True)
            )
        )

    def threshold_for(self, llm_share: float) -> float:
        """The threshold for a wanted LLM share, monotone in it; 0 gives 0, 1 gives `LLM_ONLY_THRESHOLD`."""
        if not 0 <= llm_share <= 1:
            raise ValueError(f"llm_share must be in [0, 1], got {llm_share}")
        if llm_share == 0:
            return 0.0
        if llm_share == 1:
            return LLM_ONLY_THRESHOLD
        logits, shares = self._curve()
        # Where several thresholds gave one share, the lowest one is the cheapest that reaches it.
        shares, first = np.unique(shares, return_index=True)
        return _from_logit(float(np.interp(llm_share, shares, logits[first])))

    def share_for(self, threshold: float) -> float:
        """The LLM share to expect of a threshold, monotone in it."""
        if not threshold >= 0:
            raise ValueError(f"threshold must be a number >= 0, got {threshold}")
        if threshold == 0:
            return 0.0
        if threshold >= LLM_ONLY_THRESHOLD:
            return 1.0
        logits, shares = self._curve()
        return float(np.interp(_to_logit(threshold), logits, shares))

    def _curve(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Logits of the thresholds and the shares, with both ends."""
        inner = [point for point in self.points if _LOWEST < point.threshold < _HIGHEST]
        logits = [
            _to_logit(0.0),
            *(_to_logit(point.threshold) for point in inner),
            _to_logit(LLM_ONLY_THRESHOLD),
        ]
        return np.array(logits), np.array([0.0, *(point.llm_share for point in inner), 1.0])


def _to_logit(threshold: float) -> float:
    cut = min(max(threshold, _LOWEST), _HIGHEST)
    return math.log(cut / (1 - cut))


def _from_logit(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
