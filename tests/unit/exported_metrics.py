"""The series that the code exports to Prometheus, read from its text: the metrics' classes cannot be built without Ray.

For the tests of the dashboard, the alerts and the runbook.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def our_names(text: str) -> set[str]:
    """Names of our series in a query or a text."""
    return set(re.findall(r"\b\w*citer_(?!ray\b)\w+", text))


def labels_of(query: str) -> set[str]:
    """Labels by which a query groups or filters."""
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    return grouped | set(re.findall(r"(\w+)=~?\"", query))
