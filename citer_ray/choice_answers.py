r"""Multiple choice: which label does a response state?

Reads forms such as `(c)`, `C.`, `**D**`, `\boxed{B}`, `answer: (B) oven`, "the answer is oven", or a lone
choice text at the end. The last statement that names a choice counts; one that names two is ambiguous and
counts as no answer. Fed by `answers.py`; `Choice` is also part of `examples.Example`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from citer_ray.answer_text import answer_statements, boxed_statements, last_sentence, verdict_statements

MAX_MARKER = 12  # characters of a label and its marks before an option's text: "(B). "

_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "“": '"', "”": '"', "\u00a0": " "})
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:bf|rm|it)|mbox|emph)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\*+|__+|`+|\$|\\[()\[\]]|^#+\s*", re.MULTILINE)
_FILLER = re.compile(
    r"^(?:[\s\"'.,:;!?\-]|\b(?:the|a|an|either|likely|most|probably|option|choice|letter|label|to|be|in|on|at)\b)+",
    re.IGNORECASE,
)
_MARKS = " \"'.,:;!?-()[]"
_ALTERNATIVE = re.compile(r"\b(?:or|and)\b|/|&|^\s*,\s*$", re.IGNORECASE)
_NO_ALTERNATIVE = re.compile(r"\b(?:because|since|as|while|whereas|but|than|instead|if|so)\b|[.;\n]", re.IGNORECASE)
_REJECTED_BEFORE = re.compile(
    r"\b(?:not|never|neither|nor|rather than|instead of|unlike|except|than|(?:is|was)n't|can(?:no|')t be)\s+"
    r"(?:(?!but\b|it\b|is\b)[\w']+\s+){0,3}[(\[\"']?$",
    re.IGNORECASE,
)
_REJECTED_AFTER = re.compile(
    r"^[)\].,\"']*\s*(?:[\w']+\s+){0,3}?(?:is|are|was|were|would be|seems?)\s+(?:\w+\s+)?"
    r"(?:wrong|incorrect|not|false|eliminated|unlikely)\b"
    r"|^[)\].,\"']*\s*(?:isn't|aren't|wasn't|can't|cannot)\b",
    re.IGNORECASE,
)


class Choice(BaseModel):
    """One option of a multiple-choice question."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class _Mention:
    """A place where a choice is named, by its label or by its text (then possibly several share the text)."""

    start: int
    end: int
    labels: frozenset[str]


def extract_choice(text: str, choices: Sequence[Choice]) -> str | None:
    """The label that a response states, as the choices spell it; None if it states none or more than one.

    Args:
        text: The response, already cut at its end.
        choices: The options of the question.
    """
    return _reader(tuple(choices)).read(text)


@lru_cache(maxsize=4096)
def _reader(choices: tuple[Choice, ...]) -> _ChoiceReader:
    return _ChoiceReader(choices)


