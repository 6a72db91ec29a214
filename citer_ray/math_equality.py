r"""Do two math answers mean the same? Plain numbers first, then equal spelling, then computer algebra.

Fed by `answers.grade` with an extracted answer and an example's; grading runs tens of thousands of times, so
only what is neither a plain number nor equal text goes to the `SymbolicJudge`, and every verdict is
remembered.
"""

from __future__ import annotations

import re
from functools import lru_cache

from citer_ray.math_numbers import numbers_equal, parse_number
from citer_ray.symbolic_judge import SymbolicJudge

MAX_SYMBOLIC_LENGTH = 200  # LaTeX parsers are slow on long text, and a final answer is short

_SPACING = re.compile(r"\\[!,;: ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\?\$|\\[()\[\]]|\s+")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[\s'\-][A-Za-z]+)*")
_MATHEMATICAL = re.compile(r"[\d\\^=+*/<>π∞√]|\b[A-Za-z]\b")

_judge = SymbolicJudge()


@lru_cache(maxsize=65536)
def math_equal(stated: str, answer: str) -> bool:
    """Whether a stated answer equals an example's answer. Never raises on odd text, never hangs."""
    stated, answer = stated.strip(), answer.strip()
    if stated == answer:
        return bool(stated)
    stated_number, answer_number = parse_number(stated), parse_number(answer)
    if stated_number is not None and answer_number is not None:
        return numbers_equal(stated_number, answer_number)
    if _spelling(stated) == _spelling(answer) != "":
        return True
    if not _is_symbolic(stated) or not _is_symbolic(answer):
        return False
    return _judge.equal(_undelimited(stated), _undelimited(answer))


def _is_symbolic(text: str) -> bool:
    """Whether computer algebra could read a text: it is short, has mathematics in it, and balanced braces."""
    if len(text) > MAX_SYMBOLIC_LENGTH or not _MATHEMATICAL.search(text) or _WORDS.fullmatch(text):
        return False
    depth = 0
    for character in text.replace(r"\\", "").replace(r"\{", "").replace(r"\}", ""):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _undelimited(text: str) -> str:
    return re.sub(r"\\?\$|\\[()\[\]]", "", text).strip().rstrip(".,;")


def _spelling(text: str) -> str:
    """A text without LaTeX's spacing and commands that change no meaning; words also without case."""
    text = (
        _TEXT_COMMAND.sub(r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip().rstrip(".,;")
    )
    if _WORDS.fullmatch(text):
        text = text.casefold()
    return _SPACING.sub("", text)
