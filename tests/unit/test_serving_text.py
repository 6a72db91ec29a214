"""Incremental text: characters stay whole, stop strings are cut exactly, pieces joined are the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from citer_ray.serving.text import Detokenizer, TextStream


class ByteTokenizer:
    """Ids are bytes; 256 is a special token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


class SpacedTokenizer:
    """Words; a leading space is dropped at the beginning of a text, as SentencePiece tokenizers do."""

    words = ("", "one", "two", "three")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self.words[token] for token in token_ids)


def stream(text: str, stops: Sequence[str] = (), prompt: str = "Q: ") -> tuple[str, TextStream]:
    whole = TextStream(ByteTokenizer(), list(prompt.encode()), stops)
    pieces = [piece for byte in text.encode() for piece in whole.add(byte)]
    pieces += whole.finish()
    assert [piece.index for piece in pieces] == list(range(whole.num_tokens))
    return "".join(piece.text for piece in pieces), whole


# U+FFFD itself cannot be told from an unfinished character.
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40), st.text(max_size=10)
)
def test_pieces_joined_are_the_text(text: str, prompt: str) -> None:
    assert stream(text, prompt=prompt)[0] == text


def test_no_piece_cuts_a_character() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), list(b"say "))
    pieces = [detokenizer.add(byte) for byte in "a👩‍🚀𠮷é".encode()]
    assert "".join(pieces) == "a👩‍🚀𠮷é"
    assert [len(piece) for piece in pieces if piece] == [1] * 6
    assert pieces[1:5] == ["", "", "", "👩"]


def test_a_character_that_is_never_finished_is_dropped() -> None:
    whole = TextStream(ByteTokenizer(), [])
    pieces = [piece for byte in "ab👩".encode()[:-1] for piece in whole.add(byte)] + whole.finish()
    assert "".join(piece.text for piece in pieces) == "ab"
    assert len(pieces) == whole.num_tokens == 5


def test_broken_bytes_do_not_hold_the_rest_back() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [])
    text = "".join(detokenizer.add(byte) for byte in [0xFF] * 12 + list(b"after"))
    assert text.endswith("after") and set(text) <= set("\ufffdafter")


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    prompt = list("x👩".encode()[:-1])
    detokenizer = Detokenizer(ByteTokenizer(), prompt)
    assert "x" not in "".join(detokenizer.add(byte) for byte in b"abc")


def test_spaces_depend_on_the_prompt() -> None:
    detokenizer = Detokenizer(SpacedTokenizer(), [1, 2])
    assert [detokenizer.add(3), detokenizer.add(1)] == [" three", " one"]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "tokens"),
    [
        ("hello world", ["wor"], "hello ", 9),
        ("hello world", ["o w", "wor"], "hell", 7),
        ("aaab", ["ab"], "aa", 4),
        ("abcabd", ["abd"], "abc", 6),
        ("no stop here", ["xyz", "heres"], "no stop here", 12),
        ("at the end.", ["."], "at the end", 11),
        ("👩‍🚀 goes", ["🚀 "], "👩‍", 12),
        ("stop at once", ["s"], "", 1),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: str, tokens: int) -> None:
    found, whole = stream(text, stops)
    assert (found, whole.num_tokens) == (expected, tokens)
    assert whole.stopped == (expected != text)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_equal_a_search_in_the_whole_text(text: str, stops: list[str]) -> None:
    found, whole = stream(text, stops)
    # The first byte at which some stop string is complete decides; then the earliest beginning.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        expected = text[: min(text[: ends[0]].find(stop) for stop in stops if stop in text[: ends[0]])]
    assert found == expected
    assert whole.stopped == bool(ends)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    whole = TextStream(ByteTokenizer(), [], ["END"])
    assert [[piece.text for piece in whole.add(byte)] for byte in b"xENx"] == [["x"], [], [], ["E", "N", "x"]]


def test_end_ids_have_no_text() -> None:
    whole = TextStream(ByteTokenizer(), [], end_ids=[ord("z")])
    assert "".join(piece.text for byte in b"abz" for piece in whole.add(byte)) == "ab"
    assert whole.num_tokens == 3
