r"""Boxes, statements and sentences in a response's text."""

from __future__ import annotations

import pytest

from citer_ray.answer_text import (
    MAX_STATEMENT,
    answer_statements,
    boxed_statements,
    cut_at,
    last_boxed,
    last_sentence,
    verdict_statements,
)


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", ["1", r"\frac{1}{2}"]),
        (r"\boxed{\boxed{1} 2}", [r"\boxed{1} 2", "1"]),
        (r"\boxed{\{1\}}", [r"\{1\}"]),
        (r"\boxed{1} } \boxed{2} {", ["1", "2"]),
        (r"\boxed{1 \boxed{2}", ["2"]),
        (r"\boxed{} \boxed{ } \boxed", []),
        (r"\unboxed{1} \boxes{1}", []),
        ("\\boxed{1\n+ 2}", ["1\n+ 2"]),
        (r"\boxed{\\}", [r"\\"]),
    ],
)
def test_boxes(text: str, contents: list[str]) -> None:
    assert [box.text for box in boxed_statements(text)] == contents
    assert last_boxed(text) == (contents[-1] if contents else None)


def test_statements_keep_their_order_and_positions() -> None:
    text = "The answer is 1.5 m. Then\nAnswer:\n\n 2\n"
    found = answer_statements(text)
    assert [statement.text for statement in found] == ["1.5 m", "2"]
    assert [text[statement.start :].split()[0] for statement in found] == ["answer", "Answer:"]


def test_a_full_stop_inside_a_name_ends_no_sentence() -> None:
    text = "The answer is St. Louis. It is big"
    position = text.index(". Louis")
    assert answer_statements(text)[0].text == "St"
    assert answer_statements(text, lambda at: at == position)[0].text == "St. Louis"
    assert last_sentence("It is St. Louis.") == "Louis"
    assert last_sentence("It is St. Louis.", lambda at: at == 8) == "It is St. Louis"


def test_verdicts_name_what_stands_before_them() -> None:
    text = "First. Thus, C is the correct answer. A is not correct! B is wrong"
    assert [statement.text.strip() for statement in verdict_statements(text)] == ["Thus, C"]


def test_long_statements_are_cut() -> None:
    assert len(answer_statements("the answer is " + "x" * 2000)[0].text) == MAX_STATEMENT
    assert last_sentence("x" * 2000 + "end. ").endswith("end")


@pytest.mark.parametrize(
    ("text", "sentence"), [("One. Two!\n\n ...", "Two"), ("", ""), ("...", ""), ("One", "One"), ("a.b", "a.b")]
)
def test_the_last_sentence(text: str, sentence: str) -> None:
    assert last_sentence(text) == sentence


def test_the_first_of_several_stops_counts() -> None:
    assert cut_at("a</s>b<end>c", ["<end>", "</s>"]) == "a"
    assert cut_at("abc", ["", "x"]) == "abc"
