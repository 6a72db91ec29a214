"""The embedded pair's tokenizer: round trip of any text, one token a digit, reserved ids, chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from citer_ray.pair.embedded.problems import generate, prompt_of
from citer_ray.pair.embedded.tokenizer import (
    BOS_ID,
    EOS_ID,
    HANDOFF,
    HANDOFF_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    UNK_ID,
    build_tokenizer,
)

CONTEXT = 512
TEXTS = st.text() | st.text(alphabet="<|handoff>/spad k\\boxed{}0123456789\n\tMia")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(generate(2000, seed=21), CONTEXT)


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


@given(text=TEXTS)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    ids = ids_of(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert UNK_ID not in ids


@given(text=TEXTS)
def test_special_ids_come_from_their_literals_alone(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    assert not set(ids_of(tokenizer, text)) & set(range(len(SPECIAL_TOKENS)))


@given(before=st.text(max_size=5), after=st.text(max_size=5))
def test_the_handoff_literal_is_one_reserved_token(tokenizer: PreTrainedTokenizerFast, before: str, after: str) -> None:
    ids = ids_of(tokenizer, before + HANDOFF + after)
    assert ids.count(HANDOFF_ID) == 1
    assert tokenizer.decode(ids) == before + HANDOFF + after
    assert tokenizer.decode([HANDOFF_ID], skip_special_tokens=True) == ""


def test_ids_of_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert special == (PAD_ID, BOS_ID, EOS_ID, UNK_ID)


def test_whole_words_and_single_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = ids_of(tokenizer, "Keeping is better, so 57 apples. Answer: \\boxed{57}")
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [str(token).replace("Ġ", " ") for token in tokens] == [
        "K", "e", "e", "p", "i", "n", "g", " is", " better", ",", " so", " 5", "7", " apples", ".",
        " Answer", ":", " \\boxed{", "5", "7", "}",
    ]  # fmt: skip


def test_decision_words_inside_a_solution_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(ids_of(tokenizer, ". Keeping is")) == 3


def test_problems_need_no_byte_fallback(tokenizer: PreTrainedTokenizerFast) -> None:
    for problem in generate(1000, seed=22):
        tokens = tokenizer.convert_ids_to_tokens(ids_of(tokenizer, prompt_of(problem) + problem.solution))
        letters = [token for token in tokens if len(token) == 1 and token.isalpha() and token != "Ċ"]
        assert set(letters) <= {"A", "Ġ"}, (problem, letters)


def test_plain_text_starts_with_bos_once(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("Mia has 5 apples.\n")["input_ids"]
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert EOS_ID not in ids


def test_chat_of_one_user_message_is_the_plain_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = generate(1, seed=23)[0]
    chat = [{"role": "user", "content": problem.question}]
    for flag in (True, False):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=flag, tokenize=False)
        assert isinstance(text, str)
        assert ids_of(tokenizer, text) == tokenizer(prompt_of(problem))["input_ids"]


def test_chat_with_an_answer_is_the_training_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = generate(1, seed=24)[0]
    chat = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.solution},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert isinstance(text, str)
    prompt = tokenizer(prompt_of(problem))["input_ids"]
    assert ids_of(tokenizer, text) == [*prompt, *ids_of(tokenizer, problem.solution), EOS_ID]


def test_saved_tokenizer_loads_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zürich: 3.14 — naïve café, 日本\n\ttab  two  spaces \\frac{1}{2} <|handoff|> \\boxed{42}"
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.padding_side, loaded.model_max_length) == ("left", CONTEXT)


def test_vocabulary_does_not_depend_on_the_order_of_problems() -> None:
    problems = generate(300, seed=25)
    one, other = build_tokenizer(problems, CONTEXT), build_tokenizer(problems[::-1], CONTEXT)
    assert one.get_vocab() == other.get_vocab()
