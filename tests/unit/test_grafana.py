"""The Grafana dashboard asks for metrics that the code exports, in the form in which Ray exports them.

The code is read as text: the metrics' classes cannot be built without Ray.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "infra" / "grafana" / "citer-ray.json").read_text("utf-8"))
SUFFIXES = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}


def exported() -> dict[str, set[str]]:
    """Exported series and the labels that each has."""
    source = (ROOT / "citer_ray" / "on_ray" / "serve_metrics.py").read_text("utf-8")
    series: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SUFFIXES:
            name = ast.literal_eval(node.args[0])
            last = node.args[-1]
            labels = set(ast.literal_eval(last)) if isinstance(last, ast.Tuple) else set()
            for suffix in SUFFIXES[node.func.id]:
                series[f"ray_{name}{suffix}"] = labels | ({"le"} if suffix == "_bucket" else set())
    return series


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def names(query: str) -> set[str]:
    return set(re.findall(r"\b\w*citer_\w+", query))


def test_every_metric_exists() -> None:
    known = exported()
    assert len(known) > 15 and len(queries()) > 20
    for query in queries():
        assert names(query), query
        assert names(query) <= known.keys(), query


def test_every_metric_is_shown() -> None:
    shown = {re.sub(r"_(total|bucket)$", "", name) for query in queries() for name in names(query)}
    assert shown == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in exported()}


def test_every_label_exists() -> None:
    known = exported()
    for query in queries():
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        filtered = set(re.findall(r"(\w+)=\"", query))
        for name in names(query):
            assert grouped | filtered <= known[name], query


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