class _ChoiceReader:
    """The patterns of one question's choices, compiled once: rollouts grade one question many times."""

    def __init__(self, choices: tuple[Choice, ...]) -> None:
        self.labels = {choice.label.casefold(): choice.label for choice in choices}
        self.by_text = _index(choices, _key)
        self.by_trimmed = _index(choices, _trimmed)
        self.by_core = _index(choices, _core)
        label = "|".join(re.escape(choice.label) for choice in choices)
        texts = "|".join(
            r"\s+".join(map(re.escape, key.split())) for key in sorted(self.by_text, key=len, reverse=True)
        )  # longest first: "desk drawer" before "drawer"
        self.text = re.compile(rf"(?<!\w)(?<!\d[.,])(?:{texts or '(?!)'})(?!\w|[.,]\d)", re.IGNORECASE)
        self.bracketed = re.compile(rf"[(\[]\s*({label})\s*[)\]]|(?<![\w(\[])({label})\)", re.IGNORECASE)
        self.named = re.compile(rf"\b(?:option|choice|letter|label)\s+({label})(?!\w)", re.IGNORECASE)
        self.bare = re.compile(rf"(?<![\w'\-])({label})(?![\w'\-])")
        self.explicit = re.compile(
            rf"^[^\w\-]*(?:(?:option|choice|letter|label)\s+[(\[]?|[(\[])({label})\W*$", re.IGNORECASE
        )
        self.whole = re.compile(rf"^[^\w\-]*({label})\W*$", re.IGNORECASE)
        self.marker = re.compile(rf"(?<!\w)({label})[).:]\s*[\"']?\Z", re.IGNORECASE)
        self.line = re.compile(rf"^[\s\"'(\[]*({label})[)\].:]+(?!\w)(.*)$", re.IGNORECASE)

    def read(self, raw: str) -> str | None:
        text = _plain(raw)
        boxes = [(box.start, _plain(box.text)) for box in boxed_statements(text)]
        inside = self._inside_texts(text)
        sentences = [
            (found.start, found.text) for found in [*verdict_statements(text), *answer_statements(text, inside)]
        ]
        for _, statement in sorted(boxes + sentences, key=lambda found: found[0], reverse=True):
            if stated := self._stated(statement):
                return _only(stated)
        final = last_sentence(text, inside)
        lines = [line for line in text.splitlines() if any(map(str.isalnum, line))]
        return _only(
            self._labelled(final, bare=False)
            or self._listed_options(text)
            or self._label_line(lines[-1:])
            or self._closing_text(final)
            or self._opening_label(lines)
        )

    def _inside_texts(self, text: str) -> Callable[[int], bool]:
        spans = [match.span() for match in self.text.finditer(text)]
        starts = [start for start, _ in spans]

        def inside(position: int) -> bool:
            found = bisect_right(starts, position) - 1
            return found >= 0 and position < spans[found][1] - 1

        return inside

    def _stated(self, statement: str) -> frozenset[str]:
        """The labels that a statement names: none, one, or several (ambiguous)."""
        if explicit := self.explicit.match(statement):  # "(2)" is a label even where a choice's text is "2"
            return frozenset({self._label(explicit)})
        whole = self.whole.match(statement)
        labels = frozenset({self._label(whole)}) if whole else frozenset[str]()
        exact = self._exact(statement)
        if labels or exact:
            return labels | exact if not labels & exact else labels & exact
        return self._labelled(statement, bare=True) or self._textual(statement)

    def _labelled(self, statement: str, *, bare: bool) -> frozenset[str]:
        texts = [_Mention(*match.span(), frozenset()) for match in self.text.finditer(statement)]
        matches = [*self.bracketed.finditer(statement), *self.named.finditer(statement)]
        if bare:
            matches += [match for match in self.bare.finditer(statement) if self._is_label(match, statement)]
        matches = [match for match in matches if not _covered(match, texts)]
        mentions = [_Mention(*match.span(), frozenset({self._label(match)})) for match in matches]
        mentions = _unrejected(sorted(mentions, key=lambda mention: mention.start), statement)
        if not mentions:
            return frozenset()
        labels = _alternatives(mentions, statement) if bare else _all_labels(mentions)
        beside = self._text_beside(mentions[0], statement)
        return labels | beside if beside and not labels & beside else labels

    def _is_label(self, match: re.Match[str], statement: str) -> bool:
        """A bare letter is a label, but "A library" and "I think" begin with words; a digit is a number."""
        label, rest = match[1], statement[match.end() :]
        if not label.isalpha():
            return False
        if label in ("A", "I"):
            return re.match(r"\s*(?:$|[.,;:!?)\]\"'/&]|(?:or|and|because|since|as)\b)", rest) is not None
        return True

    def _text_beside(self, mention: _Mention, statement: str) -> frozenset[str]:
        """The choice whose exact text stands before or after a label: "library (c)", "B: oven"."""
        return self._exact(statement[: mention.start]) or self._exact(statement[mention.end :])

    def _exact(self, statement: str) -> frozenset[str]:
        """The choices whose text is all that a statement says but for marks and words like "the"."""
        trimmed = _trimmed(statement)
        return self.by_trimmed.get(trimmed) or self.by_core.get(_core(statement)) or frozenset()

    def _textual(self, statement: str) -> frozenset[str]:
        mentions = _unrejected(self._texts(statement), statement)
        if not mentions:
            return frozenset()
        everything = _all_labels(mentions)
        filler = _FILLER.match(statement)
        if len(everything) > 1 and mentions[0].start == (filler.end() if filler else 0):
            return _alternatives(mentions, statement)  # "bank, since a library ..." names the bank
        return everything

    def _listed_options(self, text: str) -> frozenset[str]:
        """The labels of a list of options that ends a response ("A. library B. oven"): no answer."""
        mentions = self._texts(text)
        if not mentions or _trimmed(text[mentions[-1].end :]):
            return frozenset()
        options: set[str] = set()
        for mention in reversed(mentions):
            marker = self.marker.search(text, max(0, mention.start - MAX_MARKER), mention.start)
            if marker is None or self._label(marker) not in mention.labels:
                break
            options |= mention.labels
        return frozenset(options) if len(options) > 1 else frozenset()

    def _label_line(self, lines: list[str]) -> frozenset[str]:
        """The label of a line that holds but a label, or a label and a choice's text: "C", "B. oven"."""
        for line in lines:
            if whole := self.whole.match(line):
                return frozenset({self._label(whole)})
            match = self.line.match(line)
            if match and (beside := self._exact(match[2])):
                label = frozenset({self._label(match)})
                return label if label <= beside else label | beside
        return frozenset()

    def _opening_label(self, lines: list[str]) -> frozenset[str]:
        """The label that opens the response ("B. An oven is hot."); more such lines make it a list."""
        matches = [self.line.match(line) for line in lines]
        if not matches or matches[0] is None or _REJECTED_AFTER.match(matches[0][2]):
            return frozenset()
        return frozenset(self._label(match) for match in matches if match)

    def _closing_text(self, sentence: str) -> frozenset[str]:
        """A choice's text that ends the response and is the only one that its last sentence names."""
        mentions = _unrejected(self._texts(sentence), sentence)
        if not mentions or _trimmed(sentence[mentions[-1].end :]):
            return frozenset()
        return _all_labels(mentions)

    def _texts(self, statement: str) -> list[_Mention]:
        return [_Mention(*match.span(), self.by_text[_key(match[0])]) for match in self.text.finditer(statement)]

    def _label(self, match: re.Match[str]) -> str:
        return self.labels[next(group for group in match.groups() if group).casefold()]


