r"""Where a response states its answer: `\boxed{...}` and sentences such as "the answer is ...".

Pure string rules that know nothing of tasks. Fed with the text of a response (already cut at EOS by ids);
read by `choice_answers.py` and `math_answers.py`, and by `example_formats.py` for references.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_STATEMENT = 400  # characters of a statement that are read: models that loop write endless ones

_BOXED_TOKENS = re.compile(r"(?P<boxed>\\f?box(?:ed)?\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)
_STATEMENT = re.compile(
    r"""\b(?:answer(?!\s+(?:choices|options)\b)|(?:correct|right)\s+(?:option|choice)|(?:i|we)\s+(?:would\s+)?(?:choose|pick|select))\b
        (?: [^.\n:=?]{0,60}? (?: \b(?:is|are|was|be)\b \s* [:=]? | [:=] )
          | [ \t]* (?= \n )
          | (?<= choose | select ) | (?<= \bpick ) )""",
    re.IGNORECASE | re.VERBOSE,
)
_VERDICT = re.compile(
    r"""\s(?:is|would\s{1,3}be|must\s{1,3}be) \s{1,3} (?:the\s{1,3})?
        (?: (?:correct|right|best)\s{1,3}(?:answer|option|choice|one)\b
          | (?:answer|correct)\b (?=\s{0,3}(?:[.,;!]|$|because|since)) )""",
    re.IGNORECASE | re.VERBOSE,
)
_SUBJECT = re.compile(r"[^\n.!?;]{1,80}\Z")
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)")


@dataclass(frozen=True, slots=True)
class Statement:
    """A piece of a response that states an answer; `start` is its position in the response."""

    start: int
    text: str


def cut_at(text: str, stop_texts: Iterable[str]) -> str:
    """The text before the first of `stop_texts`; nothing that follows one ever counts."""
    for stop in stop_texts:
        if stop:
            text = text.partition(stop)[0]
    return text


def boxed_statements(text: str) -> list[Statement]:
    r"""The contents of every complete, non-empty `\boxed{...}`, nested braces and all."""
    found: list[Statement] = []
    open_groups: list[tuple[int, int] | None] = []  # (start, start of the content), or None for a plain brace
    # An escaped brace belongs to a set, not to LaTeX's grouping: the pattern skips it.
    for token in _BOXED_TOKENS.finditer(text):
        if token["boxed"]:
            open_groups.append((token.start(), token.end()))
        elif token["brace"] == "{":
            open_groups.append(None)
        elif token["brace"] == "}" and open_groups:
            group = open_groups.pop()
            if group is not None and (content := text[group[1] : token.start()].strip()):
                found.append(Statement(group[0], content))
    return sorted(found, key=lambda statement: statement.start)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete, non-empty `\boxed{...}`."""
    boxed = boxed_statements(text)
    return boxed[-1].text if boxed else None


def answer_statements(text: str, inside: Callable[[int], bool] = lambda position: False) -> list[Statement]:
    """What follows "the answer is", "Answer:" and the like, up to the end of its sentence.

    Args:
        text: The response.
        inside: Says of a full stop's position whether it ends no sentence (as in `St. Louis`).
    """
    found = []
    for match in _STATEMENT.finditer(text):
        start = match.end()
        while start < len(text) and text[start].isspace():
            start += 1
        end = min(sentence_end(text, start, inside), start + MAX_STATEMENT)
        found.append(Statement(match.start(), text[start:end].strip()))
    return [statement for statement in found if statement.text]


def verdict_statements(text: str) -> list[Statement]:
    """What precedes "is the correct answer", "is correct" and the like, within its sentence."""
    found = []
    for match in _VERDICT.finditer(text):
        if subject := _SUBJECT.search(text, max(0, match.start() - 80), match.start()):
            found.append(Statement(subject.start(), subject[0]))
    return found


def last_sentence(text: str, inside: Callable[[int], bool] = lambda position: False) -> str:
    """The last sentence that holds a letter or a digit (its end, if it is long), without its full stop."""
    start, last = 0, ""
    while start < len(text):
        end = sentence_end(text, start, inside)
        if any(character.isalnum() for character in text[start:end]):
            last = text[max(start, end - MAX_STATEMENT) : end].strip()
        start = end + 1
    return last


def sentence_end(text: str, start: int, inside: Callable[[int], bool] = lambda position: False) -> int:
    """The position of the newline or terminator that ends the sentence at `start`, or the text's end."""
    for match in _SENTENCE_END.finditer(text, start):
        if not inside(match.start()):
            return match.start()
    return len(text)
