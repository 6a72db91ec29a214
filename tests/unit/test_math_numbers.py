r"""Plain numbers: every spelling of a value, and the texts that are no plain number."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from citer_ray.math_numbers import numbers_equal, parse_number

SPELLINGS = {
    Fraction(18): [
        *("18", "18.", "18.0", "+18", " 18 ", "018", "$18", "$18.00", r"\$18", "18$", "$18$", "€18", "18 €"),
        *("18 dollars", "18dollars", "18 dollars every day at the farmers' market", "18 dollars a day"),
        *(
            r"18\text{ miles}",
            r"18\text{cm}",
            r"18~\mathrm{cm}",
            r"18\,\text{cm}^2",
            "18 cm^2",
            "18 cm²",
            "18cm",
        ),
        *(
            "18 m",
            "18 km/h",
            "18 miles per hour",
            "18-year",
            "18 in.",
            "18 times",
            "18th",
            "18°",
            r"18^\circ",
        ),
        *(r"18^{\circ}", "18 degrees", "x = 18", "x=18", "9 * 2 = 18", r"9 \cdot 2 = 18", "a = b = 18"),
        *("about 18", "approximately 18 kg", r"\approx 18", "USD 18", "**18**", '"18"', "(18)", "{18}"),
        *(r"\text{18}", r"\left(18\right)", r"\frac{36}{2}", "36/2", "1.8e1", "1.8E+1", r"1.8\times10^{1}"),
        *(r"1.8 \cdot 10^1", "180 × 10^-1", r"\displaystyle 18", r"\(18\)", "18 more apples"),
    ],
    Fraction(1234): [
        "1234",
        "1,234",
        "1{,}234",
        r"1\,234",
        r"1,\!234",
        "$1,234.00",
        "1,234 miles",
        "12.34 hundred",
    ],
    Fraction(1234567): ["1,234,567", "1234567", "1.234567 million"],
    Fraction(1, 2): [
        *(
            "0.5",
            ".5",
            "0.50",
            "1/2",
            "1 / 2",
            "2/4",
            r"\frac{1}{2}",
            r"\dfrac{1}{2}",
            r"\tfrac12",
            r"\frac12",
        ),
        *(r"\frac{ 1 }{ 2 }", r"$\frac{1}{2}$", r"\frac{1}{2} \text{ cup}", "1/2 cup", r"\frac{0.5}{1}"),
    ],
    Fraction(3, 2): ["1.5", "1 1/2", r"1\frac{1}{2}", r"1 \frac12", "3/2"],
    Fraction(-3): [
        "-3",
        "- 3",
        "\u22123",
        "-3.0",
        r"-\frac{6}{2}",
        r"\frac{-6}{2}",
        "-$3",
        "$-3",
        "(-3)",
        "-3 degrees",
    ],
    Fraction(-3, 2): ["-1.5", r"-1\frac{1}{2}", "-3/2", "-1 1/2"],
    Fraction(0): ["0", "-0", "0.0", "0/5", r"\frac{0}{3}"],
    Fraction(1000): ["10^3", "10^{3}", "1 thousand", "1e3"],
    Fraction(3, 1000): ["3e-3", r"3\times 10^{-3}", "0.003"],
    Fraction(3_000_000): ["3 million", "3 million people", "3,000,000"],
}


@pytest.mark.parametrize(("text", "value"), [(text, value) for value, texts in SPELLINGS.items() for text in texts])
def test_spellings_of_a_value(text: str, value: Fraction) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.value == value
    assert not number.percent


@pytest.mark.parametrize("text", ["50%", r"50\%", "50 %", "50 percent", "50 per cent", r"$50\%$", "50.0% of them"])
def test_percentages(text: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.percent) == (50, True)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "x",
            "eighteen",
            "no 5",
            "1,23",
            "1,2",
            "(1, 2)",
            "1, 2 and 3",
            "[1, 2)",
            "5:30",
            "3/4/2024",
            "1.2.3",
        ),
        *(
            "3x",
            "3 x",
            "2a",
            "2 a",
            r"3\pi",
            "3 pi",
            "3pi",
            "2^{10}",
            "2^3",
            r"\sqrt{2}",
            r"2\sqrt{2}",
            "3!",
            "5 + 3",
            "5-3",
        ),
        *(
            "3*4",
            "5 squared",
            "5 and a half",
            "2 hours and 30 minutes",
            "5 or 6",
            "1/0",
            r"\frac{1}{0}",
            "x = 5, y = 3",
        ),
        *(
            "x \\leq 3",
            "x >= 3",
            "5 more than x",
            "5 if x is 3",
            "1e999999999",
            "1e101",
            "10^{99999}",
            "½",
            "IV",
            "--5",
        ),
        *("1" * 121, "1/2/3", "5 = x", "50% + 3", "3 million and 5", "10_000"),
    ],
)
def test_no_plain_number(text: str) -> None:
    assert parse_number(text) is None


def equal(stated: str, answer: str) -> bool:
    a, b = parse_number(stated), parse_number(answer)
    assert a is not None
    assert b is not None
    assert numbers_equal(a, b) == numbers_equal(b, a)
    return numbers_equal(a, b)


@pytest.mark.parametrize(
    ("stated", "answer", "expected"),
    [
        *[
            ("50%", "50", True),
            ("50%", "0.5", True),
            (r"50\%", r"\frac{1}{2}", True),
            ("50%", "50 percent", True),
        ],
        *[("50%", "5", False), ("50%", "0.5%", False), ("50%", "0.05", False), ("0.5%", "0.005", True)],
        *[
            ("0.3333", "1/3", True),
            ("0.333333", r"\frac13", True),
            ("0.33", "1/3", False),
            ("0.3334", "1/3", False),
        ],
        *[
            ("66.67", "200/3", True),
            ("-0.6667", "-2/3", True),
            ("0.6666", "2/3", False),
            ("0.5001", "1/2", False),
        ],
        *[("2.0001", "2", False), ("1000000", "1000001", False), ("0.1", "1/10", True), ("18", "-18", False)],
        *[("1.0000000001", "1", False), ("33.33%", "1/3", False), ("0.0003", "1/3333", False)],
    ],
)
def test_equality(stated: str, answer: str, expected: bool) -> None:
    assert equal(stated, answer) is expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=150) | st.text(alphabet="0123456789.,-+/%$^{}\\fracextim =", max_size=60))
def test_arbitrary_text_never_raises(text: str) -> None:
    number = parse_number(text)
    assert number is None or isinstance(number.value, Fraction)


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(1, 10**6))
def test_integers_and_fractions_round_trip(top: int, bottom: int) -> None:
    assert equal(f"{top:,}", str(top))
    assert equal(rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}")
    assert not equal(str(top), str(top + 1))
