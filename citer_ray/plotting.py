"""`frontier.png`: accuracy against LLM share, one line for each method.

Fed by a `Frontier`; the picture is shown in the report, in the README and in MLflow. Drawn with matplotlib's Agg
canvas directly, so that no display, no global state and no backend choice is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from citer_ray.frontier import CITER_S, CONFIDENCE, LLM, ORACLE, RANDOM, SLM, Frontier, citer_rounds
from citer_ray.report_text import PLOT_NAME, method_label

# Okabe and Ito's palette, told apart also by colour-blind readers; lines differ in dash and marker besides.
_GREY, _ORANGE, _SKY, _GREEN = "#7f7f7f", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE, _BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
_ROUND_COLOURS = (_SKY, _BLUE, _PURPLE, _BLACK)
_SIZE_INCHES = (8.0, 4.4)
_DPI = 150  # 1200 pixels wide: sharp at a README's 800
_GRID = 121


@dataclass(frozen=True, slots=True)
class _Style:
    colour: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str
    width: float


def plot_frontier(frontier: Frontier, output_dir: str | Path, *, title: str = "", max_share: float = 0.2) -> Path:
    """Draw `frontier.png` into the output folder.

    Args:
        frontier: the methods to draw.
        output_dir: folder of the picture.
        title: shown above the axes.
        max_share: right end of the axis, as an LLM share.
    """
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in frontier.curves:
        _draw_method(axes, frontier, name, max_share)
    _draw_end_points(axes, frontier, max_share)
    _dress(figure, axes, frontier, title, max_share)
    path = Path(output_dir) / PLOT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": "citer_ray"})
    return path


def _draw_method(axes: Axes, frontier: Frontier, name: str, max_share: float) -> None:
    style = _style(name, citer_rounds(frontier.curves))
    shares = np.unique(np.concatenate([np.linspace(0, max_share, _GRID), _shares(frontier, name, max_share)]))
    curve = frontier.accuracy(name, shares.tolist())
    percent = 100 * shares
    if name != ORACLE:  # its band lies over the curves that matter
        low = [100 * interval.low for interval in curve]
        high = [100 * interval.high for interval in curve]
        axes.fill_between(percent, low, high, color=style.colour, alpha=0.14, linewidth=0)
    axes.plot(
        percent,
        [100 * interval.value for interval in curve],
        color=style.colour,
        linestyle=style.dashes,
        linewidth=style.width,
        marker=style.marker,
        markevery=[],  # shows the marker in the legend; the measured points are drawn below
        markersize=5,
        label=method_label(name),
    )
    points = [point for point in frontier.points(name) if point.llm_share <= max_share]
    axes.plot(
        [100 * point.llm_share for point in points],
        [100 * point.accuracy for point in points],
        color=style.colour,
        marker=style.marker,
        markersize=5,
        linestyle="none",
    )


def _draw_end_points(axes: Axes, frontier: Frontier, max_share: float) -> None:
    """Horizontal lines for both models alone, labelled on the lines themselves."""
    for name, point, above in ((LLM, frontier.llm, True), (SLM, frontier.slm, False)):
        level = 100 * point.accuracy
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


def _dress(figure: Figure, axes: Axes, frontier: Frontier, title: str, max_share: float) -> None:
    axes.set_xlim(0, 100 * max_share)
    low, high = axes.get_ylim()
    room = 0.06 * (high - low)  # for the labels of the end points' lines
    axes.set_ylim(max(0, low - room), min(104, high + room))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_xlabel("LLM share (tokens written by the LLM / all tokens)")
    axes.set_ylabel(f"accuracy ({frontier.num_examples} examples)")
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    order = _by_area(frontier, max_share)
    by_label = dict(zip(labels, handles, strict=True))
    if order:
        names = [method_label(name) for name in order]
        figure.legend(
            [by_label[name] for name in names],
            names,
            loc="outside right center",
            frameon=False,
            handlelength=2.6,
            title=f"band: {100 * frontier.confidence:g} % interval",
            title_fontsize=9,
        )


def _by_area(frontier: Frontier, max_share: float) -> list[str]:
    """Methods from best to worst, so that the legend reads in the order of the lines."""
    areas = {name: frontier.area(name, max_share=max_share).value for name in frontier.curves}
    return sorted(areas, key=lambda name: -areas[name])


def _shares(frontier: Frontier, name: str, max_share: float) -> list[float]:
    return [point.llm_share for point in frontier.points(name) if point.llm_share <= max_share]


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
