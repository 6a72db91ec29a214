r"""Examples -> token ids of the prompt and of the reference, apart.

A template for each task, or a row's own whole prompt, optionally inside the tokenizer's chat template. Prompt
and reference are tokenized apart and joined by ids, so that a position never depends on how text merges
across the seam; a reference ends with EOS, and EOS is a step. Fed by `examples.py`; read by label collection,
evaluation and the edges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from citer_ray.errors import ConfigError, DataError
from citer_ray.examples import Example, QuarantinedRow

# The prompts of the CITER authors' data files (arXiv 2502.01976), so that rows without a prompt of their own
# read the same as those with one.
CITER_CHOICE = (
    "Question: {question}\nChoices:\n{choices}\n\nPlease format your response in the following way:\n"
    "[Explanation]. Therefore, the answer is answer (label).\n"
    "Ensure the final sentence includes the answer followed by the label in parentheses.\n\n"
    "Answer and Reasoning:"
)
CITER_MATH = (
    "Solve the following math problem step by step. Ensure all reasoning is shown clearly in LaTeX format, "
    "and you should enclose your answer with \\boxed{{}}.\nQuestion: {question}\nSolution: "
)


class Tokenizer(Protocol):
    """What is needed of a `transformers` tokenizer."""

    bos_token_id: Any
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


class PromptFormat(BaseModel):
    """How an example becomes token ids. Templates are `str.format` templates: literal braces are doubled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choice: str = Field(CITER_CHOICE, description="Template for multiple choice; fields: question, choices.")
    math: str = Field(CITER_MATH, description="Template for math; field: question.")
    choice_line: str = Field("{label}. {text}", description="Template of one line of `choices`; fields: label, text.")
    chat: bool = Field(False, description="Wrap the prompt with the tokenizer's chat template as one user message.")
    use_row_prompt: bool = Field(True, description="Use a row's own complete prompt where it has one.")
    bos: Literal["auto", "always", "never"] = Field(
        "auto",
        description="BOS before the prompt: as the tokenizer or its chat template has it, always, or never.",
    )
    reference_prefix: str = Field("", description="Text before every reference, such as a space after `Answer:`.")

    @field_validator("choice", "math", "choice_line")
    @classmethod
    def _known_fields(cls, template: str, info: Any) -> str:
        fields = {"choice": ("question", "choices"), "math": ("question",), "choice_line": ("label", "text")}
        _check_template(template, fields[info.field_name])
        return template

    @classmethod
    def from_config(cls, config: BaseModel) -> Self:
        """The format that a configuration section with the same fields describes."""
        return cls(**config.model_dump())

    @property
    def digest(self) -> str:
        """A sha256 of everything that decides what a model reads."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def render(self, example: Example) -> str:
        """The prompt's text, before any chat template.

        Raises:
            DataError: The row brings only a whole prompt, and `use_row_prompt` is off.
        """
        if example.full_prompt and self.use_row_prompt:
            return example.prompt
        question = example.question if example.full_prompt else example.prompt
        if question is None:
            raise DataError(
                f"example {example.id!r} ({example.source}, row {example.row}) has a prompt and no question "
                "for the template: set use_row_prompt to true, or give the rows a field question"
            )
        if example.task == "math":
            return self.math.format(question=question)
        lines = [self.choice_line.format(label=choice.label, text=choice.text) for choice in example.choices or ()]
        return self.choice.format(question=question, choices="\n".join(lines))

    def encode_prompt(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids, shape [T], with at most one BOS.

        Raises:
            ConfigError: The tokenizer lacks the chat template that `chat` needs, or the BOS of `always`.
            DataError: See `render`; or the prompt has no token at all.
        """
        text = self.render(example)
        if self.chat:
            text = _in_chat_template(text, tokenizer)
        ids = self.encode_text(text, tokenizer, chat=self.chat)
        if not ids:
            raise DataError(f"the prompt of example {example.id!r} has no tokens")
        return ids

    def encode_text(self, text: str, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
        """Ids of a prompt's text, shape [T], with at most one BOS; `chat` says that a chat template wrote it."""
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        bos_id = self._bos_id(tokenizer, chat)
        if bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def encode_reference(self, example: Example, tokenizer: Tokenizer, eos_token_id: int) -> list[int]:
        """The reference's token ids, shape [T], ending with EOS.

        Raises:
            DataError: The reference is empty, or has EOS before its end.
        """
        if not example.reference.strip():
            raise DataError(f"example {example.id!r} ({example.source}, row {example.row}) has an empty reference")
        ids = list(tokenizer.encode(self.reference_prefix + example.reference, add_special_tokens=False))
        if ids[-1:] != [eos_token_id]:
            ids.append(eos_token_id)
        early = ids.index(eos_token_id)
        if early < len(ids) - 1:
            raise DataError(
                f"the reference of example {example.id!r} has EOS (id {eos_token_id}) at position {early} of "
                f"{len(ids)}: cut the text there"
            )
        return ids

    def _bos_id(self, tokenizer: Tokenizer, chat: bool) -> int | None:
        """The BOS that must come first, or None to leave the ids alone."""
        if self.bos == "never" or (self.bos == "auto" and chat):
            return None  # a chat template writes its own BOS if the model wants one
        bos_id: int | None = tokenizer.bos_token_id
        if self.bos == "always":
            if bos_id is None:
                raise ConfigError("prompt.bos is `always`, but the tokenizer has no BOS token: use auto or never")
            return bos_id
        adds_bos = bos_id is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos_id]
        return bos_id if adds_bos else None


