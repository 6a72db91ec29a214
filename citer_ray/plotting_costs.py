"""Pictures of all methods against each cost, and of routing against exact speculation.

`plotting.py` draws the frontier of few methods with intervals; here lines of twenty methods share one picture. Fed by a
`Report` and its `Frontier`; drawn with matplotlib's Agg canvas directly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from citer_ray.break_even import BreakEven
from citer_ray.frontier import LLM, SLM, Axis, Frontier, citer_rounds
from citer_ray.method_names import method_label
from citer_ray.plotting import save_picture
from citer_ray.report_schema import Report, SpeculationReport

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7f7f7f", "#8c564b", "#000000")
_DASHES = ("-", "--", "-.", ":")
_VERMILION = "#D55E00"
_NAMES: dict[Axis, str] = {
    "llm_share": "LLM share, %",
    "gigabytes": "bytes moved per answer, GB at batch 1 (cost model)",
    "flops": "floating-point operations per answer (cost model)",
    "seconds": "wall time of an answer alone, s (from measured pass times)",
}


def plot_cost(report: Report, frontier: Frontier, axis: Axis, path: Path) -> Path:
    """Accuracy of every method against one cost."""
    figure, axes = _figure((9.0, 5.2))
    scale = 100.0 if axis == "llm_share" else 1.0
    rounds = citer_rounds(report.methods)
    others = [name for name in frontier.curves if not citer_rounds([name])]
    for name, curve in frontier.curves.items():
        points = sorted((scale * point.cost(axis), 100 * point.accuracy) for point in curve.points)
        number = citer_rounds([name])
        if number:
            last = number[0] == rounds[-1]
            axes.plot(
                *zip(*points, strict=True), color=_VERMILION, linewidth=2.6 if last else 1.4, marker="o", markersize=4,
                linestyle="-" if last else ":", label=method_label(name), zorder=5,
            )  # fmt: skip
        else:
            at = others.index(name)
            axes.plot(
                *zip(*points, strict=True), color=_COLOURS[at % len(_COLOURS)], linewidth=1.2, marker=".",
                linestyle=_DASHES[at // len(_COLOURS) % len(_DASHES)], label=method_label(name),
            )  # fmt: skip
    for name in (SLM, LLM):
        (point,) = frontier.points(name)
        axes.plot([scale * point.cost(axis)], [100 * point.accuracy], "k*", markersize=10, zorder=6)
        axes.annotate(
            method_label(name), (scale * point.cost(axis), 100 * point.accuracy),
            xytext=(5, -12), textcoords="offset points", fontsize=9,
        )  # fmt: skip
    _dress(axes, _NAMES[axis], f"accuracy, % ({report.n} examples)")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return save_picture(figure, path)


def plot_break_even(speculation: SpeculationReport, typical: BreakEven, path: Path) -> Path:
    """The LLM share below which routing moves fewer bytes than exact speculation, against the acceptance rate."""
    figure, axes = _figure((7.0, 4.2))
    acceptance = np.linspace(0, 1, 101)
    for draft, colour in zip(speculation.drafts, _COLOURS, strict=False):
        shares = [100 * typical.share(float(rate), draft.draft_length) for rate in acceptance]
        axes.plot(100 * acceptance, shares, color=colour, label=f"drafts of {draft.draft_length}")
        axes.plot([100 * draft.acceptance], [100 * draft.modelled_break_even], "o", color=colour)
    if speculation.break_even_share is not None:
        axes.axhline(100 * speculation.break_even_share, color=_VERMILION, linestyle=":")
        axes.annotate(
            f"measured: {100 * speculation.break_even_share:.1f} %", (2, 100 * speculation.break_even_share),
            xytext=(0, 4), textcoords="offset points", fontsize=9, color=_VERMILION,
        )  # fmt: skip
    _dress(axes, "chance that a drafted token stands, % (dots: measured)", "LLM share, %: routing moves less below")
    axes.legend(frameon=False)
    return save_picture(figure, path)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
