"""Statements about the method that a report checks against what was measured.

Fed by a `Frontier` and the exactness counts of evaluation; read by `report`. Nothing is tuned to make a
statement hold: the bounds are constants, and a statement that fails is reported as failing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from pydantic import BaseModel, ConfigDict

from citer_ray.frontier import (
    CITER_S,
    CONFIDENCE,
    LLM,
    RANDOM,
    SLM,
    Frontier,
    Interval,
    citer_method,
    citer_rounds,
)
from citer_ray.method_names import (
    CASCADE_AVERAGE,
    CASCADE_QUANTILE,
    CASCADE_SUM,
    COLLM,
    ENTROPY,
    MARGIN,
    R2R,
    ROUTELLM,
    SPECULATIVE,
    method_label,
)

GAIN = 0.15  # CITER's last round must beat random and confidence by this much at some equal LLM share
NEAR_LLM = 0.01  # "the LLM's accuracy" means within 1 point of it
SHARE_LIMIT = 0.15  # and it must be reached at this LLM share
COMPARED_SHARES = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
COMPARED_BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # parts of the bytes that the LLM alone moves
# Where CITER's area under the frontier must lie above.
_ROUTERS = (
    RANDOM,
    CONFIDENCE,
    ENTROPY,
    MARGIN,
    ROUTELLM,
    CASCADE_SUM,
    CASCADE_AVERAGE,
    CASCADE_QUANTILE,
    COLLM,
    R2R,
    CITER_S,
)
_FINE_SHARES = tuple(np.linspace(0.005, 0.5, 100).round(3).tolist())

_EXACTNESS = {
    SLM: ("threshold_zero_is_slm", "Threshold 0 gives exactly the SLM's greedy answers"),
    LLM: ("threshold_above_one_is_llm", "A threshold above 1 gives exactly the LLM's greedy answers"),
    SPECULATIVE: ("speculation_is_llm", "Exact speculative decoding gives exactly the LLM's greedy answers"),
}


class Claim(BaseModel):
    """One checked statement.

    Attributes:
        name: a stable identifier.
        statement: what is claimed, with its bound.
        holds: whether the measured value meets the bound.
        certain: whether the unfavourable end of the value's interval meets it too.
        value: the measured value.
        interval: its bootstrap interval; None where the value is a count.
        measured: value, interval and where it was measured, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    statement: str
    holds: bool
    certain: bool
    value: float
    interval: tuple[float, float] | None
    measured: str


