"""Training batches of the embedded pair: encoded problems in length buckets, and drills.

Fed by ``problems`` and ``tokenizer``; read by ``training`` and ``evaluate``. Prompt and solution are
tokenized apart and joined by ids. Seeded by the numpy Generator that the caller passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from citer_ray.errors import ConfigError
from citer_ray.pair.embedded.problems import DECISION_REACH, LARGEST, Problem, prompt_of
from citer_ray.pair.embedded.tokenizer import BOS_ID, EOS_ID, PAD_ID
from citer_ray.pair.embedded.wording import KEEP_WORDS, SWAP_WORDS

BATCHES_PER_BUCKET = 16
SUM_KINDS, SUM_WEIGHTS = ("+", "-", "*", "scale"), (0.44, 0.44, 0.07, 0.05)
DECISION_SHARE = 0.25  # of the drills; the rest are sums

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedProblems:
    """``ids_NT`` (padded at the right), where each row's solution starts, and where it ends (after EOS)."""

    ids_NT: IntArray
    start_N: IntArray
    end_N: IntArray


def encode_problems(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> EncodedProblems:
    """Encodes BOS, prompt, solution and EOS of every problem."""
    prompts = tokenizer([prompt_of(problem) for problem in problems])["input_ids"]
    solutions = tokenizer([problem.solution for problem in problems], add_special_tokens=False)["input_ids"]
    rows = [prompt + solution + [EOS_ID] for prompt, solution in zip(prompts, solutions, strict=True)]
    ids_NT = np.full((len(rows), max(map(len, rows))), PAD_ID, dtype=np.int64)
    for i, row in enumerate(rows):
        ids_NT[i, : len(row)] = row
    return EncodedProblems(ids_NT, np.array([len(prompt) for prompt in prompts]), np.array([len(row) for row in rows]))


def row_batches(data: EncodedProblems, batch_size: int, rng: np.random.Generator) -> Iterator[IntArray]:
    """Yields row numbers without end: shuffled, then sorted by length within a few batches, to pad little."""
    chunk = min(batch_size * BATCHES_PER_BUCKET, len(data.end_N) // batch_size * batch_size)
    if chunk == 0:
        raise ConfigError(f"{len(data.end_N)} problems do not fill one batch of {batch_size}")
    while True:
        order = rng.permutation(len(data.end_N))
        for begin in range(0, len(order) - chunk + 1, chunk):
            rows = order[begin : begin + chunk]
            rows = rows[np.argsort(data.end_N[rows], kind="stable")].reshape(-1, batch_size)
            for i in rng.permutation(len(rows)):
                yield rows[i]


class Drills:
    """Rows of bare sums (`` 12 + 5 = 17.``) and bare decisions (`` 12, 15. Moving is better, so 15.``).

    They use the ids of the solutions' arithmetic, many to a row, so that arithmetic is learned before reading
    is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> None:
        self._rng = rng
        vocabulary = tokenizer.get_vocab()
        self._digits = [vocabulary[str(d)] for d in range(10)]
        self._spaced = [vocabulary[f"Ġ{d}"] for d in range(10)]
        self._signs = {sign: vocabulary[f"Ġ{sign}"] for sign in "+-*="}
        self._dot, self._comma = vocabulary["."], vocabulary[","]
        self._decisions = [[vocabulary[f"Ġ{word}"] for word in words] for words in (SWAP_WORDS, KEEP_WORDS)]
        self._is_better = [vocabulary[token] for token in ("Ġis", "Ġbetter", ",", "Ġso")]

    def row(self, length: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """One row of ``length`` ids, and the mask of the results' tokens (the only ones to learn)."""
        ids, results = [BOS_ID], [False]
        while len(ids) < length:
            for part, wanted in self._decision() if self._rng.random() < DECISION_SHARE else self._sum():
                ids += part
                results += [wanted] * len(part)
        return np.array(ids[:length]), np.array(results[:length])

    def _number(self, n: int) -> list[int]:
        return [self._spaced[n]] if n < 10 else [self._spaced[n // 10], self._digits[n % 10]]

    def _sum(self) -> list[tuple[list[int], bool]]:
        a, sign, b, result = self._draw_sum()
        known = [*self._number(a), self._signs[sign], *self._number(b), self._signs["="]]
        return [(known, False), ([*self._number(result), self._dot], True)]

    def _decision(self) -> list[tuple[list[int], bool]]:
        present = int(self._rng.integers(5, LARGEST + 1))
        low, high = max(2, present - DECISION_REACH), min(LARGEST, present + DECISION_REACH)
        offer = int(self._rng.choice([n for n in range(low, high + 1) if n != present]))
        word = int(self._rng.choice(self._decisions[offer < present]))
        known = [*self._number(present), self._comma, *self._number(offer), self._dot]
        result = [*self._number(max(present, offer)), self._dot]
        return [(known, False), ([word], True), (self._is_better, False), (result, True)]

    def _draw_sum(self) -> tuple[int, str, int, int]:
        rng = self._rng
        kind = rng.choice(SUM_KINDS, p=SUM_WEIGHTS)
        if kind == "+":
            a = int(rng.integers(1, LARGEST - 1))
            b = int(rng.integers(2, LARGEST - a + 1))
            return a, "+", b, a + b
        if kind == "-":
            a = int(rng.integers(3, LARGEST + 1))
            b = int(rng.integers(2, a))
            return a, "-", b, a - b
        if kind == "*":
            a, b = (int(n) for n in rng.integers(2, 10, size=2))
            return a, "*", b, a * b
        b = int(rng.integers(2, 4))
        a = int(rng.integers(2, LARGEST // b + 1))
        return a, "*", b, a * b
