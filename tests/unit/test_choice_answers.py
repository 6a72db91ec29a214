"""Multiple choice: the forms that models write, and what must not count as an answer."""

from __future__ import annotations

import pytest

from citer_ray.choice_answers import Choice, extract_choice


def choices_of(*texts: str, labels: str = "ABCDE") -> tuple[Choice, ...]:
    return tuple(Choice(label=label, text=text) for label, text in zip(labels, texts, strict=False))


ROOM = choices_of("library", "oven", "garage", "at hotel", "desk drawer")
CITIES = choices_of("St. Louis", "Mt. Airy", "Washington D.C.", "drawer", "desk drawer")
NUMBERED = choices_of("2", "4", "16", "apples", labels="1234")
WORDS = choices_of("have fun", "Vitamin C", "a plan", "to be happy", "I", labels="abcde")
AMOUNTS = choices_of("5", "1.5", "15", "$20")

CHOICE_FORMS = [
    # labels
    ("(c)", "C"),
    ("(C)", "C"),
    ("C.", "C"),
    ("C", "C"),
    ("c", "C"),
    (" c) ", "C"),
    ("[B]", "B"),
    ("**D**", "D"),
    ("__D__", "D"),
    ("`B`", "B"),
    ("C. garage", "C"),
    ("C: garage", "C"),
    ("B) An oven is hot, and cakes are baked there.", "B"),
    # statements
    ("The answer is C", "C"),
    ("the answer is c", "C"),
    ("THE ANSWER IS (C)!", "C"),
    ("Therefore, the answer is garage (c).", "C"),
    ("answer: (B) oven", "B"),
    ("Answer: B. oven", "B"),
    ("Answer:\n\nB", "B"),
    ("## Answer\nB", "B"),
    ("**Answer:** B", "B"),
    ("**Answer**: **B**", "B"),
    ("Final answer = B", "B"),
    ("The correct option is (D).", "D"),
    ("The correct answer would be option E.", "E"),
    ("I would pick B.", "B"),
    ("We choose (e)", "E"),
    ("The answer is oven", "B"),
    ("The answer is the Oven.", "B"),
    ("The answer is an oven because cakes are baked in it, not in a garage.", "B"),
    ('The answer is "garage".', "C"),
    ("The answer is likely to be either garage (c)", "C"),
    ("The answer could be any of the following: library (a),", "A"),
    ("The answer is hotel (d).", "D"),
    ("The answer is hotel.", "D"),
    ("The answer is clearly going to be D.", "D"),
    ("The answer is A because books are there.", "A"),
    ("The answer is A, since books are there.", "A"),
    ("The answer is a library.", "A"),
    ("The answer is a garage.", "C"),
    ("The answer is A garage.", "C"),
    ("The correct answer is **C. garage**.", "C"),
    ("So, the answer is: (C) garage.", "C"),
    ("Answer: C) garage", "C"),
    ("The answer is option (C): garage", "C"),
    ("Based on the above, option C is correct.", "C"),
    ("Thus, C is the correct answer.", "C"),
    ("Thus, A is the correct answer.", "A"),
    ("So the garage is the best choice.", "C"),
    ("(b) is correct, because it is hot. A library is cold.", "B"),
    ("C is the answer.", "C"),
    ("The answer is B, which is correct.", "B"),
    ("The answer is B. On second thought, (c) is the right one.", "C"),
    ("A is not correct. B is incorrect. What is the correct answer?", None),
    ("The garage is the right size. The answer is B.", "B"),
    # LaTeX
    (r"\boxed{B}", "B"),
    (r"\boxed{b}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{\text{(B) oven}}", "B"),
    (r"\boxed{oven}", "B"),
    (r"The final answer is $\boxed{\textbf{B}}$.", "B"),
    (r"\fbox{B}", "B"),
    # without a statement
    ("A place to park a car would be a garage (c).", "C"),
    ("Cars are parked in one. So it must be the garage.", "C"),
    ("oven", "B"),
    ("Oven.", "B"),
    ("It is not the oven (b). It is the garage (c).", "C"),
    # the last statement counts
    ("The answer is B. Wait, cars do not fit. The answer is C.", "C"),
    (r"\boxed{A} is wrong, so \boxed{B}", "B"),
    (r"\boxed{A}. The answer is C.", "C"),
    (r"The answer is C. \boxed{A}", "A"),
    ("The answer is (b). The answer is easy to see.", "B"),
    ("The best option would be to ask in the library. Therefore, the answer is garage (c).", "C"),
    # rejected choices
    ("The answer is B, not C.", "B"),
    ("The answer is not A but B.", "B"),
    ("The answer is (b) rather than (c).", "B"),
    ("The answer isn't (a), it is (b).", "B"),
    ("The answer is (b), because (c) is wrong.", "B"),
    ("The answer is B, as C is for cars.", "B"),
    # ambiguous or none: unanswered
    ("The answer is A or B.", None),
    ("The answer is A and B.", None),
    ("The answer is (a) or (b).", None),
    ("The answer is either (a) library or (b) oven.", None),
    ("The answer is A/B.", None),
    ("The answer is A, B.", None),
    ("The answer is library or oven.", None),
    ("The answer is (b). So the answer is (a) or (b).", None),
    ("The answer is library (c).", None),
    ("The answer is B: garage", None),
    ("B. garage", None),
    (r"\boxed{A, B}", None),
    (r"\boxed{}", None),
    (r"\boxed{42}", None),
    (r"The answer is \boxed{B", "B"),
    ("The answer is", None),
    ("The answer is answer (label).", None),
    ("The answer choices are: A. library B. oven", None),
    ("A. library\nB. oven\nC. garage", None),
    ("A. library\nB. oven\nC. garage\n\nB", "B"),
    ("(a) library (b) oven (c) garage", None),
    ("(c) is wrong.", None),
    ("It isn't (a).", None),
    ("I think that an answer needs more thought", None),
    ("A book is found on a shelf.", None),
    ("F", None),
    ("The answer is F.", None),
    ("", None),
    ("   \n ", None),
]


