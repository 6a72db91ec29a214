"""Routers in service, and the threshold of a request: its own, through the calibration table, or the router's.

A candidate router may take a fraction of the requests (canary). The choice is a hash of the response's key, so that
all parts of one request agree.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from citer_ray.calibration import CalibrationTable
from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.jobs import RouterRef


@dataclass(frozen=True, slots=True)
class ServedRouter:
    """A router and what requests need to know of it.

    Attributes:
        ref: its version and where replicas load it from.
        threshold: of requests that name none.
        calibration: LLM share -> threshold.
    """

    ref: RouterRef
    threshold: float
    calibration: CalibrationTable

    def threshold_of(self, threshold: float | None, llm_share: float | None) -> float:
        """The threshold that a request means.

        Raises:
            ApiError: the router has no calibration table for an LLM share.
        """
        if threshold is not None:
            return threshold
        if llm_share is None:
            return self.threshold
        if not self.calibration.points and 0 < llm_share < 1:
            raise ApiError(
                f"router {self.ref.version} has no calibration table, so an LLM share cannot be mapped: give threshold",
                param="llm_share",
                code="not_calibrated",
            )
        return self.calibration.threshold_for(llm_share)


@dataclass(frozen=True, slots=True)
class RoutersInService:
    """The router of most requests, and the candidate of some.

    Attributes:
        current: None serves the models alone.
        canary: the candidate.
        canary_fraction: part of the routed requests that it gets.
    """

    current: ServedRouter | None = None
    canary: ServedRouter | None = None
    canary_fraction: float = 0.0

    def choose(self, key: str) -> ServedRouter:
        """The router of one request.

        Raises:
            ApiError: there is none.
        """
        if self.current is None:
            raise ApiError(
                "no router is in service: use the model slm or llm", status=404, param="model", code="model_not_found"
            )
        if self.canary is not None and zlib.crc32(key.encode()) < self.canary_fraction * 2**32:
            return self.canary
        return self.current
