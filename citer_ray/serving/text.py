"""From token ids to text, piece by piece: characters stay whole, stop strings are cut off exactly.

The ingress feeds ids as they come, whoever wrote them; a stream and a whole response run through the same code, so
the pieces of a stream joined are the whole text. The method of decoding a short window again is that of transformers'
and vLLM's streamers: a token's text depends on its neighbours, so it is the difference of two decodings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 6  # ids of context before the first new one: enough for a tokenizer's rules about spaces
# A character of UTF-8 has at most 4 bytes, and a token at least one: what stays broken for longer is broken.
_MAX_PENDING = 4


class Decoder(Protocol):
    """What is needed of a `transformers` tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of one response's ids.

    Args:
        tokenizer: of the pair.
        prompt_ids: what the response follows; its last ids are context, and never part of the text.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_WINDOW:])
        self._start, self._read = 0, len(self._ids)  # window of context, and the first id whose text is not out yet

    def add(self, token_id: int) -> str:
        """The text that this id completes; empty inside a character."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        pending = len(self._ids) - self._read
        if after.endswith(_REPLACEMENT) and not before.endswith(_REPLACEMENT) and pending <= _MAX_PENDING:
            return ""
        if len(after) <= len(before) and pending <= _MAX_PENDING:
            return ""  # a special token, or a token that changes nothing yet
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to the content."""

    index: int  # of the token in the response
    text: str


class TextStream:
    """Pieces of one response, with its stop strings.

    A piece is given out as soon as no stop string can begin in it.

    Attributes:
        stopped: a stop string was found; what comes after it is ignored.
        num_tokens: tokens that belong to the response: all that were added up to the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int],
        stops: Collection[str] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops, self._end_ids = tuple(stops), frozenset(end_ids)
        self._held: list[Piece] = []
        self.stopped = False
        self.num_tokens = 0

    def add(self, token_id: int) -> list[Piece]:
        """Take a token in; returns the pieces that are settled now, in order."""
        if self.stopped:
            return []
        text = "" if token_id in self._end_ids else self._detokenizer.add(token_id)
        self._held.append(Piece(self.num_tokens, text))
        self.num_tokens += 1
        if not self._stops:
            return self._release(len(text))
        held = "".join(piece.text for piece in self._held)
        found = [position for stop in self._stops if (position := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._release(len(held) - self._possible_start(held))

    def finish(self) -> list[Piece]:
        """The pieces that were held back, at the response's end; an unfinished character is dropped."""
        rest, self._held = self._held, []
        return rest

    def _possible_start(self, held: str) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> list[Piece]:
        """Give out the pieces that lie within the first `length` characters."""
        settled, end = 0, 0
        for piece in self._held:
            end += len(piece.text)
            if end > length:
                break
            settled += 1
        given, self._held = self._held[:settled], self._held[settled:]
        return given

    def _cut(self, length: int) -> list[Piece]:
        """Give out everything, with only the first `length` characters of text."""
        given, self._held = [], self._held
        for piece in self._held:
            given.append(Piece(piece.index, piece.text[: max(0, length)]))
            length -= len(piece.text)
        self._held = []
        return given
