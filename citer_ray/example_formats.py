r"""One row of a data set -> the fields of an `Example`, for every format that is known.

A format is recognised row by row, by the row's fields. Formats: the CITER authors' four files (arXiv
2502.01976; `choice` and `math_prompted` with a rationale in `cot`, `choice` and `math` without), the hub rows
of CommonsenseQA and ARC (`choice`), OpenBookQA, MMLU, GSM8K and MATH (`math`), and our own `plain` format.
Fed by `examples.py`, which gives ids, finds duplicates and quarantines what a converter refuses with a
`DataError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from citer_ray.answer_text import last_boxed
from citer_ray.choice_answers import Choice
from citer_ray.errors import ConfigError, DataError

Row = Mapping[str, Any]
Task = Literal["choice", "math"]
PLAIN_FIELDS = "id, prompt or question, reference or solution, answer, and choices for multiple choice"

_GSM8K_ANSWER = re.compile(r"\s*^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_PROMPTED_QUESTION = re.compile(r"\nQuestion: (.+)\nSolution:\s*\Z", re.DOTALL)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """What a converter reads from a row; `id` is None for the formats that have none."""

    id: str | None
    question: str | None
    prompt: str | None = None
    reference: str = ""
    answer: str
    task: Task
    choices: tuple[Choice, ...] | None = None
    family: str | None = None


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format: `fits` recognises its rows, `convert` reads one or raises `DataError`."""

    fits: Callable[[Row], bool]
    convert: Callable[[Row], RowFields]


def convert_row(row: object, format_name: str = "auto") -> RowFields:
    """Reads a row in the named format, or in the one that its fields show.

    Raises:
        ConfigError: The format is unknown.
        DataError: The row is not of this format, or one of its fields is missing or unreadable.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be an object with fields, got {_type_name(row)}")
    if format_name != "auto":
        return format_named(format_name).convert(row)
    for candidate in FORMATS.values():
        if candidate.fits(row):
            return candidate.convert(row)
    fields = ", ".join(map(str, row)) or "none"
    raise DataError(f"unknown format with the fields {fields}: a plain row has {PLAIN_FIELDS}")


def format_named(name: str) -> RowFormat:
    """The format of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown example format {name!r}: use auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def _convert_choice(row: Row) -> RowFields:
    """`id, question, choices{label,text}, answerKey`; the authors add `prompt, answer, cot`."""
    choices = _choices(row)
    label = _label_of(_text(row, "answerKey"), choices, "answerKey")
    stated = _optional_text(row, "answer")
    text = next(choice.text for choice in choices if choice.label == label)
    if stated is not None and stated.casefold() not in (label.casefold(), text.strip().casefold()):
        raise DataError(f"answer {stated!r} is not the text of the choice that answerKey names, {label}")
    return RowFields(
        id=_id(row, "id"),
        question=_text(row, "question", strip=False),
        prompt=_optional_text(row, "prompt", strip=False),
        reference=_optional_text(row, "cot", strip=False) or "",
        answer=label,
        task="choice",
        choices=choices,
    )


def _convert_openbookqa(row: Row) -> RowFields:
    """`id, question_stem, choices{text,label}, answerKey`."""
    choices = _choices(row)
    return RowFields(
        id=_id(row, "id"),
        question=_text(row, "question_stem", strip=False),
        answer=_label_of(_text(row, "answerKey"), choices, "answerKey"),
        task="choice",
        choices=choices,
    )


def _convert_mmlu(row: Row) -> RowFields:
    """`question, choices[text], answer` (an index from 0), `subject`; no id."""
    choices, index = _choices(row), row.get("answer")
    if isinstance(index, bool) or not isinstance(index, int):
        raise DataError(f"answer must be the index of a choice, got {_type_name(index)}")
    if not 0 <= index < len(choices):
        raise DataError(f"answer is the index {index}, not among the {len(choices)} choices")
    return RowFields(
        id=None,
        question=_text(row, "question", strip=False),
        answer=choices[index].label,
        task="choice",
        choices=choices,
        family=_optional_text(row, "subject"),
    )


def _convert_math_prompted(row: Row) -> RowFields:
    """The authors' math rows with a rationale: `prompt` (complete), `cot`, `answerKey`; no id."""
    prompt = _text(row, "prompt", strip=False)
    question = _PROMPTED_QUESTION.search(prompt)
    return RowFields(
        id=None,
        question=question[1] if question else None,
        prompt=prompt,
        reference=_optional_text(row, "cot", strip=False) or "",
        answer=_text(row, "answerKey"),
        task="math",
    )


def _convert_math(row: Row) -> RowFields:
    r"""MATH's `problem, solution`, the answer in the last `\boxed{}`; `answer, unique_id, type` if there."""
    solution = _optional_text(row, "solution", strip=False) or ""
    answer = _optional_text(row, "answer") or last_boxed(solution)
    if answer is None:
        raise DataError(r"no answer: solution has no \boxed{...} and there is no field answer")
    return RowFields(
        id=_id(row, "unique_id") if "unique_id" in row else None,
        question=_text(row, "problem", strip=False),
        reference=solution,
        answer=answer,
        task="math",
        family=_optional_text(row, "type") or _optional_text(row, "subject"),
    )


def _convert_gsm8k(row: Row) -> RowFields:
    r"""GSM8K's hub rows: `question, answer` ending in `#### 18`; the reference says `\boxed{18}` instead."""
    solution = _text(row, "answer")
    match = _GSM8K_ANSWER.search(solution)
    if match is None:
        raise DataError("no answer: the field answer does not end in a line `#### ...`")
    steps = solution[: match.start()].rstrip()
    stated = rf"The final answer is: \boxed{{{match[1]}}}"
    return RowFields(
        id=_id(row, "id") if "id" in row else None,
        question=_text(row, "question", strip=False),
        reference=f"{steps}\n{stated}" if steps else stated,
        answer=match[1],
        task="math",
    )


