"""The work of a label collection as numbers: what each chunk has to score and to roll out.

Lengths and shares of cases are either assumed for a data set (`GSM8K`) or taken from chunks that were labelled here
(`scale_measured`). The simulation (`scale_simulation`) and the times of passes (`scale_times`) read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of tokens: its mean, the standard deviation of the logarithm, and its bounds."""

    mean: float
    spread: float
    low: int
    high: int

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        """Whole numbers, [count]."""
        values = generator.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(values), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """A data set and a labelling.

    Attributes:
        examples: how many.
        prompt: tokens of a prompt, chat template included.
        reference: tokens of a reference, EOS included.
        response: tokens of the SLM's own response; a rollout from position i writes what is left of one.
        slm_wrong: part of the positions where the SLM's greedy token is not the reference's.
        both_wrong: part of the positions where the LLM's is not either.
        branches: rollouts of a state: 1, or 2 where the LLM-first branch is rolled out, too.
        mismatches: roll out every state where the SLM is wrong, not only where both are.
        max_new_tokens: limit of a rollout.
        endless: part of the rollouts that run into the limit.
    """

    examples: int
    prompt: Lengths
    reference: Lengths
    response: Lengths
    slm_wrong: float
    both_wrong: float
    branches: int = 1
    mismatches: bool = False
    max_new_tokens: int = 400
    endless: float = 0.02


# Assumed, not measured: see docs/scale.md, which also says what follows when they are wrong.
GSM8K = Workload(
    examples=7473,
    prompt=Lengths(mean=95, spread=0.3, low=40, high=320),
    reference=Lengths(mean=110, spread=0.45, low=20, high=400),
    response=Lengths(mean=150, spread=0.4, low=30, high=400),
    slm_wrong=0.25,
    both_wrong=0.15,
)


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What one chunk has to compute.

    Attributes:
        prompts: tokens of each example's prompt, [N].
        references: tokens of each reference, [N].
        asked: whether the LLM scores the example, [N].
        rows: the example of each rollout, [R].
        contexts: tokens of prompt and response before each rollout's first own pass, [R].
        tokens: what each rollout writes, [R].
    """

    prompts: Ints
    references: Ints
    asked: npt.NDArray[np.bool_]
    rows: Ints
    contexts: Ints
    tokens: Ints

    @property
    def sequences(self) -> Ints:
        """Tokens of prompt and reference, [N]."""
        return self.prompts + self.references

    @property
    def shared_contexts(self) -> Ints:
        """The longest context of each example that has rollouts: it is computed once, the others copy from it."""
        longest = np.zeros(len(self.prompts), np.int64)
        np.maximum.at(longest, self.rows, self.contexts)
        return longest[longest > 0]


def draw_chunks(workload: Workload, examples_per_chunk: int, seed: int = 0) -> Iterator[ChunkWork]:
    """All chunks of a data set; the examples are the same whatever the size of a chunk."""
    for start in range(0, workload.examples, examples_per_chunk):
        end = min(start + examples_per_chunk, workload.examples)
        yield _chunk([_example(workload, seed, index) for index in range(start, end)])


@dataclass(frozen=True, slots=True)
class _ExampleWork:
    prompt: int
    reference: int
    asked: bool
    contexts: Ints
    tokens: Ints


def _example(workload: Workload, seed: int, index: int) -> _ExampleWork:
    generator = np.random.default_rng([seed, index])
    prompt = int(workload.prompt.draw(generator, 1)[0])
    reference = int(workload.reference.draw(generator, 1)[0])
    draws = generator.random(reference)
    states = np.flatnonzero(draws < (workload.slm_wrong if workload.mismatches else workload.both_wrong))
    positions = np.repeat(states, workload.branches)
    left = workload.response.draw(generator, len(positions)) - positions
    # Who is wrong late in a response still writes a few tokens, and the answer.
    tokens = np.clip(left, 8, workload.max_new_tokens)
    tokens[generator.random(len(positions)) < workload.endless] = workload.max_new_tokens
    return _ExampleWork(
        prompt, reference, bool(np.any(draws < workload.slm_wrong)), prompt + positions + 1, tokens.astype(np.int64)
    )


def _chunk(examples: list[_ExampleWork]) -> ChunkWork:
    return ChunkWork(
        prompts=np.array([one.prompt for one in examples], np.int64),
        references=np.array([one.reference for one in examples], np.int64),
        asked=np.array([one.asked for one in examples], np.bool_),
        rows=np.repeat(np.arange(len(examples)), [len(one.tokens) for one in examples]).astype(np.int64),
        contexts=np.concatenate([one.contexts for one in examples]).astype(np.int64),
        tokens=np.concatenate([one.tokens for one in examples]).astype(np.int64),
    )