@pytest.mark.parametrize(("text", "label"), CHOICE_FORMS)
def test_choice_forms(text: str, label: str | None) -> None:
    assert extract_choice(text, ROOM) == label


@pytest.mark.parametrize(
    ("choices", "text", "label"),
    [
        (CITIES, "The answer is St. Louis.", "A"),
        (CITIES, "So the answer is St. Louis (a). It has an arch.", "A"),
        (CITIES, "The answer is Washington D.C. (c).", "C"),
        (CITIES, "The answer is the desk drawer.", "E"),
        (CITIES, "The answer is the drawer.", "D"),
        (CITIES, "The answer is desk drawer (d).", None),
        (CITIES, "The answer is top drawer (e).", "E"),
        (NUMBERED, "The answer is 4", None),
        (NUMBERED, "The answer is (4)", "4"),
        (NUMBERED, "The answer is 16.", "3"),
        (NUMBERED, "The answer is option 2.", "2"),
        (NUMBERED, "The answer is apples (4).", "4"),
        (NUMBERED, "I have 3 of them", None),
        (WORDS, "The answer is (B).", "b"),
        (WORDS, "The answer is vitamin c.", "b"),
        (WORDS, "The answer is a plan.", "c"),
        (WORDS, "The answer is be happy (d)", "d"),
        (WORDS, "The answer is to  be\u00a0happy", "d"),
        (AMOUNTS, "The answer is 1.5.", "B"),
        (AMOUNTS, "The answer is 15", "C"),
        (AMOUNTS, "The answer is $20.", "D"),
        (AMOUNTS, "The answer is 5.", "A"),
        (choices_of("same", "same"), "The answer is same.", None),
        (choices_of("same", "same"), "The answer is same (b).", "B"),
        (choices_of("man's hat", "cap"), "The answer is man\u2019s hat.", "A"),
    ],
)
def test_choice_forms_of_other_questions(choices: tuple[Choice, ...], text: str, label: str | None) -> None:
    assert extract_choice(text, choices) == label
