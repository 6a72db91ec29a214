r"""One row of every format -> fields, and the rows that a converter refuses."""

from __future__ import annotations

from typing import Any

import pytest

from citer_ray.choice_answers import Choice
from citer_ray.errors import ConfigError, DataError
from citer_ray.example_formats import FORMATS, RowFields, convert_row

CHOICES = {"label": ["A", "B"], "text": ["bank", "mall"]}
TYPED = (Choice(label="A", text="bank"), Choice(label="B", text="mall"))

ROWS: dict[str, tuple[str, dict[str, Any], RowFields]] = {
    "CommonsenseQA": (
        "choice",
        {"id": "a", "question": "Where?", "question_concept": "x", "choices": CHOICES, "answerKey": "B"},
        RowFields(id="a", question="Where?", answer="B", task="choice", choices=TYPED),
    ),
    "ARC with numbers as labels": (
        "choice",
        {
            "id": "Mercury_7",
            "question": "Which?",
            "choices": {"text": ["ice", "fire"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        RowFields(
            id="Mercury_7",
            question="Which?",
            answer="2",
            task="choice",
            choices=(Choice(label="1", text="ice"), Choice(label="2", text="fire")),
        ),
    ),
    "OpenBookQA": (
        "openbookqa",
        {"id": "7-980", "question_stem": "The sun", "choices": CHOICES, "answerKey": "A"},
        RowFields(id="7-980", question="The sun", answer="A", task="choice", choices=TYPED),
    ),
    "MMLU": (
        "mmlu",
        {"question": "Which?", "subject": "law", "choices": ["bank", "mall"], "answer": 1},
        RowFields(id=None, question="Which?", answer="B", task="choice", choices=TYPED, family="law"),
    ),
    "GSM8K": (
        "gsm8k",
        {"question": "How many?", "answer": "2 * 617 = <<2*617=1234>>1234\n#### 1,234"},
        RowFields(
            id=None,
            question="How many?",
            reference="2 * 617 = <<2*617=1234>>1234\nThe final answer is: \\boxed{1,234}",
            answer="1,234",
            task="math",
        ),
    ),
    "MATH": (
        "math",
        {
            "problem": "Half?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"\boxed{1}, no, $\boxed{\frac{1}{2}}$",
        },
        RowFields(
            id=None,
            question="Half?",
            reference=r"\boxed{1}, no, $\boxed{\frac{1}{2}}$",
            answer=r"\frac{1}{2}",
            task="math",
            family="Algebra",
        ),
    ),
    "MATH-500": (
        "math",
        {
            "problem": "Half?",
            "solution": "Easy.",
            "answer": "0.5",
            "subject": "Algebra",
            "unique_id": "test/1.json",
        },
        RowFields(id="test/1.json", question="Half?", reference="Easy.", answer="0.5", task="math", family="Algebra"),
    ),
    "the authors' math without the known wording": (
        "math_prompted",
        {"prompt": "Do: 1 + 1", "cot": "2", "answerKey": 2},
        RowFields(id=None, question=None, prompt="Do: 1 + 1", reference="2", answer="2", task="math"),
    ),
    "plain, choices as texts, answer as text": (
        "plain",
        {
            "id": "x",
            "question": "Where?",
            "choices": ["bank", "mall"],
            "answer": "MALL",
            "reference": "The mall.",
        },
        RowFields(id="x", question="Where?", reference="The mall.", answer="B", task="choice", choices=TYPED),
    ),
    "plain, a choice whose text is another's label": (
        "plain",
        {"id": "x", "question": "Which?", "choices": ["b", "a"], "answer": "A"},
        RowFields(
            id="x",
            question="Which?",
            answer="A",
            task="choice",
            choices=(Choice(label="A", text="b"), Choice(label="B", text="a")),
        ),
    ),
    "plain, numbers": (
        "plain",
        {"id": 3, "question": "1 / 2?", "answer": 0.5, "solution": "half\n"},
        RowFields(id="3", question="1 / 2?", reference="half\n", answer="0.5", task="math"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_recognised_and_read(name: str) -> None:
    format_name, row, fields = ROWS[name]
    assert convert_row(row) == fields
    assert convert_row(row, format_name) == fields


def test_every_format_but_the_authors_prompts_has_a_row_here() -> None:
    assert {format_name for format_name, _, _ in ROWS.values()} == set(FORMATS)


REFUSED: list[tuple[object, str]] = [
    ([1, 2], "must be an object with fields, got list"),
    (None, "got null"),
    ({}, "unknown format with the fields none"),
    ({"text": "hello"}, "unknown format with the fields text: a plain row has id, prompt or question"),
    ({"question": "Where?", "choices": CHOICES, "answerKey": "A"}, "missing id"),
    ({"id": "  ", "question": "Where?", "choices": CHOICES, "answerKey": "A"}, "missing id"),
    (
        {"id": "a", "question": "Where?", "choices": CHOICES, "answerKey": "C"},
        r"'C' is not among the choices \(A: bank",
    ),
    ({"id": "a", "question": "Where?", "choices": CHOICES, "answerKey": ""}, "empty field: answerKey"),
    ({"id": "a", "question": " ", "choices": CHOICES, "answerKey": "A"}, "empty field: question"),
    ({"id": "a", "question": ["x"], "choices": CHOICES, "answerKey": "A"}, "question must be text, got list"),
    ({"id": "a", "question": True, "choices": CHOICES, "answerKey": "A"}, "question must be text, got bool"),
    (
        {"id": "a", "question": "Where?", "choices": CHOICES, "answerKey": "A", "answer": "mall", "cot": "x"},
        "answer 'mall' is not the text of the choice that answerKey names, A",
    ),
    (
        {"id": "a", "question": "Q", "choices": "AB", "answerKey": "A"},
        "choices must be lists of label and text, got str",
    ),
    ({"id": "a", "question": "Q", "choices": {"label": ["A"]}, "answerKey": "A"}, "choices must be lists"),
    (
        {"id": "a", "question": "Q", "choices": {"label": ["A"], "text": ["x"]}, "answerKey": "A"},
        "2 or more, got 1",
    ),
    (
        {"id": "a", "question": "Q", "choices": {"label": ["A", "B"], "text": ["x"]}, "answerKey": "A"},
        "as many labels as texts",
    ),
    (
        {"id": "a", "question": "Q", "choices": {"label": ["A", "a"], "text": ["x", "y"]}, "answerKey": "A"},
        "label twice",
    ),
    (
        {"id": "a", "question": "Q", "choices": {"label": ["A", "B"], "text": ["x", ""]}, "answerKey": "A"},
        "empty field: text",
    ),
    ({"question": "Q", "choices": ["x", "y"], "answer": 2}, "index 2, not among the 2 choices"),
    ({"question": "Q", "choices": ["x", "y"], "answer": -1}, "index -1, not among"),
    ({"question": "Q", "choices": ["x", "y"], "answer": True}, "index of a choice, got bool"),
    ({"question": "Q", "choices": ["x", "y"], "answer": None}, "index of a choice, got null"),
    ({"question": "Q", "answer": "#### "}, "does not end in a line"),
    ({"question": "Q", "answer": "5"}, "missing id"),
    ({"problem": "Q", "solution": "no box"}, r"solution has no \\boxed"),
    ({"problem": "Q", "solution": r"\boxed{1"}, r"solution has no \\boxed"),
    ({"problem": None, "solution": r"\boxed{1}"}, "missing field: problem"),
    ({"prompt": "", "cot": "x", "answerKey": "1"}, "empty field: prompt"),
    ({"id": "a", "prompt": "Q", "answer": " "}, "empty field: answer"),
    ({"id": "a", "prompt": " ", "answer": "1"}, "missing field: prompt or question"),
    ({"id": "a", "prompt": "Q", "answer": float("nan")}, "finite number, got nan"),
    ({"id": "a", "prompt": "Q", "answer": "1", "task": "poem"}, "task is 'poem': use choice or math"),
    ({"id": "a", "prompt": "Q", "answer": "1", "task": "choice"}, "missing field: choices"),
    ({"id": "a", "prompt": "\ud800", "answer": "1"}, "lone surrogate"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_bad_rows_are_refused_with_the_reason(row: object, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        convert_row(row)


def test_an_unknown_format_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="use auto, choice, openbookqa"):
        convert_row({"id": "x"}, "csv")


def test_a_named_format_reads_only_its_own_rows() -> None:
    with pytest.raises(DataError, match="missing field: problem"):
        convert_row({"id": "a", "question": "Q", "answer": "1"}, "math")
