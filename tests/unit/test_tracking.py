"""Parameters and curves as trackers take them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from citer_ray import tracking
from citer_ray.config import CiterConfig
from citer_ray.tracking import MAX_KEY_LENGTH, MAX_PARAM_LENGTH, NullTracker, Tracker, curve_metrics, flatten_params
from citer_ray.tracking_backlog import BufferedTracker


def test_params_are_flat_text() -> None:
    params = {"a": {"b": {"c": 1.5}, "list": (1, "x"), "none": None, "flag": True}, "text": "plain", "empty": {}}
    assert flatten_params(params) == {
        "a.b.c": "1.5",
        "a.list": '[1, "x"]',
        "a.none": "null",
        "a.flag": "true",
        "text": "plain",
        "empty": "{}",
    }


def test_long_values_are_cut_but_stay_different() -> None:
    params = flatten_params({"a": "x" * 10_000, "b": "x" * 10_000 + "y", "c": "x" * MAX_PARAM_LENGTH})
    assert len(params["a"]) == len(params["b"]) == MAX_PARAM_LENGTH
    assert params["a"] != params["b"]
    assert params["c"] == "x" * MAX_PARAM_LENGTH
    (key,) = flatten_params({"k" * 300: 1})
    assert len(key) == MAX_KEY_LENGTH


def test_passwords_are_not_params() -> None:
    assert flatten_params({"tracking": {"uri": "http://me:secret@host"}}) == {"tracking.uri": "http://***@host"}


def test_every_config_fits(tmp_path: Path) -> None:
    config = CiterConfig.model_validate(
        {
            "name": "demo",
            "output_dir": str(tmp_path),
            "pair": {"slm": {"path": "a"}, "llm": {"path": "b"}},
            "data": {"collect": "c"},
        }
    )
    params = flatten_params(config.model_dump(mode="json"))
    assert params["pair.slm.path"] == "a"
    assert params["collect.thresholds"] == "[0.9, 0.97]"
    assert params["iterate.max_rounds"] == "3"


def test_curve_is_in_order_of_share_with_the_share_as_step() -> None:
    points = [{"llm_share": 0.1, "accuracy": 0.9}, {"llm_share": 0.0213, "accuracy": 0.5}]
    assert curve_metrics("frontier", points) == [
        ("frontier/llm_share", 0.0213, 213),
        ("frontier/accuracy", 0.5, 213),
        ("frontier/llm_share", 0.1, 1000),
        ("frontier/accuracy", 0.9, 1000),
    ]


@pytest.mark.parametrize("implementation", [NullTracker, BufferedTracker])
def test_implementations_have_the_protocol_s_signatures(implementation: type) -> None:
    methods = [name for name, value in vars(Tracker).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(methods) == 10
    for name in methods:
        assert inspect.signature(getattr(implementation, name)) == inspect.signature(getattr(Tracker, name)), name


def test_metric_names_are_distinct() -> None:
    names = [value for value in vars(tracking).values() if isinstance(value, str) and "/" in value]
    assert len(names) >= 9
    assert len(set(names)) == len(names)
