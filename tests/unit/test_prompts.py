r"""Prompts and references as token ids: templates, chat, BOS and EOS, and what does not fit the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from citer_ray.errors import ConfigError, DataError
from citer_ray.examples import Choice, Example, load_examples
from citer_ray.prompts import CITER_MATH, PromptFormat, check_lengths

DATA = Path(__file__).parents[1] / "data"
BOS, EOS, UNKNOWN, USER, ASSISTANT = range(5)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(*, adds_bos: bool, adds_eos: bool = False, chat: str | None = CHAT_TEMPLATE) -> Any:
    """One token a character, with the special tokens that real tokenizers add by themselves."""
    names = ["<s>", "</s>", "<unk>", "<user>", "<assistant>"]
    vocabulary = {token: number for number, token in enumerate([*names, *LETTERS, " ", "\n", ":", ".", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = chat
    return fast


WITH_BOS = make_tokenizer(adds_bos=True)
PLAIN = make_tokenizer(adds_bos=False)
BARE = PromptFormat(math="{question}\n", choice="{question}\n{choices}\n")


def ids_of(text: str) -> list[int]:
    return [PLAIN.convert_tokens_to_ids(character) for character in text]


def math_example(**fields: Any) -> Example:
    return Example(**{"id": "m", "prompt": "ab", "reference": "cd", "answer": "1", "task": "math", **fields})


CHOICE = Example(
    id="c",
    prompt="Where?",
    answer="B",
    task="choice",
    choices=(Choice(label="A", text="bank"), Choice(label="B", text="{mall}")),
)


def test_a_rendered_template_equals_the_prompt_that_the_authors_rows_bring() -> None:
    for name in ("citer_choice_train", "citer_math_train"):
        for example in load_examples(DATA / f"{name}.jsonl"):
            assert PromptFormat().render(example) == example.prompt
            assert PromptFormat(use_row_prompt=False).render(example) == example.prompt


def test_templates_of_both_tasks() -> None:
    assert PromptFormat().render(math_example()) == CITER_MATH.format(question="ab")
    assert "enclose your answer with \\boxed{}.\nQuestion: ab\nSolution: " in PromptFormat().render(math_example())
    prompt_format = PromptFormat(choice="{choices}|{question}", choice_line="({label}) {text}")
    assert prompt_format.render(CHOICE) == "(A) bank\n(B) {mall}|Where?"


def test_braces_in_a_question_are_no_template() -> None:
    assert BARE.render(math_example(prompt="{question} {0} {x!r}")) == "{question} {0} {x!r}\n"


def test_a_row_prompt_is_used_as_it_is_unless_switched_off() -> None:
    whole = math_example(prompt="whole", full_prompt=True, question="q")
    assert BARE.render(whole) == "whole"
    bare = BARE.model_copy(update={"use_row_prompt": False})
    assert bare.render(whole) == "q\n"
    with pytest.raises(DataError, match=r"'m' \(f, row 4\) has a prompt and no question .* use_row_prompt"):
        bare.render(math_example(full_prompt=True, source="f", row=4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"math": "{question} {choices}"}, r"unknown field \{choices\}: the fields are \{question\}"),
        ({"choice": "{q} {choices}"}, r"unknown field \{q\}: the fields are \{question\}, \{choices\}"),
        ({"math": "{question} \\boxed{}"}, r"unknown field \{\}.*write literal braces twice"),
        ({"math": "{0} {question}"}, r"unknown field \{0\}"),
        ({"math": "{question.x}"}, r"unknown field \{question.x\}"),
        ({"math": "{question[0]}"}, "unknown field"),
        ({"math": "{question!r}"}, "no conversion and no format"),
        ({"math": "{question:>9}"}, "no conversion and no format"),
        ({"math": "{question"}, "write literal braces twice"),
        ({"math": "question}"}, "write literal braces twice"),
        ({"math": "Solve."}, r"lacks the field \{question\}"),
        ({"choice": "{question}"}, r"lacks the field \{choices\}"),
        ({"choice_line": "{label}"}, r"lacks the field \{text\}"),
        ({"bos": "maybe"}, "'auto', 'always' or 'never'"),
        ({"template": "{question}"}, "Extra inputs are not permitted"),
    ],
)
def test_bad_formats_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptFormat(**fields)  # type: ignore[arg-type]


def test_a_format_is_made_from_a_configuration_section() -> None:
    class Section(BaseModel):
        math: str = "{question}\n"
        chat: bool = True

    assert PromptFormat.from_config(Section()) == PromptFormat(math="{question}\n", chat=True)


def test_the_digest_tells_formats_apart() -> None:
    assert PromptFormat().digest == PromptFormat(chat=False).digest
    others = [BARE, PromptFormat(chat=True), PromptFormat(bos="never"), PromptFormat(reference_prefix=" ")]
    assert len({prompt_format.digest for prompt_format in [PromptFormat(), *others]}) == 5


@pytest.mark.parametrize(
    ("tokenizer", "bos", "expected"),
    [
        (WITH_BOS, "auto", [BOS]),
        (WITH_BOS, "always", [BOS]),
        (WITH_BOS, "never", []),
        (PLAIN, "auto", []),
        (PLAIN, "always", [BOS]),
        (PLAIN, "never", []),
        (make_tokenizer(adds_bos=True, adds_eos=True), "auto", [BOS]),
        (make_tokenizer(adds_bos=False, adds_eos=True), "auto", []),
    ],
)
def test_bos_comes_once_and_the_prompt_never_ends_with_eos(tokenizer: Any, bos: Any, expected: list[int]) -> None:
    prompt_format = BARE.model_copy(update={"bos": bos})
    assert prompt_format.encode_prompt(math_example(), tokenizer) == [*expected, *ids_of("ab\n")]
    written = math_example(prompt="<s>ab", full_prompt=True)
    assert prompt_format.encode_prompt(written, tokenizer) == [BOS, *ids_of("ab")]


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize("tokenizer", [WITH_BOS, PLAIN])
def test_a_chat_template_writes_its_own_bos(tokenizer: Any, bos: Any) -> None:
    prompt_format = PromptFormat(math="{question}", chat=True, bos=bos)
    assert prompt_format.encode_prompt(math_example(), tokenizer) == [BOS, USER, *ids_of("ab"), ASSISTANT]


def test_a_chat_template_without_bos_gets_none_unless_asked_for() -> None:
    tokenizer = make_tokenizer(adds_bos=True, chat="<user>{{ messages[0]['content'] }}<assistant>")
    prompt_format = PromptFormat(math="{question}", chat=True)
    ids = [USER, *ids_of("ab"), ASSISTANT]
    assert prompt_format.encode_prompt(math_example(), tokenizer) == ids
    always = prompt_format.model_copy(update={"bos": "always"})
    assert always.encode_prompt(math_example(), tokenizer) == [BOS, *ids]


def test_a_missing_chat_template_or_bos_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"no chat template: set prompt\.chat to false"):
        PromptFormat(chat=True).encode_prompt(math_example(), make_tokenizer(adds_bos=False, chat=None))
    tokenizer = make_tokenizer(adds_bos=False)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="no BOS token: use auto or never"):
        PromptFormat(bos="always").encode_prompt(math_example(), tokenizer)
    assert BARE.encode_prompt(math_example(), tokenizer) == ids_of("ab\n")


@pytest.mark.parametrize("tokenizer", [WITH_BOS, PLAIN])
def test_a_reference_ends_with_one_eos_and_has_no_bos(tokenizer: Any) -> None:
    assert BARE.encode_reference(math_example(), tokenizer, EOS) == [*ids_of("cd"), EOS]
    assert BARE.encode_reference(math_example(reference="cd</s>"), tokenizer, EOS) == [*ids_of("cd"), EOS]
    prefixed = BARE.model_copy(update={"reference_prefix": " "})
    assert prefixed.encode_reference(math_example(), tokenizer, EOS) == [*ids_of(" cd"), EOS]


def test_references_that_cannot_be_labelled_are_refused() -> None:
    with pytest.raises(DataError, match=r"'m' .* empty reference"):
        BARE.encode_reference(math_example(reference=" "), PLAIN, EOS)
    with pytest.raises(DataError, match=r"EOS \(id 1\) at position 1 of 4: cut the text there"):
        BARE.encode_reference(math_example(reference="c</s>d"), PLAIN, EOS)


def test_prompt_and_reference_do_not_merge_across_the_seam() -> None:
    merging = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3, "\n": 4}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="</s>")
    prompt_format = PromptFormat(math="{question}")
    example = math_example(prompt="a", reference="b")
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]
    ids = prompt_format.encode_prompt(example, tokenizer) + prompt_format.encode_reference(example, tokenizer, 3)
    assert ids == [0, 1, 3]


def test_lengths_are_checked_with_numbers() -> None:
    fits = math_example(id="fits")  # 1 BOS + 3, and 3 with EOS
    long_prompt = math_example(id="prompt", prompt="a" * 10, row=2, source="f")
    long_reference = math_example(id="reference", reference="c" * 10, row=3)
    examples = [fits, long_prompt, long_reference]
    check = check_lengths(examples, BARE, WITH_BOS, context_length=12, eos_token_id=EOS, max_new_tokens=5)
    assert check.examples == (fits,)
    first, second = check.quarantined
    assert (first.id, first.row, first.source) == ("prompt", 2, "f")
    expected = "20 tokens do not fit the context of 12: prompt 12 + reference 3 + max_new_tokens 5"
    assert first.reason == expected
    assert first.numbers == {
        "prompt_tokens": 12,
        "reference_tokens": 3,
        "max_new_tokens": 5,
        "context_length": 12,
    }
    assert second.numbers["reference_tokens"] == 11


def test_the_context_may_be_filled_to_the_last_token() -> None:
    def fitting(context_length: int, **options: Any) -> int:
        check = check_lengths([math_example()], BARE, WITH_BOS, context_length=context_length, **options)
        return len(check.examples)

    assert (fitting(4), fitting(3)) == (1, 0)
    assert (fitting(7, eos_token_id=EOS), fitting(6, eos_token_id=EOS)) == (1, 0)
    assert (fitting(9, max_new_tokens=5), fitting(8, max_new_tokens=5)) == (1, 0)


def test_examples_that_cannot_be_encoded_are_set_aside_with_the_reason() -> None:
    examples = [
        math_example(id="a", reference="c</s>d"),
        math_example(id="b", reference=""),
        math_example(id="c"),
    ]
    check = check_lengths(examples, BARE, PLAIN, context_length=100, eos_token_id=EOS)
    assert [example.id for example in check.examples] == ["c"]
    assert ["EOS" in bad.reason for bad in check.quarantined] == [True, False]
    assert "empty reference" in check.quarantined[1].reason
    assert len(check_lengths(examples, BARE, PLAIN, context_length=100).examples) == 3
