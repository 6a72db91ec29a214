r"""Plain numbers as people and models write them: `1,234`, `\frac{1}{2}`, `50\%`, `$18`, `18 dollars`.

The fast path of grading: exact fractions, no computer algebra. `parse_number` answers None for anything that
is not one number, and `math_equality.py` then compares by other means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 120  # longer text is no plain number, and must not cost time
MAX_EXPONENT = 100
MIN_ROUNDED_DIGITS = 4  # a decimal of fewer significant digits never stands for a fraction such as 1/3

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_DECORATION = re.compile(
    r"\\[!,;:() \[\]]"
    r"|\\(?:left|right|displaystyle|quad|qquad|bf|rm)(?![A-Za-z])"
    r"|\\?\$|[\u20ac\u00a3\u00a5~\u00a0\u2009\u202f]"
)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|mbox)\s*\{([^{}]*)\}")
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_EQUATION = re.compile(r"[^=<>\u2264\u2265,;]*[^=<>\u2264\u2265,;!:]=\s*")
_ABOUT = re.compile(
    r"(?:approximately|approx\.?|about|around|roughly|exactly|USD|US|Rs\.?)\s+|\\approx\s*|\u2248\s*",
    re.IGNORECASE,
)

_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+|\.(?![0-9]))?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*
    (?: (?P<whole>[0-9]+)?\s*\\frac\s*
        (?: \{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}
          | (?P<short_top>[0-9])\s*(?P<short_bottom>[0-9]) )
      | (?P<mixed>[0-9]+)\s+(?P<mixed_top>[0-9]+)/(?P<mixed_bottom>[0-9]+)
      | (?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})
      | (?: (?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|\u00d7|\u00b7|x|\*)\s* )?
        10\s*\^\s*(?: \{{\s*(?P<power>[+-]?[0-9]+)\s*\}} | (?P<digit>[+-]?[0-9]+) )
      | (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]+)(?![A-Za-z]))?
    )""",
    re.VERBOSE,
)
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per\s+cent\b)", re.IGNORECASE)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0|\\degrees?\b)")
_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLIER = re.compile(rf"\s*({'|'.join(_MULTIPLIERS)})\b", re.IGNORECASE)
_UNIT_WORD = r"[^\W\d_]+(?:['\u2019][^\W\d_]*)?(?:\s*\^\s*\{?[23]\}?|[\u00b2\u00b3])?\.?"
_UNITS = re.compile(rf"\s*-?\s*{_UNIT_WORD}(?:(?:\s*/\s*|\s+|-){_UNIT_WORD}){{0,9}}\s*")
_WORD = re.compile(r"[^\W\d_]+")
_SINGLE_LETTER_UNITS = frozenset("mgshlLJWVNCF")
_GLUED_UNITS = re.compile(  # written without a space: 5cm, 3rd, 10am; "5x" and "2a" are products
    r"(?:[cmkn]?m|[mk]?g|lbs?|oz|ft|in|yd|mi|mph|kph|kmh|m?s|secs?|mins?|h|hrs?|m?[lL]|[ap]m|[AP]M|st|nd|rd|th)"
    r"|(?:USD|usd|cents|dollars|years|hours|minutes|seconds|miles)"
)
_NO_UNITS = frozenset(  # words that make another number, or no number, of the one before them
    word
    for words in (
        "pi sqrt frac sin cos tan cot sec csc log ln exp lim mod modulo factorial choose squared cubed",
        "and or to plus minus over divided multiplied point half halves third thirds fourths fifths than",
        "if when where because since but not",
    )
    for word in words.split()
)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; `decimals` are the digits after the point (None: a fraction), `digits` all of them."""

    value: Fraction
    percent: bool = False
    decimals: int | None = None
    digits: int = 0


@lru_cache(maxsize=65536)
def parse_number(text: str) -> Number | None:
    """The one number that a text states, without decoration and unit; None if it states something else."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return Number(Fraction(int(text)), decimals=0, digits=len(text))
    if len(text) > MAX_LENGTH or not any(character.isdigit() for character in text):
        return None
    text = _undecorated(text)
    match = _NUMBER.match(text)
    if match is None:
        return None
    number = _value(match)
    return None if number is None else _with_unit(number, text[match.end() :])


