"""Grading: right, wrong and unanswered; text after a stop text; no text raises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from citer_ray.answers import Grade, extract_answer, grade
from citer_ray.choice_answers import Choice
from citer_ray.errors import DataError
from citer_ray.examples import Example


def choices_of(*texts: str, labels: str = "ABCDE") -> tuple[Choice, ...]:
    return tuple(Choice(label=label, text=text) for label, text in zip(labels, texts, strict=False))


ROOM = choices_of("library", "oven", "garage", "at hotel", "desk drawer")


def choice_example(choices: tuple[Choice, ...] = ROOM, answer: str = "C") -> Example:
    return Example(id="q", prompt="Where?", answer=answer, task="choice", choices=choices)


def math_example(answer: str) -> Example:
    return Example(id="q", prompt="How many?", answer=answer, task="math")


def test_text_after_a_stop_text_never_counts() -> None:
    text = r"\boxed{18}</s>Question: next \boxed{19}"
    assert extract_answer(text, "math", stop_texts=["</s>"]) == "18"
    assert extract_answer(text, "math", stop_texts=["Question:", "</s>", ""]) == "18"
    assert extract_answer(text, "math") == "19"
    assert extract_answer("</s>The answer is (a).", "choice", ROOM, stop_texts=["</s>"]) is None
    assert not grade(r"so</s>\boxed{18}", math_example("18"), stop_texts=["</s>"]).answered


def test_grades_tell_wrong_from_unanswered() -> None:
    example = choice_example(answer="C")
    assert grade("The answer is garage (c).", example) == Grade(True, True, "C")
    assert grade("The answer is oven (b).", example) == Grade(False, True, "B")
    assert grade("I do not know", example) == Grade(False, False, None)
    assert grade(r"\boxed{1{,}234}", math_example("1234")) == Grade(True, True, "1{,}234")
    assert grade(r"\boxed{5}", math_example("1234")) == Grade(False, True, "5")
    assert grade("1234 or so", math_example("1234")) == Grade(False, False, None)
    assert grade("1234", math_example("1234"), last_number=True).correct


def test_a_choice_question_needs_its_choices() -> None:
    with pytest.raises(DataError, match="pass `choices`"):
        extract_answer("The answer is (a).", "choice")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.from_regex(r"(the answer is |answer: |\\boxed\{|[(A-E). ,or{}\\$*\n]){1,30}"))
def test_arbitrary_text_never_raises(text: str) -> None:
    label = extract_answer(text, "choice", ROOM)
    assert label is None or label in "ABCDE"
    verdict = grade(text, choice_example())
    assert verdict.answered == (verdict.extracted is not None)
    number = extract_answer(text, "math", last_number=True)
    assert number is None or number.strip()


@pytest.mark.parametrize(
    "piece",
    [
        "the answer is ",
        "(a) ",
        "A or ",
        "not ",
        "oven ",
        " ",
        "\n",
        "$",
        r"\(",
        r"\boxed{",
        "}",
        "#### ",
        "1,",
        "=",
        "*",
        "is ",
    ],
)
def test_endless_text_takes_no_endless_time(piece: str) -> None:
    """Models that loop write such text; a pattern that backtracks would run into the test run's time limit."""
    text = "The answer is " + piece * (8000 // len(piece)) + "!"
    assert extract_answer(text, "choice", ROOM) in {None, *"ABCDE"}
    assert isinstance(extract_answer(text, "math", last_number=True), str | None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=2, max_size=5), st.text(max_size=80))
def test_arbitrary_choices_never_raise(texts: list[str], text: str) -> None:
    choices = choices_of(*texts)
    assert extract_answer(text, "choice", choices) in {None, *(choice.label for choice in choices)}
    assert extract_answer(f"The answer is ({choices[-1].label}).", "choice", choices) == choices[-1].label


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 10**6))
def test_the_last_box_of_many_counts(answer: int, other: int) -> None:
    text = rf"First \boxed{{{other}}}, then \boxed{{{answer:,}}}."
    assert grade(text, math_example(str(answer))).correct
