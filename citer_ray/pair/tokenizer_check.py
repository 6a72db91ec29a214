"""Whether two tokenizers give the same ids for every text, and where they first differ.

Routing passes token ids from one model to the other, so one id must mean one text in both. Read by the pair
check. Compared are the vocabulary id by id, the BOS and EOS tokens, the merges, and the ids of probe texts:
the probes show what a vocabulary does not (normalization, splitting of digits and spaces, added BOS tokens,
stripping around special tokens).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

# Each of these is split or normalized differently by some pair of tokenizers in use.
_PROBES = (
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces,   three,    four\tand a tab",
    "line\nbreak\n\nparagraph\r\nand  \n  indents\n\n\n\tend",
    "007 12 123 1234 12345 1,234,567.89 -3.5e10 50% $9.99 1/2",
    "  7 times   8 is\n  56",
    "It's we'll I'VE don't O'Neil's 'quoted' \"double\"",
    "camelCase snake_case kebab-case CONSTANT x1y2z3 __init__",
    "\\boxed{42} \\frac{1}{2} $x^2 + y_1 = \\sqrt{z}$ \\(a\\) \\[b\\]",
    "def f(x):\n    return x ** 2  # comment\n\n\nif __name__ == '__main__':\n\tf(1)",
    '{"key": [1, 2.0, null, true], "\\u00e9": "a\\"b"}',
    "https://example.org/a-b_c?d=e&f=%20#g user@example.org",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m stra\u00dfe \u0130stanbul",
    "nai\u0308ve cafe\u0301 A\u030angstro\u0308m",
    "\ufb01ne \u2460 \u00bd \uff21\uff22\uff23 \u212b \u2126 x\u00b2",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002 \u4e2d\u6587 \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "soft\u00adhyphen zero\u200bwidth no\u00a0break em\u2014dash \u2026 \u201cquotes\u201d",
    "control \x00 \x07 \x1b[0m \x7f",
    "<s> </s> <unk> <|endoftext|> [INST] <pad>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!????....----====####",
)
_VOCABULARY_PROBES = 200
_TOKENS_PER_PROBE = 8


def first_difference(slm: PreTrainedTokenizerBase, llm: PreTrainedTokenizerBase) -> str | None:
    """Say where two tokenizers first differ, with both values; None if they are the same."""
    checks = (_vocabularies, _special_tokens, _merges, _encodings)
    return next((found for check in checks if (found := check(slm, llm)) is not None), None)


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the vocabulary, added tokens included, in the order of its ids."""
    return dict(sorted((index, token) for token, index in tokenizer.get_vocab().items()))


def merge_rules(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, ...]]:
    """Return the BPE merges in order; empty for other kinds of tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges: list[Any] = json.loads(backend.to_str())["model"].get("merges") or []
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def _vocabularies(slm: PreTrainedTokenizerBase, llm: PreTrainedTokenizerBase) -> str | None:
    ours, theirs = tokens_by_id(slm), tokens_by_id(llm)
    if ours == theirs:
        return None
    index = next(i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i))
    return f"id {index} is {_quoted(ours.get(index))} for the SLM and {_quoted(theirs.get(index))} for the LLM"


def _special_tokens(slm: PreTrainedTokenizerBase, llm: PreTrainedTokenizerBase) -> str | None:
    for name in ("bos_token", "eos_token"):
        ours, theirs = getattr(slm, name), getattr(llm, name)
        if ours != theirs:
            return f"{name} is {_quoted(ours)} for the SLM and {_quoted(theirs)} for the LLM"
    return None


def _merges(slm: PreTrainedTokenizerBase, llm: PreTrainedTokenizerBase) -> str | None:
    for rank, (ours, theirs) in enumerate(zip_longest(merge_rules(slm), merge_rules(llm))):
        if ours != theirs:
            return f"merge {rank} is {_quoted(ours)} for the SLM and {_quoted(theirs)} for the LLM"
    return None


def _encodings(slm: PreTrainedTokenizerBase, llm: PreTrainedTokenizerBase) -> str | None:
    texts = list(_probe_texts(slm))
    for special in (False, True):
        ours = slm(texts, add_special_tokens=special)["input_ids"]
        theirs = llm(texts, add_special_tokens=special)["input_ids"]
        for text, a, b in zip(texts, ours, theirs, strict=True):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y)
                where = f"token {at} of the text {text!r}{' with special tokens added' if special else ''}"
                return f"{where} is {_at(slm, a, at)} for the SLM and {_at(llm, b, at)} for the LLM"
            if slm.decode(a) != llm.decode(b):
                return f"the ids of {text!r} read {slm.decode(a)!r} for the SLM and {llm.decode(b)!r} for the LLM"
    return None


def _probe_texts(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the fixed probes, every added token inside a text, and texts made of random vocabulary entries."""
    yield from _PROBES
    for token in tokenizer.get_added_vocab():
        yield f"before {token} after{token}\n"
    ids = list(tokens_by_id(tokenizer))
    generator = random.Random(0)
    for _ in range(_VOCABULARY_PROBES):
        yield str(tokenizer.decode(generator.choices(ids, k=_TOKENS_PER_PROBE)))


def _at(tokenizer: PreTrainedTokenizerBase, ids: list[int], index: int) -> str:
    if index >= len(ids):
        return "missing"
    return f"{ids[index]} ({tokenizer.convert_ids_to_tokens(ids[index])!r})"


def _quoted(value: object) -> str:
    return "missing" if value is None else repr(value)
