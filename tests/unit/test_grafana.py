"""The Grafana dashboard asks for metrics that the code exports, in the form in which Ray exports them."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.unit.exported_metrics import ROOT, exported, labels_of, our_names

DASHBOARD: dict[str, Any] = json.loads((ROOT / "infra" / "grafana" / "citer-ray.json").read_text("utf-8"))


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_metric_exists() -> None:
    known = exported()
    assert len(known) > 15 and len(queries()) > 20
    for query in queries():
        assert our_names(query), query
        assert our_names(query) <= known.keys(), query


def test_every_metric_is_shown() -> None:
    shown = {re.sub(r"_(total|bucket)$", "", name) for query in queries() for name in our_names(query)}
    assert shown == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in exported()}


def test_every_label_exists() -> None:
    known = exported()
    for query in queries():
        for name in our_names(query):
            assert labels_of(query) <= known[name], query


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