def _plain(text: str) -> str:
    r"""Text without Markdown emphasis and LaTeX's `$`, `\text{}`; `\boxed{}` stays."""
    return _MARKUP.sub("", _TEXT_COMMAND.sub(r"\1", text.translate(_QUOTES)))


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def _trimmed(text: str) -> str:
    return _key(text).strip(_MARKS)


def _core(text: str) -> str:
    """A statement without the words and marks around the answer."""
    return _FILLER.sub("", _trimmed(text))


def _index(choices: tuple[Choice, ...], key: Callable[[str], str]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for choice in choices:
        found.setdefault(key(_plain(choice.text)), set()).add(choice.label)
    return {text: frozenset(labels) for text, labels in found.items() if text}


def _only(labels: frozenset[str]) -> str | None:
    return next(iter(labels)) if len(labels) == 1 else None


def _covered(match: re.Match[str], texts: list[_Mention]) -> bool:
    return any(text.start <= match.start() and match.end() <= text.end for text in texts)


def _unrejected(mentions: list[_Mention], statement: str) -> list[_Mention]:
    return [
        mention
        for mention in mentions
        if not _REJECTED_BEFORE.search(statement[: mention.start])
        and not _REJECTED_AFTER.match(statement[mention.end :])
    ]


def _all_labels(mentions: list[_Mention]) -> frozenset[str]:
    return frozenset[str]().union(*(mention.labels for mention in mentions))


def _alternatives(mentions: list[_Mention], statement: str) -> frozenset[str]:
    """The first mention, and those joined to it by "or", "and" or a comma."""
    labels = mentions[0].labels
    for before, after in pairwise(mentions):
        gap = statement[before.end : after.start]
        if _NO_ALTERNATIVE.search(gap) or not _ALTERNATIVE.search(gap):
            break
        labels |= after.labels
    return labels
