"""The configuration reference: complete, and equal to the committed page."""

from __future__ import annotations

from pathlib import Path

from citer_ray.config_docs import DEFAULT_PATH, render, write
from citer_ray.config_schema import config_schema

ROOT = Path(__file__).resolve().parents[2]


def test_committed_page_is_up_to_date() -> None:
    committed = (ROOT / DEFAULT_PATH).read_text(encoding="utf-8")
    assert committed == render(), "run: python -m citer_ray.config_docs"


def test_every_key_has_a_row_with_a_description() -> None:
    page = render()
    schema = config_schema()
    paths = list(schema.walk())
    assert len(paths) > 80
    for path in paths:
        key = schema.key_at(path)
        assert key is not None
        assert key.description, path
        if key.section is None or len(path) > 1:
            assert f"| `{key.name}` | {key.type_text.replace('|', chr(92) + '|')} |" in page


def test_write_replaces_the_page(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "configuration.md"
    write(path)
    assert write(path).read_text(encoding="utf-8") == render()
