"""The schema in words."""

from __future__ import annotations

import pytest

from citer_ray.config_schema import config_schema


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("seed", "integer"),
        ("pair.slm.dtype", "`auto` or `float32` or `bfloat16` or `float16`"),
        ("data.task", "`choice` or `math`, or null"),
        ("collect.thresholds", "list of numbers"),
        ("evaluate.llm_shares", "list of numbers >= 0 and <= 1"),
        ("engine.max_rows", "integer >= 1"),
        ("router.dropout", "number >= 0 and < 1"),
        ("pair", "section"),
        ("collect.shortcut", "true or false"),
        ("serve.slm.resources", "names, each with a number > 0"),
    ],
)
def test_types_in_words(path: str, text: str) -> None:
    key = config_schema().key_at(path.split("."))
    assert key is not None
    assert key.type_text == text


def test_defaults_and_required_keys() -> None:
    schema = config_schema()
    required = schema.key_at(["pair", "slm", "path"])
    optional = schema.key_at(["fit", "patience"])
    assert required is not None
    assert optional is not None
    assert (required.required, required.default) == (True, "")
    assert (optional.required, optional.default) == (False, "5")


@pytest.mark.parametrize("path", [[], ["nothing"], ["seed", "deeper"], ["collect", "slm", "count", "x"]])
def test_paths_that_lead_nowhere(path: list[str]) -> None:
    assert config_schema().key_at(path) is None


def test_sections_are_told_from_values() -> None:
    schema = config_schema()
    assert schema.section_at([]) is not None
    assert schema.section_at(["collect", "slm"]) is not None
    assert schema.section_at(["seed"]) is None
    assert schema.section_at(["nothing", "more"]) is None
