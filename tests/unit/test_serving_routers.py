"""Which router serves a request, and which threshold it means."""

from __future__ import annotations

import pytest

from citer_ray.calibration import CalibrationTable
from citer_ray.policy import LLM_ONLY_THRESHOLD
from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.jobs import RouterRef
from citer_ray.serving.routers import RoutersInService, ServedRouter
from tests.unit.serving_world import CALIBRATION


def served(version: str, calibration: CalibrationTable = CALIBRATION) -> ServedRouter:
    return ServedRouter(RouterRef(version, "folder"), 0.5, calibration)


def test_a_canary_gets_its_fraction_and_keeps_its_requests() -> None:
    routers = RoutersInService(served("old"), served("new"), 0.2)
    chosen = [routers.choose(f"key-{index}").ref.version for index in range(2000)]
    assert chosen == [routers.choose(f"key-{index}").ref.version for index in range(2000)]
    assert 0.17 < chosen.count("new") / 2000 < 0.23
    assert {
        RoutersInService(served("old"), served("new"), 1.0).choose(str(index)).ref.version for index in range(50)
    } == {"new"}
    assert {
        RoutersInService(served("old"), served("new"), 0.0).choose(str(index)).ref.version for index in range(50)
    } == {"old"}


def test_thresholds() -> None:
    router = served("r")
    assert router.threshold_of(None, None) == 0.5
    assert router.threshold_of(0.7, None) == 0.7
    assert router.threshold_of(None, 0.2) == pytest.approx(0.4)
    assert router.threshold_of(None, 1.0) == LLM_ONLY_THRESHOLD


def test_a_share_needs_a_table() -> None:
    router = served("r", CalibrationTable())
    assert router.threshold_of(None, 0.0) == 0.0 and router.threshold_of(None, 1.0) == LLM_ONLY_THRESHOLD
    with pytest.raises(ApiError, match="calibration"):
        router.threshold_of(None, 0.2)
    with pytest.raises(ApiError, match="no router"):
        RoutersInService().choose("key")
