"""`frontier.png`: accuracy against LLM share, one line for each method.

Fed by a `Report`, also by one read back from `report.json`; the picture is shown in the report, in the README
and in MLflow. Drawn with matplotlib's Agg canvas directly: no display, no global state, no choice of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from citer_ray.errors import DataError
from citer_ray.file_replacement import replacing
from citer_ray.frontier import CITER_S, CONFIDENCE, LLM, ORACLE, RANDOM, SLM, citer_rounds
from citer_ray.method_names import method_label
from citer_ray.report_schema import MethodReport, Report
from citer_ray.storage import storage_path

# Okabe and Ito's palette, told apart also by colour-blind readers; lines differ in dash and marker besides.
_GREY, _ORANGE, _SKY, _GREEN = "#7f7f7f", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE, _BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
_ROUND_COLOURS = (_SKY, _BLUE, _PURPLE, _BLACK)
# Other methods are in the pictures of `plotting_costs`: twenty bands would hide each other.
_DRAWN = (RANDOM, CONFIDENCE, CITER_S, ORACLE)
_SIZE_INCHES = (8.0, 4.4)
_DPI = 150  # 1200 pixels wide: sharp at a README's 800


@dataclass(frozen=True, slots=True)
class _Style:
    colour: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str
    width: float


def plot_frontier(report: Report, path: str | Path, *, title: str = "", max_share: float = 0.2) -> Path:
    """Draw accuracy against LLM share as a PNG.

    Args:
        report: the methods to draw.
        path: the picture's file.
        title: shown above the axes.
        max_share: right end of the axis, as an LLM share.

    Raises:
        DataError: the report lacks an end point.
    """
    missing = [name for name in (SLM, LLM) if name not in report.methods]
    if missing:
        raise DataError(f"the report has no method {' and '.join(missing)}, between which the curves run")
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    routed = {name: method for name, method in report.methods.items() if name in _DRAWN or citer_rounds([name])}
    for name in routed:
        _draw_method(axes, report, name, max_share)
    _draw_end_points(axes, report, max_share)
    _dress(axes, report, title, max_share)
    _add_legend(figure, axes, report, routed)
    return save_picture(figure, storage_path(path))


def save_picture(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": "citer_ray"})
    return path


def _draw_method(axes: Axes, report: Report, name: str, max_share: float) -> None:
    """The curve through measured points and the report's shares (which lie on it), its band, and its points."""
    style = _style(name, citer_rounds(report.methods))
    method = report.methods[name]
    ends = [(float(role == LLM), report.methods[role].points[0]) for role in (SLM, LLM)]
    band = [(at.llm_share, at.accuracy, *at.accuracy_interval) for at in method.at_shares]
    band += [(share, point.accuracy, *point.accuracy_interval) for share, point in ends]
    x, middle, low, high = (100 * np.array(column) for column in zip(*sorted(band), strict=True))
    if name != ORACLE:  # its band lies over the curves that matter
        axes.fill_between(x, low, high, color=style.colour, alpha=0.14, linewidth=0)
    points = 100 * np.array([(point.llm_share, point.accuracy) for point in method.points])
    line = np.array(sorted([*zip(x, middle, strict=True), *map(tuple, points)]))
    axes.plot(
        line[:, 0],
        line[:, 1],
        color=style.colour,
        linestyle=style.dashes,
        linewidth=style.width,
        marker=style.marker,
        markevery=[],  # shows the marker in the legend; the measured points are drawn below
        markersize=5,
        label=method_label(name),
    )
    shown = points[points[:, 0] <= 100 * max_share]
    axes.plot(*shown.T, color=style.colour, marker=style.marker, markersize=5, linestyle="none")


def _draw_end_points(axes: Axes, report: Report, max_share: float) -> None:
    """Horizontal lines for both models alone, labelled on the lines themselves."""
    for name, above in ((LLM, True), (SLM, False)):
        level = 100 * report.methods[name].points[0].accuracy
        axes.axhline(level, color=_GREY, linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)
        axes.annotate(
            f"{method_label(name)} {level:.1f} %",
            xy=(100 * max_share, level),
            xytext=(-4, 4 if above else -4),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            fontsize=9,
            color="#404040",
        )


def _dress(axes: Axes, report: Report, title: str, max_share: float) -> None:
    axes.set_xlim(0, 100 * max_share)
    low, high = _visible_range(report, max_share)
    room = 0.06 * max(high - low, 1)  # for the labels of the end points' lines
    axes.set_ylim(max(0, low - room), min(104, high + room))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_xlabel("LLM share (tokens written by the LLM / all tokens)")
    axes.set_ylabel(f"accuracy ({report.n} examples)")
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _visible_range(report: Report, max_share: float) -> tuple[float, float]:
    """Lowest and highest bound, in per cent, that the picture shows."""
    bounds = [bound for name in (SLM, LLM) for bound in report.methods[name].points[0].accuracy_interval]
    for method in report.methods.values():
        bounds += [bound for at in method.at_shares if at.llm_share <= max_share for bound in at.accuracy_interval]
        bounds += [point.accuracy for point in method.points if point.llm_share <= max_share]
    return 100 * min(bounds), 100 * max(bounds)


def _add_legend(figure: Figure, axes: Axes, report: Report, routed: Mapping[str, MethodReport]) -> None:
    """Beside the axes, best method first, so that it reads in the order of the lines."""
    if not routed:
        return
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    names = [method_label(name) for name in sorted(routed, key=lambda name: -routed[name].area)]
    figure.legend(
        [by_label[name] for name in names],
        names,
        loc="outside right center",
        frameon=False,
        handlelength=2.6,
        title=f"band: {100 * report.measurement.confidence:g} % interval",
        title_fontsize=9,
    )


def _style(name: str, rounds: Sequence[int]) -> _Style:
    fixed = {
        RANDOM: _Style(_GREY, "--", "x", 1.4),
        CONFIDENCE: _Style(_ORANGE, "-.", "s", 1.6),
        CITER_S: _Style(_GREEN, (0, (5, 1)), "^", 1.6),
        ORACLE: _Style(_BLACK, ":", "*", 1.4),
    }
    if name in fixed:
        return fixed[name]
    number = citer_rounds([name])
    if not number:
        return _Style(_PURPLE, "-", "D", 1.6)
    if number[0] == rounds[-1]:  # the router that would be served
        return _Style(_VERMILION, "-", "o", 2.4)
    return _Style(_ROUND_COLOURS[rounds.index(number[0]) % len(_ROUND_COLOURS)], "-", "o", 1.6)
