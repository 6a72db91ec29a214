"""Frontier maths against slow references that loop over resamples and use numpy's own interpolation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from citer_ray.errors import DataError
from citer_ray.frontier import LLM, SLM, Frontier, Interval, MethodCurve, Point, citer_method, citer_rounds


def point(
    correct: Sequence[int], llm: Sequence[int], total: Sequence[int] | None = None, knob: float | None = 0.5
) -> Point:
    tokens = np.asarray(total if total is not None else [10] * len(correct))
    share = np.asarray(llm)
    return Point(knob, np.asarray(correct, dtype=bool), share, tokens, tokens * 1e9 + share * 9e9, tokens * 2.0 + share)


def curve(name: str, *points: Point) -> dict[str, MethodCurve]:
    return {name: MethodCurve(name, points)}


def line(accuracies: Sequence[float], shares: Sequence[float], n: int = 100) -> Frontier:
    """SLM at 0, LLM at 1, and a method with points at exactly the given places."""

    def at(accuracy: float, share: float) -> Point:
        return point([1] * round(accuracy * n) + [0] * (n - round(accuracy * n)), [round(100 * share)] * n, [100] * n)

    inner = tuple(at(a, s) for a, s in zip(accuracies, shares, strict=True))
    return Frontier(at(0.2, 0), at(0.9, 1), curve("m", *inner), resamples=20)


def noisy(seed: int = 0, n: int = 60, methods: int = 2, points: int = 4, resamples: int = 50) -> Frontier:
    """Random points with lengths that differ between examples and settings."""
    rng = np.random.default_rng(seed)

    def draw(accuracy: float, share: float) -> Point:
        total = rng.integers(5, 40, n)
        llm = rng.binomial(total, share)
        return Point(share, rng.random(n) < accuracy, llm, total, total * 1e8 + llm * 1e9, total * 1e6 + llm * 1e7)

    curves = {
        f"m{i}": MethodCurve(
            f"m{i}", tuple(draw(0.4 + 0.05 * i + 0.1 * k, min(0.05 + 0.1 * k, 1)) for k in range(points))
        )
        for i in range(methods)
    }
    return Frontier(draw(0.3, 0.0), draw(0.9, 1.0), curves, resamples=resamples, seed=seed)


def test_figures_of_a_point() -> None:
    p = Point(
        0.9,
        np.array([True, False, True, True]),
        np.array([0, 2, 4, 0]),
        np.array([10, 10, 20, 20]),
        np.array([1e9, 1e9, 2e9, 4e9]),
        np.array([1.0, 2.0, 3.0, 6.0]),
        np.array([True, False, True, True]),
    )
    assert p.llm_share == pytest.approx(6 / 60)
    assert p.accuracy == 0.75
    assert p.gigabytes == 2.0
    assert p.flops == 3.0
    assert p.tokens_per_answer == 15.0
    assert p.unanswered == 1
    assert point([1], [0]).unanswered == 0


def test_names_of_rounds() -> None:
    assert citer_method(2) == "citer_round_2"
    names = [
        "slm",
        "citer_s",
        citer_method(10),
        citer_method(2),
        "citer_round_",
        "citer_round_x",
        "my_citer_round_3",
    ]
    assert citer_rounds(names) == [2, 10]


def test_share_of_empty_responses_is_zero() -> None:
    assert point([0, 0], [0, 0], [0, 0]).llm_share == 0.0


@pytest.mark.parametrize(
    ("accuracy", "share"),
    [(0.2, 0.0), (0.4, 0.05), (0.6, 0.1), (0.7, 0.2), (0.8, 0.3), (0.85, 0.65), (0.9, 1.0)],
)
def test_linear_between_points_and_joined_to_the_end_points(accuracy: float, share: float) -> None:
    frontier = line([0.8, 0.6], [0.3, 0.1])  # given out of order
    assert frontier.accuracy("m", [share])[0].value == pytest.approx(accuracy)


def test_points_of_equal_cost_count_as_their_mean() -> None:
    frontier = line([0.5, 0.7, 0.8], [0.2, 0.2, 0.4])
    low, at, high = frontier.accuracy("m", [0.1, 0.2, 0.3])
    assert at.value == pytest.approx(0.6)
    assert low.value == pytest.approx(0.4)
    assert high.value == pytest.approx(0.7)


def test_end_points_are_horizontal_lines() -> None:
    frontier = line([0.8], [0.3])
    assert [i.value for i in frontier.accuracy(SLM, [0, 0.4, 1])] == [0.2] * 3
    assert [i.value for i in frontier.accuracy(LLM, [0, 0.4, 1])] == [0.9] * 3
    assert frontier.area(SLM).value == pytest.approx(0.2)
    assert frontier.methods == [SLM, LLM, "m"]


def test_area_is_the_mean_accuracy_up_to_the_limit() -> None:
    frontier = line([0.6, 0.8], [0.1, 0.3])
    expected = (0.1 * (0.2 + 0.6) / 2 + 0.2 * (0.6 + 0.8) / 2 + 0.2 * (0.8 + (0.8 + 0.1 * 2 / 7)) / 2) / 0.5
    assert frontier.area("m").value == pytest.approx(expected)
    assert frontier.area("m", max_share=0.1).value == pytest.approx(0.4)
    assert frontier.area_difference("m", SLM, max_share=0.1).value == pytest.approx(0.2)


def test_smallest_cost_within_points_of_the_llm() -> None:
    frontier = line([0.6, 0.8], [0.1, 0.3])
    assert frontier.cost_within("m", 0.2).value == pytest.approx(0.1 + 0.2 * 0.1 / 0.2)
    assert frontier.cost_within("m", 0.1).value == pytest.approx(0.3)
    assert frontier.cost_within("m", 0.0).value == pytest.approx(1.0)
    assert frontier.cost_within("m", 0.9).value == 0.0
    gigabytes = frontier.cost_within("m", 0.1, axis="gigabytes")
    assert gigabytes.value == pytest.approx(100 + 30 * 9)
    assert frontier.cost_within(SLM, 0.1) == Interval(np.inf, np.inf, np.inf)


def test_a_dip_after_the_target_does_not_move_the_smallest_cost() -> None:
    assert line([0.85, 0.5], [0.2, 0.4]).cost_within("m", 0.05).value == pytest.approx(0.2)


def test_flops_axis_may_put_the_llm_inside_the_curve() -> None:
    """A routed answer can cost more arithmetic than the LLM alone; the curve is still sorted by cost."""
    n = 10
    dear = Point(0.5, np.ones(n, bool), np.full(n, 2), np.full(n, 10), np.ones(n), np.full(n, 50.0))
    slm = Point(None, np.zeros(n, bool), np.zeros(n), np.full(n, 10), np.ones(n), np.full(n, 10.0))
    llm = Point(None, np.arange(n) < 5, np.full(n, 10), np.full(n, 10), np.ones(n), np.full(n, 30.0))
    frontier = Frontier(slm, llm, curve("m", dear), resamples=10)
    values = [i.value for i in frontier.accuracy("m", [20.0, 30.0, 40.0, 60.0], axis="flops")]
    assert values == pytest.approx([0.25, 0.5, 0.75, 1.0])


def resampled(frontier: Frontier, method: str, indexes: np.ndarray, share: float) -> float:
    """Accuracy of one resample at a share, worked out from the drawn examples with `np.interp`."""
    knots = []
    for p in (frontier.slm, *frontier.points(method), frontier.llm):
        total = np.asarray(p.total_tokens)[indexes].sum()
        knots.append((np.asarray(p.llm_tokens)[indexes].sum() / total, p.correct[indexes].mean()))
    x, y = zip(*sorted(knots), strict=True)
    return float(np.interp(share, x, y))


def test_intervals_equal_a_loop_over_resamples_drawn_jointly() -> None:
    frontier = noisy(resamples=40)
    n = frontier.num_examples
    draws = np.random.default_rng(frontier.seed).integers(n, size=(40, n))
    a = np.array([resampled(frontier, "m0", row, 0.2) for row in draws])
    b = np.array([resampled(frontier, "m1", row, 0.2) for row in draws])
    for got, rows in (
        (frontier.accuracy("m0", [0.2])[0], a),
        (frontier.difference("m1", "m0", [0.2])[0], b - a),
    ):
        low, high = np.quantile(rows, [0.025, 0.975], method="inverted_cdf")
        assert (got.low, got.high) == pytest.approx((low, high))
    measured = resampled(frontier, "m0", np.arange(n), 0.2)
    assert frontier.accuracy("m0", [0.2])[0].value == pytest.approx(measured)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), limit=st.floats(0.02, 1.0))
def test_area_equals_fine_numerical_integration(seed: int, limit: float) -> None:
    frontier = noisy(seed, n=12, methods=1, resamples=3)
    grid = np.linspace(0, limit, 4001)
    values = [interval.value for interval in frontier.accuracy("m0", grid.tolist())]
    assert frontier.area("m0", max_share=limit).value == pytest.approx(np.trapezoid(values, grid) / limit, abs=2e-3)


def test_identical_methods_differ_by_exactly_zero() -> None:
    frontier = noisy(methods=1)
    same = Frontier(frontier.slm, frontier.llm, {"a": frontier.curves["m0"], "b": frontier.curves["m0"]}, resamples=30)
    assert same.difference("a", "b", [0.1, 0.3]) == [Interval(0.0, 0.0, 0.0)] * 2
    assert same.area_difference("a", "b") == Interval(0.0, 0.0, 0.0)


def test_paired_interval_is_narrower_than_that_of_independent_methods() -> None:
    """Two methods that err on the same examples: the difference is known far better than either accuracy."""
    n = 400
    rng = np.random.default_rng(1)
    hard = rng.random(n) < 0.5
    flipped = hard ^ (rng.random(n) < 0.02)
    flat = [np.full(n, 10), np.full(n, 1e9), np.full(n, 1e6)]
    a, b = (Point(0.5, right, np.full(n, 2), *flat) for right in (hard, flipped))
    slm = Point(None, np.zeros(n, bool), np.zeros(n), *flat)
    llm = Point(None, np.ones(n, bool), np.full(n, 10), *flat)
    frontier = Frontier(slm, llm, curve("a", a) | curve("b", b), resamples=500)
    single = frontier.accuracy("a", [0.2])[0]
    paired = frontier.difference("a", "b", [0.2])[0]
    assert single.high - single.low > 0.08
    assert paired.high - paired.low < 0.04


def test_interval_width_is_that_of_a_binomial() -> None:
    n = 400
    right = np.arange(n) < 200
    p = Point(0.5, right, np.full(n, 2), np.full(n, 10), np.ones(n), np.ones(n))
    frontier = Frontier(p, p, {}, resamples=4000)
    interval = frontier.point_accuracy(p)
    # 1.96 * sqrt(.25 / 400) = .049; 4000 resamples know a quantile to about .0015.
    assert interval.low == pytest.approx(0.451, abs=0.006)
    assert interval.high == pytest.approx(0.549, abs=0.006)


def test_seed_decides_the_resamples() -> None:
    assert noisy().area("m0") == noisy().area("m0")
    base = noisy()
    other = Frontier(base.slm, base.llm, base.curves, resamples=50, seed=99)
    assert other.area("m0").value == base.area("m0").value
    assert other.area("m0").low != base.area("m0").low


def test_one_example_gives_degenerate_intervals() -> None:
    frontier = Frontier(point([0], [0]), point([1], [10]), curve("m", point([1], [3])), resamples=5)
    assert frontier.accuracy("m", [0.3]) == [Interval(1.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: point([], []), "one value per example"),
        (lambda: point([1, 0], [1]), "one value per example"),
        (lambda: point([1], [11]), "LLM tokens <= all tokens"),
        (lambda: point([1], [-1]), ">= 0"),
        (lambda: point([1], [1], knob=float("inf")), "finite number or None"),
        (lambda: Frontier(point([1], [0]), point([1, 1], [1, 1]), {}), r"same examples; got \[1, 2\]"),
        (
            lambda: Frontier(point([1], [0]), point([1], [1]), {"m": MethodCurve("m", ())}),
            "'m' has no points",
        ),
        (lambda: Frontier(point([1], [0]), point([1], [1]), curve("slm", point([1], [1]))), "end point"),
        (lambda: line([0.5], [0.2]).accuracy("other", [0.1]), "no method 'other'.*there are slm, llm, m"),
        (lambda: line([0.5], [0.2]).area("m", max_share=0), r"max_share must be in \(0, 1\]"),
    ],
)
def test_impossible_input_is_refused(build: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()  # type: ignore[operator]