@dataclass(frozen=True, slots=True)
class LengthCheck:
    """Examples that fit the context, and records of those that do not."""

    examples: tuple[Example, ...]
    quarantined: tuple[QuarantinedRow, ...]


def check_lengths(
    examples: Iterable[Example],
    prompt_format: PromptFormat,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    eos_token_id: int | None = None,
    max_new_tokens: int = 0,
) -> LengthCheck:
    """Sets aside the examples whose tokens do not fit the context, before any model loads.

    Args:
        examples: The examples.
        prompt_format: How they become token ids.
        tokenizer: The pair's tokenizer.
        context_length: Tokens that both models can hold.
        eos_token_id: Count the reference too, ending with this id; None leaves it out (evaluation).
        max_new_tokens: Tokens that may follow.
    """
    kept: list[Example] = []
    quarantined: list[QuarantinedRow] = []
    for example in examples:
        try:
            prompt_tokens = len(prompt_format.encode_prompt(example, tokenizer))
            reference_tokens = (
                0 if eos_token_id is None else len(prompt_format.encode_reference(example, tokenizer, eos_token_id))
            )
        except DataError as error:
            quarantined.append(_set_aside(example, str(error), {}))
            continue
        needed = prompt_tokens + reference_tokens + max_new_tokens
        if needed <= context_length:
            kept.append(example)
            continue
        numbers = {
            "prompt_tokens": prompt_tokens,
            "reference_tokens": reference_tokens,
            "max_new_tokens": max_new_tokens,
            "context_length": context_length,
        }
        reason = (
            f"{needed} tokens do not fit the context of {context_length}: prompt {prompt_tokens} + reference "
            f"{reference_tokens} + max_new_tokens {max_new_tokens}"
        )
        quarantined.append(_set_aside(example, reason, numbers))
    return LengthCheck(tuple(kept), tuple(quarantined))


def _set_aside(example: Example, reason: str, numbers: dict[str, int]) -> QuarantinedRow:
    return QuarantinedRow(source=example.source, row=example.row, id=example.id, reason=reason, numbers=numbers)


def _in_chat_template(text: str, tokenizer: Tokenizer) -> str:
    if not tokenizer.chat_template:
        raise ConfigError("prompt.chat is on, but the tokenizer has no chat template: set prompt.chat to false")
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _check_template(template: str, allowed: tuple[str, ...]) -> None:
    fields = ", ".join(f"{{{name}}}" for name in allowed)
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{error}; write literal braces twice, as in \\boxed{{{{}}}}; the fields are {fields}"
        ) from error
    used = {name for _, name, _, _ in pieces if name is not None}
    if unknown := sorted(used - set(allowed)):
        shown = ", ".join(f"{{{name}}}" for name in unknown)
        raise ValueError(
            f"unknown field {shown}: the fields are {fields}; write literal braces twice, as in \\boxed{{{{}}}}"
        )
    if any(conversion or specification for _, _, specification, conversion in pieces):
        raise ValueError(f"a field takes no conversion and no format: write plain {fields}")
    if missing := sorted(set(allowed) - used):
        raise ValueError(f"the template lacks the field {', '.join(f'{{{name}}}' for name in missing)}")