def _convert_plain(row: Row) -> RowFields:
    """Our own: `id, prompt` (complete) or `question, reference` or `solution, answer, task, choices`."""
    choices = _choices(row) if row.get("choices") is not None else None
    task = _optional_text(row, "task") or ("choice" if choices else "math")
    if task not in ("choice", "math"):
        raise DataError(f"task is {task!r}: use choice or math")
    question = _optional_text(row, "question", strip=False)
    prompt = _optional_text(row, "prompt", strip=False)
    if question is None and prompt is None:
        raise DataError("missing field: prompt or question")
    answer = _text(row, "answer")
    if task == "choice":
        if choices is None:
            raise DataError("missing field: choices (the task is choice)")
        answer = _label_of(answer, choices, "answer")
    return RowFields(
        id=_id(row, "id"),
        question=question,
        prompt=prompt,
        reference=_first_text(row, "reference", "solution"),
        answer=answer,
        task="choice" if task == "choice" else "math",
        choices=choices if task == "choice" else None,
        family=_optional_text(row, "family"),
    )


def _fits_gsm8k(row: Row) -> bool:
    answer = row.get("answer")
    others = {"choices", "prompt", "reference", "solution"} & row.keys()
    return "question" in row and not others and isinstance(answer, str) and "####" in answer


def _fits_mmlu(row: Row) -> bool:
    return {"question", "choices", "answer"} <= row.keys() and "id" not in row and not isinstance(row["answer"], str)


FORMATS: dict[str, RowFormat] = {
    "choice": RowFormat(lambda row: {"question", "choices", "answerKey"} <= row.keys(), _convert_choice),
    "openbookqa": RowFormat(lambda row: {"question_stem", "choices"} <= row.keys(), _convert_openbookqa),
    "math_prompted": RowFormat(lambda row: {"prompt", "cot", "answerKey"} <= row.keys(), _convert_math_prompted),
    "math": RowFormat(lambda row: {"problem", "solution"} <= row.keys(), _convert_math),
    "mmlu": RowFormat(_fits_mmlu, _convert_mmlu),
    "gsm8k": RowFormat(_fits_gsm8k, _convert_gsm8k),
    "plain": RowFormat(lambda row: "answer" in row and bool({"prompt", "question"} & row.keys()), _convert_plain),
}


def _text(row: Row, field: str, *, strip: bool = True) -> str:
    value = _optional_text(row, field, strip=strip)
    if value is None:
        raise DataError(f"missing field: {field}" if row.get(field) is None else f"empty field: {field}")
    return value


def _optional_text(row: Row, field: str, *, strip: bool = True) -> str | None:
    """A field as text, numbers included; None where it is missing, null or blank."""
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{field} must be text, got {_type_name(value)}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{field} must be text or a finite number, got {value}")
        value = int(value) if value.is_integer() else value
    return _encodable(str(value), field, strip=strip)


def _first_text(row: Row, *fields: str) -> str:
    """The first of the fields that is not blank, as it is; empty if all are."""
    return next((text for field in fields if (text := _optional_text(row, field, strip=False))), "")


def _encodable(value: str, field: str, *, strip: bool) -> str | None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{field} has a lone surrogate at character {error.start}: not valid Unicode text") from error
    if not value.strip():
        return None
    return value.strip() if strip else value


def _id(row: Row, field: str) -> str:
    value = _optional_text(row, field)
    if value is None:
        raise DataError(f"missing id: the field {field} is missing or empty")
    return value


def _choices(row: Row) -> tuple[Choice, ...]:
    """`{label: [...], text: [...]}`, `[{label, text}, ...]`, or `[text, ...]` (then labelled A, B, ...)."""
    value = row.get("choices")
    if isinstance(value, Mapping):
        labels, texts = _listed(value.get("label")), _listed(value.get("text"))
    elif _is_list(value) and all(isinstance(item, Mapping) for item in value):
        labels, texts = [item.get("label") for item in value], [item.get("text") for item in value]
    elif _is_list(value):
        labels, texts = list(_LETTERS[: len(value)]), list(value)
    else:
        raise DataError(f"choices must be lists of label and text, got {_type_name(value)}")
    if len(labels) != len(texts):
        raise DataError("choices must have as many labels as texts")
    if len(labels) < 2:
        raise DataError(f"choices must be 2 or more, got {len(labels)}")
    pairs = [{"label": label, "text": text} for label, text in zip(labels, texts, strict=True)]
    choices = tuple(Choice(label=_text(pair, "label"), text=_text(pair, "text", strip=False)) for pair in pairs)
    if len({choice.label.casefold() for choice in choices}) < len(choices):
        raise DataError(f"choices have a label twice: {', '.join(choice.label for choice in choices)}")
    return choices


def _label_of(answer: str, choices: Sequence[Choice], field: str) -> str:
    """The label that an answer means: it is a label itself, or exactly one choice's text."""
    for matches in (
        [choice.label for choice in choices if choice.label == answer],
        [choice.label for choice in choices if choice.text.strip().casefold() == answer.casefold()],
        [choice.label for choice in choices if choice.label.casefold() == answer.casefold()],
    ):
        if len(matches) == 1:
            return matches[0]
    options = "; ".join(f"{choice.label}: {choice.text}" for choice in choices)
    raise DataError(f"{field} {answer!r} is not among the choices ({options})")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _listed(value: object) -> list[Any]:
    if not _is_list(value):
        raise DataError(f"choices must be lists of label and text, got {_type_name(value)} for one of them")
    return list(value)


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
