"""The picture: every method on it, told apart without colour, and no matplotlib state touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from citer_ray.errors import DataError
from citer_ray.frontier import Frontier, MethodCurve, Point
from citer_ray.plotting import plot_frontier
from citer_ray.report import build_report, load_report, write_report
from citer_ray.report_schema import Report

METHODS = ("random", "confidence", "citer_s", "citer_round_1", "citer_round_2", "oracle")


def make_point(accuracy: float, share: float, n: int = 50) -> Point:
    total = np.full(n, 100)
    return Point(0.5, np.arange(n) < round(accuracy * n), np.full(n, round(100 * share)), total, total, total)


def make_report(methods: tuple[str, ...] = METHODS) -> Report:
    curves = {
        name: MethodCurve(name, (make_point(0.5 + 0.06 * i, 0.05), make_point(0.55 + 0.06 * i, 0.4)))
        for i, name in enumerate(methods)
    }
    frontier = Frontier(make_point(0.4, 0), make_point(0.9, 1), curves, resamples=20)
    return build_report(frontier, pair={})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The keyword arguments of every labelled line."""
    calls: list[dict[str, object]] = []
    plot = Axes.plot

    def record(self: Axes, *args: object, **kwargs: object) -> object:
        if "label" in kwargs:
            calls.append({"x": args[0], "y": args[1], **kwargs})
        return plot(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "plot", record)
    return calls


def test_picture_is_a_png_of_readme_width(tmp_path: Path) -> None:
    path = plot_frontier(make_report(), tmp_path / "new" / "frontier.png", title="Demo")
    assert path == tmp_path / "new" / "frontier.png"
    height, width, _ = imread(path).shape
    assert (width, height) == (1200, 660)


def test_same_frontier_same_picture(tmp_path: Path) -> None:
    first = plot_frontier(make_report(), tmp_path / "a.png").read_bytes()
    assert plot_frontier(make_report(), tmp_path / "b.png").read_bytes() == first
    assert plot_frontier(make_report(), tmp_path / "c.png", max_share=0.5).read_bytes() != first


def test_saved_report_gives_the_same_picture(tmp_path: Path) -> None:
    json_path, _ = write_report(make_report(), tmp_path)
    first = plot_frontier(make_report(), tmp_path / "a.png").read_bytes()
    assert plot_frontier(load_report(json_path), tmp_path / "b.png").read_bytes() == first


def test_curve_passes_through_every_measured_point(tmp_path: Path, drawn: list[dict[str, object]]) -> None:
    plot_frontier(make_report(("random",)), tmp_path / "a.png")
    (line,) = drawn
    path = set(zip(np.round(line["x"], 6), np.round(line["y"], 6), strict=True))  # type: ignore[call-overload]
    assert {(0.0, 40.0), (5.0, 50.0), (40.0, 56.0), (100.0, 90.0)} <= path


def test_report_without_end_points(tmp_path: Path) -> None:
    report = make_report()
    cut = report.model_copy(update={"methods": {n: m for n, m in report.methods.items() if n != "llm"}})
    with pytest.raises(DataError, match="no method llm"):
        plot_frontier(cut, tmp_path / "a.png")


def test_methods_differ_by_colour_and_neighbours_also_without_it(
    tmp_path: Path, drawn: list[dict[str, object]]
) -> None:
    plot_frontier(make_report(), tmp_path / "a.png")
    assert [line["label"] for line in drawn] == [
        "random",
        "confidence",
        "CITER-S",
        "CITER round 1",
        "CITER round 2",
        "oracle",
    ]
    assert len({line["color"] for line in drawn}) == len(METHODS)
    assert len({(line["marker"], str(line["linestyle"]), line["linewidth"]) for line in drawn}) == len(METHODS)


def test_last_round_stands_out_whatever_its_number(tmp_path: Path, drawn: list[dict[str, object]]) -> None:
    plot_frontier(make_report(("citer_round_1", "citer_round_2", "citer_round_9")), tmp_path / "a.png")
    widths = {str(line["label"]): line["linewidth"] for line in drawn}
    assert max(widths, key=lambda label: str(widths[label])) == "CITER round 9"
    assert widths["CITER round 1"] == widths["CITER round 2"] != widths["CITER round 9"]


@pytest.mark.parametrize("methods", [(), ("mine",), ("random",)])
def test_any_set_of_methods_can_be_drawn(tmp_path: Path, methods: tuple[str, ...]) -> None:
    assert plot_frontier(make_report(methods), tmp_path / "a.png").stat().st_size > 10_000


def test_pyplot_is_not_imported() -> None:
    """pyplot picks a backend and keeps every figure alive; a job on a cluster needs neither."""
    code = "import sys, citer_ray.plotting; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
