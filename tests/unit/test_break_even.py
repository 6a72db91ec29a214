"""Routing against speculation on the Qwen2 pair, against numbers worked by hand (prompt 150, response 60, bf16)."""

from __future__ import annotations

import pytest

from citer_ray.break_even import BreakEven, tokens_per_round
from tests.unit.test_cost import QWEN2

QWEN2_RESPONSE = BreakEven(QWEN2, 150, 60)


@pytest.mark.parametrize(("share", "gigabytes"), [(0.0, 186), (0.05, 614), (0.2, 1901), (0.33, 3017), (0.5, 4475)])
def test_routing_moves_bytes_in_proportion_to_the_share(share: float, gigabytes: float) -> None:
    assert QWEN2_RESPONSE.routing_bytes(share) / 1e9 == pytest.approx(gigabytes, rel=3e-3)


@pytest.mark.parametrize(("acceptance", "gigabytes"), [(0.6, 3989), (0.7, 3232), (0.8, 2577), (0.9, 2029)])
def test_speculation_with_drafts_of_five(acceptance: float, gigabytes: float) -> None:
    assert QWEN2_RESPONSE.speculation_bytes(acceptance, 5) / 1e9 == pytest.approx(gigabytes, rel=3e-3)


@pytest.mark.parametrize(("acceptance", "share"), [(0.7, 0.36), (0.8, 0.28), (0.9, 0.21)])
def test_break_even_shares(acceptance: float, share: float) -> None:
    found = QWEN2_RESPONSE.share(acceptance, 5)
    assert found == pytest.approx(share, abs=0.01)
    assert QWEN2_RESPONSE.routing_bytes(found) == pytest.approx(QWEN2_RESPONSE.speculation_bytes(acceptance, 5))


def test_tokens_of_a_round() -> None:
    assert tokens_per_round(0.0, 4) == 1
    assert tokens_per_round(1.0, 4) == 5
    assert tokens_per_round(0.5, 2) == 1.75
    with pytest.raises(ValueError, match="acceptance"):
        tokens_per_round(1.1, 2)
