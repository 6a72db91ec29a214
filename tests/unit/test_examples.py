"""Loading: the authors' files as they are, bad rows set aside or raised, ids, digests, the split by id."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from citer_ray.errors import ConfigError, DataError
from citer_ray.examples import Choice, Example, load_examples, split_examples

DATA = Path(__file__).parents[1] / "data"
THREE = (Choice(label="A", text="library"), Choice(label="B", text="oven"), Choice(label="C", text="garage"))


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def plain(id: object, **fields: Any) -> dict[str, Any]:
    return {"id": id, "question": f"What is {id}?", "reference": r"It is \boxed{1}.", "answer": "1", **fields}


def test_the_authors_multiple_choice_with_rationales() -> None:
    loaded = load_examples(DATA / "citer_choice_train.jsonl")
    assert not loaded.quarantined
    assert [example.id for example in loaded] == ["c1", "c2"]
    first = loaded.examples[0]
    assert first.prompt.startswith("Question: Where would you bake a cake?\nChoices:\nA. library\n")
    assert first.prompt.endswith("Answer and Reasoning:")
    assert first.full_prompt
    assert first.question == "Where would you bake a cake?"
    assert first.reference == "Cakes are baked in heat. Therefore, the answer is oven (b)."
    assert (first.task, first.answer, first.choices, first.row) == ("choice", "B", THREE, 1)
    assert first.source.endswith("citer_choice_train.jsonl")


def test_the_authors_multiple_choice_without_rationales() -> None:
    loaded = load_examples(DATA / "citer_choice_test.jsonl", require_reference=False)
    assert [(example.id, example.answer, example.reference) for example in loaded] == [
        ("t1", "A", ""),
        ("t2", "C", ""),
    ]
    assert loaded.examples[0].prompt == "Where would you read?"
    assert not loaded.examples[0].full_prompt


def test_the_authors_math_with_rationales() -> None:
    loaded = load_examples(DATA / "citer_math_train.jsonl")
    assert [example.answer for example in loaded] == ["12", "40,000"]
    assert loaded.examples[1].question == "A truck carries 20,000 bricks\nand then as many again. How many is that?"
    assert all(example.full_prompt and example.prompt.endswith("\nSolution: ") for example in loaded)
    assert all(example.id.startswith("sha256:") for example in loaded)


def test_the_authors_math_without_rationales() -> None:
    loaded = load_examples(DATA / "citer_math_test.jsonl")
    assert [example.answer for example in loaded] == ["14", r"\frac{1}{2}"]
    assert loaded.examples[0].reference.endswith(r"The answer is \boxed{14}.")


def test_the_plain_format() -> None:
    first, second, third = load_examples(DATA / "plain.jsonl").examples
    assert (first.id, first.prompt, first.answer, first.task) == ("p1", "What is 2 + 2?", "4", "math")
    assert (second.id, second.answer, second.family) == ("2", "B", "capitals")
    assert (second.full_prompt, second.question, second.row) == (True, None, 2)
    assert (third.reference, third.answer, third.row) == (" 0.25", "0.25", 4)
    assert (third.prompt, third.question) == ("Q: 1/4 as a decimal?\nA:", "What is 1/4 as a decimal?")


def test_formats_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    names = ("citer_choice_train", "citer_math_train", "citer_math_test", "plain")
    path.write_text("".join((DATA / f"{name}.jsonl").read_text() for name in names))
    assert len(load_examples(path)) == 9


def test_embedded_problems() -> None:
    loaded = load_examples("embedded:collect:30", task="math")
    assert len(loaded) == 30
    assert all(f"\\boxed{{{example.answer}}}" in example.reference for example in loaded)
    assert all(example.family and not example.full_prompt for example in loaded)
    assert loaded.digest == load_examples("embedded:collect:30").digest
    assert len(load_examples("embedded:collect:30", limit=7)) == 7


def test_bad_rows_are_set_aside_with_number_id_and_reason(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        plain("a"),
        '{"id": "b", ',
        plain("c", reference="  "),
        plain("a", question="Another?"),
        "",
        plain("d", answer=None),
        {key: value for key, value in plain("e").items() if key != "id"},
        [1],
        plain("f"),
        plain("g", choices=["x", "y"], answer="z"),
    )
    loaded = load_examples(path)
    assert [example.id for example in loaded] == ["a", "f"]
    reasons = {bad.row: bad.reason for bad in loaded.quarantined}
    assert list(reasons) == [2, 3, 4, 6, 7, 8, 10]
    assert "not valid JSON" in reasons[2]
    assert "empty reference" in reasons[3]
    assert "duplicate id 'a': row 1 has it already" in reasons[4]
    assert reasons[6] == "missing field: answer"
    assert "missing id" in reasons[7]
    assert "must be an object" in reasons[8]
    assert "'z' is not among the choices (A: x; B: y)" in reasons[10]
    assert [bad.id for bad in loaded.quarantined] == [None, "c", "a", "d", None, None, "g"]
    assert {bad.source for bad in loaded.quarantined} == {str(path)}


@pytest.mark.parametrize("bad", ["{", plain("b", reference=""), plain("a"), {"text": "x"}])
def test_a_bad_row_may_be_raised(tmp_path: Path, bad: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", plain("a"), bad, plain("c"))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: "):
        load_examples(path, on_error="raise")


def test_a_reference_is_needed_only_on_demand(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", plain("a", reference=""), plain("b"))
    assert len(load_examples(path)) == 1
    assert len(load_examples(path, require_reference=False)) == 2


def test_rows_of_another_task_are_set_aside(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", plain("a"), plain("b", choices=["1", "2"]))
    loaded = load_examples(path, task="choice")
    assert [example.id for example in loaded] == ["b"]
    assert "the row's task is math, but choice is asked for" in loaded.quarantined[0].reason


def test_a_file_without_a_good_row_shows_three_reasons(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", "{", plain("a", answer=""), "[]", "null")
    with pytest.raises(DataError) as caught:
        load_examples(path)
    message = str(caught.value)
    assert "rows.jsonl has no usable row among 4: row 1: not valid JSON" in message
    assert "row 2: empty field: answer; row 3: a row must be" in message
    assert "row 4" not in message


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl holds no rows"):
        load_examples(path)


def test_the_limit_counts_good_examples(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", plain("a"), "{", plain("b"), "{", plain("c"))
    loaded = load_examples(path, limit=2)
    assert [example.id for example in loaded] == ["a", "b"]
    assert [bad.row for bad in loaded.quarantined] == [2]
    with pytest.raises(ConfigError, match="limit is 0"):
        load_examples(path, limit=0)


def test_an_unknown_format_is_refused_before_the_file_is_opened() -> None:
    with pytest.raises(ConfigError, match="unknown example format 'csv'"):
        load_examples("nowhere.jsonl", format="csv")


def test_ids_made_from_content_are_stable_and_find_repeated_rows(tmp_path: Path) -> None:
    rows = [{"problem": f"What is {n}?", "solution": rf"\boxed{{{n}}}"} for n in range(3)]
    loaded = load_examples(write_rows(tmp_path / "a.jsonl", *rows))
    turned = load_examples(write_rows(tmp_path / "b.jsonl", *rows[::-1], {**rows[1], "level": "easy"}))
    assert {example.id for example in loaded} == {example.id for example in turned}
    assert turned.quarantined[0].row == 4
    assert "the rows say the same" in turned.quarantined[0].reason


def test_the_digest_depends_on_contents_and_order_alone(tmp_path: Path) -> None:
    digest = load_examples(write_rows(tmp_path / "a.jsonl", plain("a"), plain("b"))).digest
    assert load_examples(write_rows(tmp_path / "b.jsonl", "{", plain("a"), plain("b"))).digest == digest
    assert load_examples(write_rows(tmp_path / "c.jsonl", plain("b"), plain("a"))).digest != digest
    assert load_examples(write_rows(tmp_path / "d.jsonl", plain("a"), plain("b", answer="2"))).digest != digest
    assert len(digest) == 64


def test_an_example_survives_a_round_trip() -> None:
    for example in load_examples(DATA / "citer_choice_train.jsonl"):
        assert Example(**example.model_dump()) == example
        assert Example.model_validate_json(example.model_dump_json()) == example
        assert {example: 1}[example] == 1


def test_an_example_checks_itself() -> None:
    with pytest.raises(ValidationError, match="not a label of the choices"):
        Example(id="x", prompt="Q", answer="D", task="choice", choices=THREE)
    with pytest.raises(ValidationError, match="not a label of the choices"):
        Example(id="x", prompt="Q", answer="A", task="choice")
    with pytest.raises(ValidationError, match="at least 1 character"):
        Example(id="", prompt="Q", answer="1", task="math")


def examples_named(*ids: str) -> list[Example]:
    return [Example(id=id, prompt="Q", answer="1", task="math") for id in ids]


def test_the_split_is_exact_disjoint_and_stable_under_reordering() -> None:
    examples = examples_named(*(f"e{n}" for n in range(50)))
    kept, held_out = split_examples(examples, 0.2, seed=3)
    assert len(held_out) == 10
    assert sorted(example.id for example in (*kept, *held_out)) == sorted(example.id for example in examples)
    assert list(kept) == [example for example in examples if example in kept]
    shuffled = random.Random(0).sample(examples, len(examples))
    assert set(split_examples(shuffled, 0.2, seed=3)[1]) == set(held_out)
    assert set(split_examples(examples, 0.2, seed=4)[1]) != set(held_out)
    assert set(split_examples(examples, 0.1, seed=3)[1]) < set(held_out)


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(2, 0.01, 1), (2, 0.99, 1), (1, 0.4, 0), (5, 0.0, 0), (5, 1.0, 5), (0, 0.5, 0)],
)
def test_small_splits(count: int, fraction: float, held_out: int) -> None:
    kept, held = split_examples(examples_named(*map(str, range(count))), fraction, seed=0)
    assert (len(kept), len(held)) == (count - held_out, held_out)


def test_splits_that_make_no_sense_are_refused() -> None:
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            split_examples(examples_named("a"), fraction, seed=0)
    with pytest.raises(DataError, match="1 of 2 examples repeat an id"):
        split_examples(examples_named("a", "a"), 0.5, seed=0)