class NotChecked(BaseModel):
    """A statement that could not be checked, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    reason: str


def check_claims(
    frontier: Frontier, *, exactness: Mapping[str, tuple[int, int]] | None = None, best: str | None = None
) -> tuple[list[Claim], list[NotChecked]]:
    """Check every statement for which the methods were evaluated.

    Args:
        frontier: all methods on the reported examples.
        exactness: how many responses were equal, of how many: under `slm` those at threshold 0 to the SLM's
            own, under `llm` those at a threshold above 1 to the LLM's own, under `speculative` those of exact
            speculation to the LLM's own.
        best: the method of the best labelling; None takes the last round's.
    """
    rounds = citer_rounds(frontier.methods)
    last = citer_method(rounds[-1]) if rounds else citer_method(1)
    first_two = (citer_method(1), citer_method(2))
    chosen = best or last
    compared: list[tuple[str, tuple[str, ...], Callable[[], list[Claim]]]] = [
        ("beats_random_and_confidence", (last, RANDOM, CONFIDENCE), lambda: _beats_baselines(frontier, last)),
        ("round_2_above_round_1", first_two, lambda: [_rounds_improve(frontier)]),
        ("labels_at_least_citer_s", (chosen, CITER_S), lambda: [_at_least_citer_s(frontier, chosen)]),
        ("llm_accuracy_at_small_share", (last,), lambda: [_reaches_llm(frontier, last)]),
    ]
    claims: list[Claim] = []
    missing: list[NotChecked] = []
    for name, needed, check in compared:
        absent = [method for method in needed if method not in frontier.methods]
        if absent:
            missing.append(NotChecked(name=name, reason=f"not evaluated: {', '.join(absent)}"))
        else:
            claims += check()
    if last in frontier.methods:
        claims += [_area_above(frontier, last, other) for other in _ROUTERS if other in frontier.methods]
    for end_point, (name, statement) in _EXACTNESS.items():
        if exactness and end_point in exactness:
            claims.append(_exact(name, statement, *exactness[end_point]))
        elif end_point in (SLM, LLM):
            missing.append(NotChecked(name=name, reason="responses were not compared"))
    return claims, missing


def _beats_baselines(frontier: Frontier, last: str) -> list[Claim]:
    """One claim for each baseline, both at the one share where the smaller of the two gains is largest.

    The share is picked on the reported examples, which flatters the value a little; the interval is that of
    the picked share alone.
    """
    gains = {other: frontier.difference(last, other, _FINE_SHARES) for other in (RANDOM, CONFIDENCE)}
    smaller = [min(gains[RANDOM][i].value, gains[CONFIDENCE][i].value) for i in range(len(_FINE_SHARES))]
    at = int(np.argmax(smaller))
    return [
        Claim(
            name=f"beats_{other}",
            statement=f"CITER's last round beats {other} by at least {_points(GAIN)} at some equal LLM share",
            holds=gain[at].value >= GAIN,
            certain=gain[at].low >= GAIN,
            value=gain[at].value,
            interval=(gain[at].low, gain[at].high),
            measured=f"{_signed(gain[at])} at {_percent(_FINE_SHARES[at])}",
        )
        for other, gain in gains.items()
    ]


def _area_above(frontier: Frontier, last: str, other: str) -> Claim:
    gain = frontier.area_difference(last, other)
    return Claim(
        name=f"area_above_{other}",
        statement=f"CITER's last round has a larger area under the frontier than {method_label(other)}",
        holds=gain.value > 0,
        certain=gain.low > 0,
        value=gain.value,
        interval=(gain.low, gain.high),
        measured=f"{_signed(gain)} of mean accuracy",
    )


def _rounds_improve(frontier: Frontier) -> Claim:
    gain = frontier.area_difference(citer_method(2), citer_method(1))
    return Claim(
        name="round_2_above_round_1",
        statement="Round 2 has a larger area under the frontier than round 1",
        holds=gain.value > 0,
        certain=gain.low > 0,
        value=gain.value,
        interval=(gain.low, gain.high),
        measured=f"{_signed(gain)} of mean accuracy",
    )


def _at_least_citer_s(frontier: Frontier, best: str) -> Claim:
    """Nowhere below CITER-S by more than the interval, and somewhere above it by more than the interval."""
    gains = frontier.difference(best, CITER_S, COMPARED_SHARES)
    worst = int(np.argmin([gain.high for gain in gains]))
    top = int(np.argmax([gain.low for gain in gains]))
    never_below, somewhere_above = gains[worst].high >= 0, gains[top].low > 0
    measured = f"best: {_signed(gains[top])} at {_percent(COMPARED_SHARES[top])}"
    if gains[worst].value < 0:
        measured += f"; worst: {_signed(gains[worst])} at {_percent(COMPARED_SHARES[worst])}"
    return Claim(
        name="labels_at_least_citer_s",
        statement="The best labelling is at least as good as CITER-S at every LLM share (within the "
        "interval) and better at some by more than the interval",
        holds=never_below and somewhere_above,
        certain=somewhere_above and all(gain.low >= 0 for gain in gains),
        value=gains[top].value,
        interval=(gains[top].low, gains[top].high),
        measured=measured,
    )


def _reaches_llm(frontier: Frontier, last: str) -> Claim:
    share = frontier.cost_within(last, NEAR_LLM)
    return Claim(
        name="llm_accuracy_at_small_share",
        statement=f"The LLM's accuracy, within {_points(NEAR_LLM)}, at an LLM share of at most {_percent(SHARE_LIMIT)}",
        holds=share.value <= SHARE_LIMIT,
        certain=share.high <= SHARE_LIMIT,
        value=share.value,
        interval=(share.low, share.high),
        measured=f"at {_percent(share.value)} (interval {_percent(share.low)} to {_percent(share.high)})",
    )


def _exact(name: str, statement: str, equal: int, total: int) -> Claim:
    holds = equal == total and total > 0
    value = equal / total if total else 0.0
    measured = f"{equal} of {total} responses are equal, token for token"
    return Claim(
        name=name,
        statement=statement,
        holds=holds,
        certain=holds,
        value=value,
        interval=None,
        measured=measured,
    )


def _points(value: float) -> str:
    shown = f"{100 * value:g}"
    return f"{shown} point" if shown == "1" else f"{shown} points"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _signed(gain: Interval) -> str:
    return f"{100 * gain.value:+.1f} points (interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
