"""Grading: extract the answer of a response and compare it with the example's.

Fed with the text of a response alone (never the prompt, whose wording states answers of its own), already cut
at EOS by ids. Read by rollouts, evaluation and the command line. A response without an answer is wrong, and
counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from citer_ray.answer_text import cut_at
from citer_ray.choice_answers import Choice, extract_choice
from citer_ray.errors import DataError
from citer_ray.examples import Example, Task
from citer_ray.math_answers import extract_math
from citer_ray.math_equality import math_equal

__all__ = ["Grade", "extract_answer", "grade"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response: `answered` is False where it states no answer, or two at once."""

    correct: bool
    answered: bool
    extracted: str | None


def extract_answer(
    text: str,
    task: Task,
    choices: Sequence[Choice] | None = None,
    *,
    stop_texts: Iterable[str] = (),
    last_number: bool = False,
) -> str | None:
    """The answer that a response states: a choice's label, or a math answer as written; None without one.

    Args:
        text: The response.
        task: How to read it.
        choices: The options; needed for `choice`.
        stop_texts: What follows the first of these (an EOS text, a stop string) does not count.
        last_number: For `math`: take the last number of a response that states no answer otherwise.
    """
    text = cut_at(text, stop_texts)
    if task == "math":
        return extract_math(text, last_number=last_number)
    if not choices:
        raise DataError("a multiple-choice response can only be read with the question's choices: pass `choices`")
    return extract_choice(text, choices)


def grade(response_text: str, example: Example, *, stop_texts: Iterable[str] = (), last_number: bool = False) -> Grade:
    """Grades a response against its example; see `extract_answer` for the arguments."""
    extracted = extract_answer(
        response_text, example.task, example.choices, stop_texts=stop_texts, last_number=last_number
    )
    if extracted is None:
        return Grade(correct=False, answered=False, extracted=None)
    same = extracted == example.answer if example.task == "choice" else math_equal(extracted, example.answer)
    return Grade(correct=same, answered=True, extracted=extracted)
