r"""Math: which answer does a response state? The last `\boxed{}`, else `#### x`, else "the answer is x".

Fed by `answers.py`; what it extracts is compared by `math_equality.py`. It never reads the question, whose
own `\boxed{}` (as in "enclose your answer with \boxed{}") must not count as an answer.
"""

from __future__ import annotations

import re

from citer_ray.answer_text import answer_statements, last_boxed

MAX_WORDS = 3  # "the answer is Evelyn" states one, "the answer is easy to see from above" does not

_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_MARKUP = re.compile(r"\*\*|__|`")
_MATH = re.compile(r"\$\$?(.+?)\$\$?(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_NUMBER = re.compile(
    r"(?<![\w.])-?\\?\$?-?(?:[0-9](?:,?[0-9])*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\s?(?:\\?%|percent\b))?"
)
_STRUCTURE = re.compile(r"\\[A-Za-z]|[\^_{}()*+]")
_MULTIPLIER = re.compile(r"\s*(?:hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_CLAUSE = re.compile(r"\s+(?:because|since|as|which|so|if|when|after|for)\s+|,\s+(?=[A-Za-z])", re.IGNORECASE)


def extract_math(text: str, *, last_number: bool = False) -> str | None:
    """The answer that a response states, as it is written; None if it states none.

    Args:
        text: The response, already cut at its end.
        last_number: Take the last number of a response that states no answer in any other form.
    """
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if hashes := _HASHES.findall(text):
        return str(hashes[-1])
    plain = _MARKUP.sub("", text)
    for statement in reversed(answer_statements(plain)):
        if answer := _answer_of(statement.text):
            return answer
    if last_number and (numbers := _NUMBER.findall(plain)):
        return str(numbers[-1])
    return None


def _answer_of(statement: str) -> str | None:
    """The answer in "18 dollars", "John has $5 left" or "x = 5 because ...": its math, its number, or all."""
    clause = _CLAUSE.split(statement, maxsplit=1)[0]
    if not _NUMBER.search(clause):
        clause = statement
    clause = clause.strip(" .,;:!?\"'")
    if math := [str(match[match.lastindex or 0]).strip() for match in _MATH.finditer(clause)]:
        return next((piece for piece in math if any(map(str.isdigit, piece))), math[0])
    clause = clause.rpartition("=")[2].strip() or clause
    numbers = list(_NUMBER.finditer(clause))
    if len(numbers) == 1 and not _STRUCTURE.search(clause):
        multiplier = _MULTIPLIER.match(clause, numbers[0].end())
        return clause[numbers[0].start() : multiplier.end() if multiplier else numbers[0].end()]
    if not numbers and not _STRUCTURE.search(clause) and len(clause.split()) > MAX_WORDS:
        return None
    return clause or None
