"""The picture: every method on it, told apart without colour, and no matplotlib state touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from citer_ray.frontier import Frontier, MethodCurve, Point
from citer_ray.plotting import plot_frontier

METHODS = ("random", "confidence", "citer_s", "citer_round_1", "citer_round_2", "oracle")


def make_point(accuracy: float, share: float, n: int = 50) -> Point:
    total = np.full(n, 100)
    return Point(0.5, np.arange(n) < round(accuracy * n), np.full(n, round(100 * share)), total, total, total)


def make_frontier(methods: tuple[str, ...] = METHODS) -> Frontier:
    curves = {
        name: MethodCurve(name, (make_point(0.5 + 0.06 * i, 0.05), make_point(0.55 + 0.06 * i, 0.4)))
        for i, name in enumerate(methods)
    }
    return Frontier(make_point(0.4, 0), make_point(0.9, 1), curves, resamples=20)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The keyword arguments of every labelled line."""
    calls: list[dict[str, object]] = []
    plot = Axes.plot

    def record(self: Axes, *args: object, **kwargs: object) -> object:
        if "label" in kwargs:
            calls.append(kwargs)
        return plot(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "plot", record)
    return calls


def test_picture_is_a_png_of_readme_width(tmp_path: Path) -> None:
    path = plot_frontier(make_frontier(), tmp_path / "new", title="Demo")
    assert path == tmp_path / "new" / "frontier.png"
    height, width, _ = imread(path).shape
    assert (width, height) == (1200, 660)


def test_same_frontier_same_picture(tmp_path: Path) -> None:
    first = plot_frontier(make_frontier(), tmp_path / "a").read_bytes()
    assert plot_frontier(make_frontier(), tmp_path / "b").read_bytes() == first
    assert plot_frontier(make_frontier(), tmp_path / "c", max_share=0.5).read_bytes() != first


def test_methods_differ_by_colour_and_neighbours_also_without_it(
    tmp_path: Path, drawn: list[dict[str, object]]
) -> None:
    plot_frontier(make_frontier(), tmp_path)
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
    plot_frontier(make_frontier(("citer_round_1", "citer_round_2", "citer_round_9")), tmp_path)
    widths = {str(line["label"]): line["linewidth"] for line in drawn}
    assert max(widths, key=lambda label: str(widths[label])) == "CITER round 9"
    assert widths["CITER round 1"] == widths["CITER round 2"] != widths["CITER round 9"]


@pytest.mark.parametrize("methods", [(), ("mine",), ("random",)])
def test_any_set_of_methods_can_be_drawn(tmp_path: Path, methods: tuple[str, ...]) -> None:
    assert plot_frontier(make_frontier(methods), tmp_path).stat().st_size > 10_000


def test_pyplot_is_not_imported() -> None:
    """pyplot picks a backend and keeps every figure alive; a job on a cluster needs neither."""
    code = "import sys, citer_ray.plotting; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
