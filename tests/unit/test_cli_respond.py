"""Routed responses in the terminal: colours by writer, whole characters, the summary line."""

from __future__ import annotations

from collections.abc import Sequence

from citer_ray.cli.respond import coloured, summary
from citer_ray.decoding import Trace
from citer_ray.engine import Finish
from citer_ray.policy import Writer


class ByteTokenizer:
    """One id a byte of UTF-8."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def trace(text: str, writers: list[Writer]) -> Trace:
    ids = list(text.encode())
    return Trace(token_ids=ids, writers=writers, scores=[None] * len(ids), logprobs=[0.0] * len(ids), visits=1)


def test_the_llms_tokens_are_highlighted() -> None:
    text = coloured(trace("abc", [Writer.SLM, Writer.LLM, Writer.SLM]), ByteTokenizer())
    assert text.plain == "abc"
    assert [(span.start, span.end) for span in text.spans if "yellow" in str(span.style)] == [(1, 2)]


def test_a_character_of_several_tokens_stays_whole_across_a_switch() -> None:
    text = "a\N{GRINNING FACE}b"
    writers = [Writer.SLM, Writer.SLM, Writer.LLM, Writer.SLM, Writer.LLM, Writer.SLM]
    assert coloured(trace(text, writers), ByteTokenizer()).plain == text


def test_summary() -> None:
    one = trace("abcd", [Writer.SLM, Writer.LLM, Writer.SLM, Writer.SLM])
    one.finish = Finish.EOS
    assert summary(one) == "4 tokens, 1 by the LLM (25.0%), 1 visit, ended by eos"
