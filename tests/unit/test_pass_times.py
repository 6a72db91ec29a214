"""Times of passes from responses that were decoded alone."""

from __future__ import annotations

import numpy as np
import pytest

from citer_ray.pass_times import PassTimes

TRUE = PassTimes(slm_pass=0.002, llm_pass=0.01, slm_token=0.0001, llm_token=0.0004, decision=0.0005)


def rows(count: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        slm, llm = int(rng.integers(10, 60)), int(rng.integers(1, 30))
        row = {
            "slm_passes": slm,
            "llm_passes": llm,
            "slm_read": slm + int(rng.integers(5, 60)),
            "llm_read": llm + int(rng.integers(5, 90)),
            "decisions": int(rng.integers(0, 50)),
            "example_id": "unused",
        }
        found.append({**row, "seconds": float(TRUE.seconds({name: [row[name]] for name in row})[0])})
    return found


def test_times_are_found_again() -> None:
    fitted = PassTimes.fit(rows(60))
    for name, value in TRUE.model_dump().items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-3)


def test_no_time_is_negative() -> None:
    """Decisions that seem to save time cost nothing."""
    noisy = [{**row, "seconds": row["seconds"] - 0.0008 * row["decisions"]} for row in rows(60)]
    assert PassTimes.fit(noisy).decision == 0


def test_nothing_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PassTimes.fit([])
