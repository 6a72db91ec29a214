r"""Equality of math answers: numbers, spelling, and computer algebra for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from citer_ray import math_equality
from citer_ray.math_equality import math_equal


class ForbiddenJudge:
    """Stands in for the judge where no answer may need it."""

    def equal(self, stated: str, answer: str) -> bool:
        raise AssertionError(f"{stated!r} and {answer!r} went to the judge")


@pytest.fixture
def no_judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    math_equal.cache_clear()
    monkeypatch.setattr(math_equality, "_judge", ForbiddenJudge())
    yield
    math_equal.cache_clear()


@pytest.mark.usefixtures("no_judge")
@pytest.mark.parametrize(
    ("stated", "answer", "expected"),
    [
        *[
            ("18", "18", True),
            ("18.0", "18", True),
            ("1,234", "1234", True),
            ("17", "18", False),
            ("-18", "18", False),
        ],
        *[
            (r"\frac{1}{2}", "0.5", True),
            (r"50\%", "50", True),
            (r"$18 \text{ miles}$", "18", True),
            ("", "18", False),
        ],
        *[
            ("Evelyn", r"\text{Evelyn}", True),
            ("evelyn", "Evelyn", True),
            ("Carla", "Evelyn", False),
            ("", "", False),
        ],
        *[
            (r"\left( 1, 2 \right)", "(1,2)", True),
            (r"\dfrac{x}{2}", r"\frac{x}{2}", True),
            ("x+1.", "$x + 1$", True),
        ],
        *[("the same as before", "18", False), ("18", "Tuesday", False), ("x" * 300, "18", False)],
        *[(r"\frac{1}{2", "18", False), ("}{", "x", False), ("5 apples and more of it", "Evelyn", False)],
    ],
)
def test_without_computer_algebra(stated: str, answer: str, expected: bool) -> None:
    assert math_equal(stated, answer) is expected


@pytest.mark.parametrize(
    ("stated", "answer", "expected"),
    [
        *[
            (r"\sqrt{8}", r"2\sqrt{2}", True),
            ("x + 1", "1+x", True),
            ("2^{10}", "1024", True),
            ("3x", "3", False),
        ],
        *[
            (r"\{1, 2\}", r"\{2,1\}", True),
            ("(1,2)", "(2,1)", False),
            (r"\frac{\sqrt 2}{2}", r"\frac{1}{\sqrt{2}}", True),
        ],
        *[
            ("2 hours and 30 minutes", "2", False),
            (r"3\pi", "3", False),
            ("5 + 3", "8", True),
            (r"\(x+1\)", "1 + x", True),
        ],
        *[
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
            ("9!", "362880", True),
        ],
    ],
)
def test_with_computer_algebra(stated: str, answer: str, expected: bool) -> None:
    assert math_equal(stated, answer) is expected


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="0123456789x^{}\\+-*/()=, !", max_size=25))
def test_arbitrary_text_never_raises(text: str) -> None:
    assert math_equal(text, "18") in (True, False)
