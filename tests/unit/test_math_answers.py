r"""Math: where a response states its answer."""

from __future__ import annotations

import pytest

from citer_ray.math_answers import extract_math

MATH_FORMS = [
    (r"\boxed{18}", "18"),
    (r"\boxed{5} and then \boxed{18}", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\text{a {nested} group}}", r"\text{a {nested} group}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed {7}", "7"),
    (r"\fbox{7}", "7"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{18}. Put it in \boxed{}.", "18"),
    (r"\boxed{18} \boxed{19", "18"),
    (r"\boxed{18}. The answer is 19.", "18"),
    ("2 + 2 = 4\n#### 4", "4"),
    ("#### 3\n#### 1,234  ", "1,234"),
    ("#### 4\nThe answer is 5.", "4"),
    ("The answer is 18.", "18"),
    ("The answer is 3.5.", "3.5"),
    ("The answer is -3.", "-3"),
    ("The answer is $18.", "$18"),
    ("The answer is $18$.", "18"),
    (r"The answer is \(18\).", "18"),
    ("The answer is **18**.", "18"),
    ("**Answer:** 18", "18"),
    ("Answer:\n18", "18"),
    ("The answer is 18 dollars every day.", "18"),
    ("The answer is that John has 5 apples left.", "5"),
    ("The answer is x = 5.", "5"),
    ("The answer is 3 + 2 = 5.", "5"),
    ("The answer is 5 because 3 + 2 = 5.", "5"),
    ("The answer is 18, since 9 * 2 is 18.", "18"),
    (r"The answer is \frac{1}{2}.", r"\frac{1}{2}"),
    ("The answer is 1/2.", "1/2"),
    ("The answer is 50%.", "50%"),
    ("The answer is 3 million dollars.", "3 million"),
    ("The answer is x + 1.", "x + 1"),
    ("The answer is Evelyn.", "Evelyn"),
    ("The answer is 1. No, the answer is 2.", "2"),
    ("The answer is easy to see from all of the above.", None),
    ("16 - 3 - 4 = 9", None),
    (r"\boxed{}", None),
    (r"\boxed{ }", None),
    (r"\boxed{18", None),
    ("####", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "answer"), MATH_FORMS)
def test_math_forms(text: str, answer: str | None) -> None:
    assert extract_math(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 16 - 3 = 13 eggs.", "13"),
        ("She owes -5.", "-5"),
        ("1,234 in all", "1,234"),
        ("first 3, then 4, ", "4"),
        (r"\boxed{7} of 8", "7"),
        ("none", None),
    ],
)
def test_the_last_number_counts_only_on_demand(text: str, answer: str | None) -> None:
    assert extract_math(text, last_number=True) == answer
    assert extract_math(text) == (answer if "boxed" in text else None)
