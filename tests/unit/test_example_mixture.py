"""A mixture of sources: they take turns, within a limit, and keep apart what has the same id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from citer_ray.config import DataConfig
from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError
from citer_ray.example_mixture import load_mixture
from citer_ray.examples import LoadedExamples, load_examples
from citer_ray.preparation import load_purpose, prepare

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def write(path: Path, questions: list[str]) -> str:
    rows = [
        {"id": number, "question": question, "reference": "So \\boxed{1}", "answer": "1", "task": "math"}
        for number, question in enumerate(questions, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(source: str, limit: int | None) -> LoadedExamples:
    return load_examples(source, limit=limit)


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "a.jsonl", ["a1", "a2", "a3"]), write(tmp_path / "b.jsonl", ["b1"])]


def test_sources_take_turns(sources: list[str]) -> None:
    loaded = load_mixture(sources, None, load)
    assert [example.prompt for example in loaded] == ["a1", "b1", "a2", "a3"]
    assert [example.id for example in loaded] == ["1:1", "2:1", "1:2", "1:3"]


def test_a_limit_is_of_all_sources(sources: list[str]) -> None:
    assert [example.prompt for example in load_mixture(sources, 3, load)] == ["a1", "b1", "a2"]


def test_one_source_stays_as_it_is(sources: list[str]) -> None:
    assert load_mixture(sources[:1], None, load) == load(sources[0], None)


def test_bad_rows_of_all_sources_are_kept(sources: list[str]) -> None:
    with Path(sources[1]).open("a", encoding="utf-8") as file:
        file.write("broken\n")
    (row,) = load_mixture(sources, None, load).quarantined
    assert (row.source, row.row) == (sources[1], 2)


def test_a_configuration_takes_a_list(sources: list[str], tmp_path: Path) -> None:
    names = ", ".join(sources)
    settings = [
        f"output_dir={tmp_path / 'run'}",
        f"data.collect=[{names}, 'embedded:collect:4']",
        "data.validation=null",
    ]
    config = load_config(SMOKE, [*settings, "data.collect_limit=6"])
    prepared = prepare(config)
    ids = [example.id for purpose in ("collect", "validation") for example in load_purpose(prepared, purpose)]
    assert len(ids) == len(set(ids)) == 6
    assert {ident.partition(":")[0] for ident in ids} == {"1", "2", "3"}


@pytest.mark.parametrize("value", ["[]", "''", "[a.jsonl, '']", "3"])
def test_no_source_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.collect"):
        load_config(SMOKE, [f"output_dir={tmp_path}", f"data.collect={value}"])


def test_the_field_says_what_it_takes() -> None:
    assert "or several" in str(DataConfig.model_fields["collect"].description)