def numbers_equal(stated: Number, answer: Number) -> bool:
    """Exact, but for percentages (50 % is 50 and 0.5) and decimals that round a fraction (0.3333, 1/3)."""
    if stated.percent == answer.percent:
        return _same(stated, answer)
    percentage, plain = (stated, answer) if stated.percent else (answer, stated)
    share = Number(percentage.value / 100)
    return _same(percentage, plain) or share.value == plain.value


def _same(a: Number, b: Number) -> bool:
    if a.value == b.value:
        return True
    if (a.decimals is None) == (b.decimals is None):
        return False
    decimal, fraction = (a, b) if a.decimals is not None else (b, a)
    if not decimal.decimals or decimal.digits < MIN_ROUNDED_DIGITS or _terminates(fraction.value):
        return False
    return abs(decimal.value - fraction.value) * 2 <= Fraction(1, 10**decimal.decimals)


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _undecorated(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\u2013", "-")
    text = _TEXT_COMMAND.sub(r" \1 ", _FRACTION_COMMAND.sub(r"\\frac", text))
    text = _DECORATION.sub("", text).strip(" \t\"'`*").rstrip(" .,;:?")
    while equation := _EQUATION.match(text):
        text = text[equation.end() :]
    while about := _ABOUT.match(text):
        text = text[about.end() :]
    if (text[:1], text[-1:]) in (("(", ")"), ("{", "}")):
        inner = text[1:-1]
        text = inner if _NUMBER.fullmatch(inner.strip()) else text
    return text.strip()


def _value(match: re.Match[str]) -> Number | None:
    groups = match.groupdict()
    sign = -1 if groups["sign"] == "-" else 1
    if groups["decimal"] is not None:
        return _decimal(groups["decimal"], groups["exponent"], sign)
    if groups["power"] or groups["digit"]:
        return _decimal(groups["mantissa"] or "1", groups["power"] or groups["digit"], sign)
    if groups["mixed"] is not None:
        whole, top, bottom = groups["mixed"], groups["mixed_top"], groups["mixed_bottom"]
    elif groups["over"] is not None:
        whole, top, bottom = "0", groups["over"], groups["under"]
    else:
        whole, top, bottom = groups["whole"] or "0", groups["top"], groups["bottom"]
        if top is None:
            top, bottom = groups["short_top"], groups["short_bottom"]
    divisor = _exact(bottom)
    return None if divisor == 0 else Number(sign * (_exact(whole) + _exact(top) / divisor))


def _decimal(text: str, exponent: str | None, sign: int) -> Number | None:
    power = int(exponent) if exponent and len(exponent) < 6 else 0 if not exponent else MAX_EXPONENT + 1
    if abs(power) > MAX_EXPONENT:
        return None
    plain = _digits(text)
    decimals = max(0, len(plain.partition(".")[2]) - power)
    digits = len(plain.replace(".", "").lstrip("0"))
    return Number(sign * Fraction(plain) * Fraction(10) ** power, decimals=decimals, digits=digits)


def _digits(text: str) -> str:
    plain = text.replace("{,}", "").replace(",", "")
    return plain[:-1] if plain.endswith(".") else plain


def _exact(text: str) -> Fraction:
    return Fraction(_digits(text))


def _with_unit(number: Number, rest: str) -> Number | None:
    """The number with the percent sign, degrees, multiplier or unit after it; None if more follows."""
    if percent := _PERCENT.match(rest):
        number = Number(number.value, True, number.decimals, number.digits)
        rest = rest[percent.end() :]
    elif multiplier := _MULTIPLIER.match(rest):
        number = Number(number.value * _MULTIPLIERS[multiplier[1].lower()], decimals=0, digits=number.digits)
        rest = rest[multiplier.end() :]
    elif degrees := _DEGREES.match(rest):
        rest = rest[degrees.end() :]
    if not rest.strip(" .,;:?"):
        return number
    return number if _is_unit(rest) else None


def _is_unit(rest: str) -> bool:
    if not _UNITS.fullmatch(rest):
        return False
    words = _WORD.findall(rest)
    if any(word.lower() in _NO_UNITS for word in words):
        return False
    if rest[0].isalpha() and not _GLUED_UNITS.fullmatch(words[0]):
        return False
    if words[0] in ("a", "I"):
        return False
    return all(len(word) > 1 or word in _SINGLE_LETTER_UNITS or word in "aI" for word in words)
