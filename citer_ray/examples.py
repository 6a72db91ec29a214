"""Examples: what is labelled, rolled out and graded.

`load_examples` turns a source (`example_sources.py`) row by row (`example_formats.py`) into `Example`s. A row
that cannot be used is set aside with its number and the reason, or raised, but never dropped in silence. Read
by `prompts.py`, `answers.py`, label collection and evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from citer_ray.choice_answers import Choice
from citer_ray.errors import ConfigError, DataError
from citer_ray.example_formats import RowFields, Task, convert_row, format_named
from citer_ray.example_sources import read_rows

__all__ = [
    "Choice",
    "Example",
    "LoadedExamples",
    "QuarantinedRow",
    "Task",
    "load_examples",
    "split_examples",
]

SHOWN_REASONS = 3
NOT_CONTENT = {"row", "source"}  # the same example read from another file is the same example


class Example(BaseModel):
    """A question with its answer; `reference` is the ground-truth rationale that ends in the answer.

    `prompt` is the whole prompt where `full_prompt` says so, else the question for a template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    reference: str = ""
    answer: str = Field(min_length=1)
    task: Task
    choices: tuple[Choice, ...] | None = None
    family: str | None = None
    full_prompt: bool = False
    question: str | None = Field(None, description="The bare question of a row that brings a whole prompt, if known.")
    row: int = Field(0, description="Number of the row in its source, from 1; a JSONL file's line.")
    source: str = ""

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> Example:
        labels = [choice.label for choice in self.choices or ()]
        if self.task == "choice" and self.answer not in labels:
            raise ValueError(f"answer {self.answer!r} is not a label of the choices {labels}")
        return self

    def content(self) -> dict[str, object]:
        """Everything but where the example was read."""
        return self.model_dump(mode="json", exclude=NOT_CONTENT)


class QuarantinedRow(BaseModel):
    """A row or an example that was set aside, and why; `numbers` are the figures of a limit it breaks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    row: int
    id: str | None = None
    reason: str
    numbers: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedExamples:
    """What a source gave; `digest` is a sha256 over the examples' contents, in order."""

    examples: tuple[Example, ...]
    quarantined: tuple[QuarantinedRow, ...] = ()
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.examples))

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


def load_examples(
    source: str | Path,
    *,
    format: str = "auto",  # the setting's name, and `format()` is not needed here
    task: Task | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: Literal["quarantine", "raise"] = "quarantine",
    require_reference: bool = True,
    families: Sequence[str] | None = None,
) -> LoadedExamples:
    """Loads examples and sets bad rows aside.

    Args:
        source: A JSONL or Parquet file, `hub:NAME[:CONFIG]`, or `embedded:SPLIT[:COUNT][:FAMILY,FAMILY]`.
        format: A name of `example_formats.FORMATS`; `auto` goes by each row's fields.
        task: Refuse examples of another task.
        split: Split of a hub data set.
        limit: Stop after this many good examples.
        on_error: What to do with a bad row: quarantine it, or raise at the first.
        require_reference: Whether a row without a reference is bad (labels need one, evaluation does not).
        families: Embedded problems only: draw from these families.

    Raises:
        ConfigError: The source, the format or the limit cannot be understood.
        DataError: The source cannot be opened or has no good row; or a row is bad and `on_error` is `raise`.
    """
    if format != "auto":
        format_named(format)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: it must be at least 1, or null for all")
    name = str(source)
    loader = _Loader(name, format, task, require_reference)
    for numbered in read_rows(name, split=split, limit=limit, families=families):
        try:
            if numbered.reason is not None:
                raise DataError(numbered.reason)
            loader.add(numbered.row, numbered.number)
        except DataError as error:
            if on_error == "raise":
                raise DataError(f"{name}, row {numbered.number}: {error}") from error
            loader.set_aside(numbered.row, numbered.number, str(error))
        if len(loader.examples) == limit:
            break
    return loader.result()


class _Loader:
    """The state of one load: good examples, bad rows, and which row used which id."""

    def __init__(self, source: str, format_name: str, task: Task | None, require_reference: bool) -> None:
        self.examples: list[Example] = []
        self._quarantined: list[QuarantinedRow] = []
        self._row_of_id: dict[str, int] = {}
        self._source = source
        self._format = format_name
        self._task = task
        self._require_reference = require_reference

    def add(self, row: object, number: int) -> None:
        fields = convert_row(row, self._format)
        if self._task is not None and fields.task != self._task:
            raise DataError(f"the row's task is {fields.task}, but {self._task} is asked for")
        if self._require_reference and not fields.reference:
            raise DataError("empty reference: labels need a ground-truth rationale")
        example = _example(fields, self._source, number)
        first = self._row_of_id.setdefault(example.id, number)
        if first != number:
            content = "" if fields.id else " (made from its content: the rows say the same)"
            raise DataError(f"duplicate id {example.id!r}{content}: row {first} has it already")
        self.examples.append(example)

    def set_aside(self, row: object, number: int, reason: str) -> None:
        row_id = row.get("id") if isinstance(row, dict) else None
        self._quarantined.append(
            QuarantinedRow(
                source=self._source,
                row=number,
                id=str(row_id) if isinstance(row_id, (str, int)) else None,
                reason=reason,
            )
        )

    def result(self) -> LoadedExamples:
        if self.examples:
            return LoadedExamples(tuple(self.examples), tuple(self._quarantined))
        if not self._quarantined:
            raise DataError(f"{self._source} holds no rows")
        shown = "; ".join(f"row {bad.row}: {bad.reason}" for bad in self._quarantined[:SHOWN_REASONS])
        raise DataError(f"{self._source} has no usable row among {len(self._quarantined)}: {shown}")


def split_examples(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Holds out a fraction of the examples by id; a split by token would put a question on both sides.

    An example's side depends on the seed and the set of ids, not on their order: the ids of lowest hashes
    are held out. A fraction between 0 and 1 leaves at least one of two or more examples on each side.

    Returns:
        The examples that stay and those that are held out, each in the given order.

    Raises:
        ConfigError: The fraction is not between 0 and 1.
        DataError: An id occurs twice.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"the fraction to hold out is {fraction}: it must be between 0 and 1")
    ids = {example.id for example in examples}
    if len(ids) < len(examples):
        raise DataError(f"cannot split: {len(examples) - len(ids)} of {len(examples)} examples repeat an id")
    count = round(fraction * len(ids))
    if 0.0 < fraction < 1.0 and len(ids) > 1:
        count = min(max(count, 1), len(ids) - 1)
    held_out = set(sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[:count])
    return (
        tuple(example for example in examples if example.id not in held_out),
        tuple(example for example in examples if example.id in held_out),
    )


def _example(fields: RowFields, source: str, number: int) -> Example:
    full_prompt = fields.prompt is not None
    try:
        return Example(
            id=fields.id or _content_id(fields),
            prompt=fields.prompt or fields.question or "",
            reference=fields.reference,
            answer=fields.answer,
            task=fields.task,
            choices=fields.choices,
            family=fields.family,
            full_prompt=full_prompt,
            question=fields.question if full_prompt else None,
            row=number,
            source=source,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _content_id(fields: RowFields) -> str:
    """An id for a row of a format without ids: the same content has the same id in every file and order."""
    choices = [[choice.label, choice.text] for choice in fields.choices or ()]
    content = [fields.task, fields.prompt, fields.question, choices, fields.answer, fields.reference]
    return f"sha256:{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]}"


def _digest(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example.content(), sort_keys=True, ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()
