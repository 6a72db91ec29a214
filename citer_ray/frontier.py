"""Accuracy against cost: the curve of a method, its area, and bootstrap intervals over examples. Pure numpy.

Fed by evaluation (one `Point` for each decoded setting of a method's knob); read by `claims`, `report`,
`plotting` and the rounds' stop rule. All methods answer the same examples in the same order, and every
resample draws examples for all methods jointly, so that differences between methods have (paired) intervals.

Array legend: N examples, K knots of a curve, R rows (row 0 is the measured value, the others are resamples),
S places at which a curve is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from citer_ray.errors import DataError

FloatArray = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]  # integers or floats
Axis = Literal["llm_share", "gigabytes", "flops", "seconds"]
AXES: tuple[Axis, ...] = ("llm_share", "gigabytes", "flops", "seconds")

# Names of methods; a round's router is named by `citer_method`.
SLM = "slm"
LLM = "llm"
RANDOM = "random"
CONFIDENCE = "confidence"
CITER_S = "citer_s"
ORACLE = "oracle"
_CITER_PREFIX = "citer_round_"

MAX_SHARE = 0.5  # area counts up to here: beyond, an LLM-only answer is the better deal


def citer_method(round_number: int) -> str:
    """Name of the method that routes with the router of a round (1, 2, ...)."""
    return f"{_CITER_PREFIX}{round_number}"


def citer_rounds(methods: Iterable[str]) -> list[int]:
    """Rounds whose routers are among some methods, ascending."""
    numbers = (name.removeprefix(_CITER_PREFIX) for name in methods if name.startswith(_CITER_PREFIX))
    return sorted(int(number) for number in numbers if number.isdigit())


class Interval(NamedTuple):
    """A measured value and the bounds of its percentile bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a method's knob, measured on N examples.

    Attributes:
        knob: the setting (threshold, probability, ...), finite; None for a method without one.
        correct: bool [N]; whether the answer is right. No answer counts as wrong.
        llm_tokens: [N]; tokens of the response that the LLM wrote.
        total_tokens: [N]; tokens of the response.
        bytes_moved: [N]; bytes moved for the response, by the cost model.
        flops_used: [N]; floating-point operations of the response, by the cost model.
        answered: bool [N]; whether an answer could be extracted at all; None means all were.
        seconds: [N]; wall time of the response alone on its engines; None where no times were measured.
        passes: mean forward passes of the SLM and of the LLM for an answer, where counted.

    Raises:
        DataError: arrays of different length, no examples, or impossible values.
    """

    knob: float | None
    correct: npt.NDArray[np.bool_]
    llm_tokens: Numbers
    total_tokens: Numbers
    bytes_moved: Numbers
    flops_used: Numbers
    answered: npt.NDArray[np.bool_] | None = None
    seconds: Numbers | None = None
    passes: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        arrays = [np.asarray(array) for array in self._columns()]
        sizes = {array.shape for array in arrays}
        if len(sizes) != 1 or arrays[0].ndim != 1 or arrays[0].size == 0:
            raise DataError(f"a point needs one value per example in each of its arrays; got shapes {sizes}")
        if self.knob is not None and not np.isfinite(self.knob):
            raise DataError(f"a point's knob must be a finite number or None; got {self.knob}")
        costs = np.stack([array.astype(np.float64) for array in arrays[1:6]])
        if not np.isfinite(costs).all() or (costs < 0).any() or (costs[0] > costs[1]).any():
            raise DataError(f"knob {self.knob}: tokens and costs must be finite and >= 0, and LLM tokens <= all tokens")

    @property
    def num_examples(self) -> int:
        """N."""
        return int(np.asarray(self.correct).size)

    @property
    def llm_share(self) -> float:
        """LLM tokens / all tokens, over all responses together (alpha in the paper)."""
        total = float(np.sum(self.total_tokens))
        return float(np.sum(self.llm_tokens)) / total if total else 0.0

    @property
    def accuracy(self) -> float:
        """Part of the examples that are answered right."""
        return float(np.mean(self.correct))

    @property
    def gigabytes(self) -> float:
        """Mean bytes moved per answer, in 1e9 bytes."""
        return float(np.mean(self.bytes_moved)) / 1e9

    @property
    def flops(self) -> float:
        """Mean floating-point operations per answer."""
        return float(np.mean(self.flops_used))

    @property
    def tokens_per_answer(self) -> float:
        """Mean response length in tokens."""
        return float(np.mean(self.total_tokens))

    @property
    def unanswered(self) -> int:
        """Responses without an answer."""
        return 0 if self.answered is None else int(np.sum(~np.asarray(self.answered, dtype=np.bool_)))

    @property
    def mean_seconds(self) -> float | None:
        """Mean wall time per answer."""
        return None if self.seconds is None else float(np.mean(self.seconds))

    def cost(self, axis: Axis) -> float:
        """Its place on an axis; 0 seconds where no times were measured."""
        return float(_costs(self.statistics().mean(axis=0)[None, None], axis)[0, 0])

    def _columns(self) -> list[Numbers]:
        seconds = np.zeros(np.shape(self.correct)) if self.seconds is None else self.seconds
        columns = [self.correct, self.llm_tokens, self.total_tokens, self.bytes_moved, self.flops_used, seconds]
        return columns if self.answered is None else [*columns, self.answered]

    def statistics(self) -> FloatArray:
        """float64 [N, 6]: correct, LLM tokens, all tokens, bytes, FLOPs, seconds; their means give every figure."""
        return np.stack([np.asarray(column, dtype=np.float64) for column in self._columns()[:6]], axis=1)


@dataclass(frozen=True, slots=True)
class MethodCurve:
    """A method and its measured points, in any order."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Frontier:
    """The curves of all methods on one set of examples.

    A curve is the straight lines between a method's points in order of cost, joined at the ends by the
    SLM-only and the LLM-only point; points of equal cost count as their mean. `slm` and `llm` themselves are
    horizontal lines.

    Attributes:
        slm: the SLM-only point.
        llm: the LLM-only point.
        curves: the routed methods' curves by name.
        resamples: bootstrap resamples of the examples.
        seed: seed of the resamples.
        confidence: mass of the intervals.

    Raises:
        DataError: points of different numbers of examples, a curve without points, or a reserved name.
    """

    slm: Point
    llm: Point
    curves: Mapping[str, MethodCurve]
    resamples: int = 1000
    seed: int = 0
    confidence: float = 0.95
    _knots: dict[tuple[str, Axis], tuple[FloatArray, FloatArray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, curve in self.curves.items():
            if name in (SLM, LLM):
                raise DataError(f"{name!r} is the name of an end point; give it as {name}=, not as a curve")
            if not curve.points:
                raise DataError(f"method {name!r} has no points")
        sizes = {point.num_examples for point in self._all_points()}
        if len(sizes) != 1:
            raise DataError(f"all methods must answer the same examples; got {sorted(sizes)} examples")

    @property
    def num_examples(self) -> int:
        """N."""
        return self.slm.num_examples

    @property
    def methods(self) -> list[str]:
        """Names of all methods, the two end points first."""
        return [SLM, LLM, *self.curves]

    def points(self, method: str) -> tuple[Point, ...]:
        """The measured points of a method, in order of LLM share.

        Raises:
            DataError: there is no such method.
        """
        if method in (SLM, LLM):
            return (self.slm if method == SLM else self.llm,)
        if method not in self.curves:
            raise DataError(f"no method {method!r} in the evaluation; there are {', '.join(self.methods)}")
        return tuple(sorted(self.curves[method].points, key=lambda point: point.llm_share))

    def point_accuracy(self, point: Point) -> Interval:
        """A point's own accuracy, with its interval."""
        rows = self._weights @ np.asarray(point.correct, dtype=np.float64) / self.num_examples
        return self._interval(rows)

    def accuracy(self, method: str, cost: Sequence[float], *, axis: Axis = "llm_share") -> list[Interval]:
        """A method's accuracy at given costs."""
        return self._intervals(self._accuracy_rows(method, cost, axis))

    def difference(self, a: str, b: str, cost: Sequence[float], *, axis: Axis = "llm_share") -> list[Interval]:
        """Accuracy of `a` minus accuracy of `b` at equal costs, with paired intervals."""
        return self._intervals(self._accuracy_rows(a, cost, axis) - self._accuracy_rows(b, cost, axis))

    def area(self, method: str, *, max_share: float = MAX_SHARE) -> Interval:
        """Mean accuracy over LLM shares from 0 to `max_share`: the area under the frontier, in [0, 1]."""
        return self._interval(self._area_rows(method, max_share))

    def area_between(self, method: str, axis: Axis) -> Interval:
        """Mean accuracy over costs from the SLM-only's to the LLM-only's."""
        low_R, high_R = (self._curve(name, axis)[0][:, 0] for name in (SLM, LLM))
        return self._interval(self._mean_rows(method, axis, low_R, np.maximum(high_R, np.nextafter(low_R, np.inf))))

    def area_difference(self, a: str, b: str, *, max_share: float = MAX_SHARE) -> Interval:
        """Area of `a` minus area of `b`, with a paired interval."""
        return self._interval(self._area_rows(a, max_share) - self._area_rows(b, max_share))

    def cost_within(self, method: str, points: float, *, axis: Axis = "llm_share") -> Interval:
        """The smallest cost at which a method's accuracy is within `points` (0.02 = 2 points) of the LLM's.

        Infinite where the method never comes so close (only `slm` can fail: all others end at the LLM).
        """
        x_RK, y_RK = self._curve(method, axis)
        target_R = self._curve(LLM, axis)[1][:, 0] - points
        return self._interval(_first_reach(x_RK, y_RK, target_R))

    @cached_property
    def _weights(self) -> FloatArray:
        """[R, N]: how often each example counts; row 0 is once each."""
        n = self.num_examples
        draws = np.random.default_rng(self.seed).integers(n, size=(self.resamples, n))
        offsets = n * np.arange(self.resamples)[:, None]
        counts = np.bincount((draws + offsets).ravel(), minlength=self.resamples * n)
        return np.vstack([np.ones(n), counts.reshape(self.resamples, n)])

    def _all_points(self) -> list[Point]:
        return [self.slm, self.llm, *(point for curve in self.curves.values() for point in curve.points)]

    def _curve(self, method: str, axis: Axis) -> tuple[FloatArray, FloatArray]:
        """Costs and accuracies [R, K] of a curve's knots, in order of cost within each row."""
        key = (method, axis)
        if key not in self._knots:
            points = self.points(method)
            knots = points if method in (SLM, LLM) else (self.slm, *points, self.llm)
            statistics = np.stack([point.statistics() for point in knots], axis=1)  # [N, K, 6]
            means = np.tensordot(self._weights, statistics, axes=1) / self.num_examples  # [R, K, 6]
            self._knots[key] = _merge_ties(*_in_order(_costs(means, axis), means[..., 0]))
        return self._knots[key]

    def _accuracy_rows(self, method: str, cost: Sequence[float], axis: Axis) -> FloatArray:
        x_RK, y_RK = self._curve(method, axis)
        at_RS = np.broadcast_to(np.asarray(cost, dtype=np.float64), (len(x_RK), len(cost)))
        return _read(x_RK, y_RK, at_RS)

    def _area_rows(self, method: str, max_share: float) -> FloatArray:
        if not 0 < max_share <= 1:
            raise DataError(f"max_share must be in (0, 1]; got {max_share}")
        return self._mean_rows(method, "llm_share", np.zeros(1), np.full(1, max_share))

    def _mean_rows(self, method: str, axis: Axis, low_R: FloatArray, high_R: FloatArray) -> FloatArray:
        """Mean accuracy of each row's curve between two costs."""
        x_RK, y_RK = self._curve(method, axis)
        low_R1, high_R1 = (np.broadcast_to(end[:, None], (len(x_RK), 1)) for end in (low_R, high_R))
        at_RS = np.hstack([low_R1, np.clip(x_RK, low_R1, high_R1), high_R1])
        read_RS = _read(x_RK, y_RK, at_RS)
        trapezoids = (read_RS[:, 1:] + read_RS[:, :-1]) / 2 * np.diff(at_RS, axis=1)
        return np.asarray(trapezoids.sum(axis=1) / (high_R1 - low_R1)[:, 0])

    def _intervals(self, rows_RS: FloatArray) -> list[Interval]:
        return [self._interval(column) for column in rows_RS.T]

    def _interval(self, rows_R: FloatArray) -> Interval:
        tail = round((1 - self.confidence) / 2, 12)  # 0.025, not 0.02500000000000002: it picks a row
        # Not interpolated: `inf` (never reached) must not turn into nan.
        low, high = np.quantile(rows_R[1:], [tail, 1 - tail], method="inverted_cdf")
        return Interval(float(rows_R[0]), float(low), float(high))


def _costs(means_RK6: FloatArray, axis: Axis) -> FloatArray:
    """Cost of each knot [R, K] from the mean statistics per answer."""
    if axis == "llm_share":
        total = means_RK6[..., 2]
        return np.divide(means_RK6[..., 1], total, out=np.zeros_like(total), where=total > 0)
    column = {"gigabytes": 3, "flops": 4, "seconds": 5}[axis]
    return means_RK6[..., column] / (1e9 if axis == "gigabytes" else 1.0)


def _in_order(x_RK: FloatArray, y_RK: FloatArray) -> tuple[FloatArray, FloatArray]:
    order = np.argsort(x_RK, axis=1, kind="stable")
    return np.take_along_axis(x_RK, order, axis=1), np.take_along_axis(y_RK, order, axis=1)


def _merge_ties(x_RK: FloatArray, y_RK: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Give all knots of equal cost in a row their mean accuracy, so that a curve has one value everywhere."""
    equal_RKK = x_RK[:, :, None] == x_RK[:, None, :]
    return x_RK, np.einsum("rij,rj->ri", equal_RKK, y_RK) / equal_RKK.sum(axis=2)


def _read(x_RK: FloatArray, y_RK: FloatArray, at_RS: FloatArray) -> FloatArray:
    """Linear interpolation in each row; constant before the first and after the last knot."""
    last = x_RK.shape[1] - 1
    after_RS = (x_RK[:, :, None] <= at_RS[:, None, :]).sum(axis=1)
    low_RS, high_RS = np.clip(after_RS - 1, 0, last), np.clip(after_RS, 0, last)
    x_low, x_high = np.take_along_axis(x_RK, low_RS, axis=1), np.take_along_axis(x_RK, high_RS, axis=1)
    y_low, y_high = np.take_along_axis(y_RK, low_RS, axis=1), np.take_along_axis(y_RK, high_RS, axis=1)
    width = x_high - x_low
    part = np.divide(at_RS - x_low, width, out=np.zeros_like(width), where=width > 0)
    return y_low + np.clip(part, 0.0, 1.0) * (y_high - y_low)


def _first_reach(x_RK: FloatArray, y_RK: FloatArray, target_R: FloatArray) -> FloatArray:
    """Where each row's curve first reaches its target; inf where it never does."""
    reached_RK = y_RK >= target_R[:, None]
    rows = np.arange(len(x_RK))
    k = reached_RK.argmax(axis=1)
    before = np.maximum(k - 1, 0)
    rise = y_RK[rows, k] - y_RK[rows, before]
    part = np.divide(target_R - y_RK[rows, before], rise, out=np.ones_like(rise), where=rise > 0)
    crossing = x_RK[rows, before] + np.clip(part, 0.0, 1.0) * (x_RK[rows, k] - x_RK[rows, before])
    return np.where(reached_RK.any(axis=1), crossing, np.inf)
