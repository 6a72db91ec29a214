"""Tables at the end of a stage: every count is there, and an empty label set is no division by zero."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from citer_ray.stage_tables import labels_table
from tests.unit.test_label_store import make_manifest


def shown(table: Table) -> str:
    buffer = StringIO()
    Console(file=buffer, width=100).print(table)
    return buffer.getvalue()


def test_the_labels_table_has_counts_shares_and_speed() -> None:
    manifest = make_manifest(
        round=2,
        examples=1200,
        quarantined=7,
        positions=4000,
        cases={"llm_correct": 600},
        labels=4000,
        slm_labels=3400.0,
        tokens_per_second=1234.4,
    )
    text = shown(labels_table(2, manifest))
    for part in ("labels of round 2", "1,200 (7 set aside)", "600 (15.0%)", "85.0% prefer the SLM", "1,234 tokens/s"):
        assert part in text


def test_a_label_set_without_labels_divides_by_nothing() -> None:
    empty = make_manifest(positions=0, labels=0, slm_labels=0.0, cases={"slm_correct": 0})
    assert "0 (0.0%)" in shown(labels_table(1, empty))
