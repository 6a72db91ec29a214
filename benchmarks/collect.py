"""Collecting labels against token-by-token loops: scoring without rollouts, and rollouts of both-wrong states.

The library's way is `Labeller` with `TransformersEngine`, as the collection's workers run it: one pass per example and
model, then all rollouts of a chunk at once. The other way is `token_loop`. Same models, same threads, in turn. The
slow way runs on a part of the work and is compared by tokens per second. Read by `__main__`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import Comparison, Options, run_in_turn
from benchmarks.pairs import SEED, BenchmarkPair, embedded_pair, random_pair
from benchmarks.token_loop import LoopScores, roll_out_alone, score_token_by_token
from citer_ray.decoding import Request, Trace, decode_many
from citer_ray.engine import TokenSequence
from citer_ray.label_rows import LabelRow
from citer_ray.labels import Case
from citer_ray.policy import AlwaysSlm


@dataclass(frozen=True, slots=True)
class Plan:
    """How much work one pair gets.

    Attributes:
        examples: scored, and their both-wrong states rolled out, by us in one run.
        loop_examples: scored by the loop in one run.
        loop_rollouts: states that are rolled out one at a time in one run.
        score_target: ratio for scoring.
        rollout_target: ratio for rollouts.
    """

    examples: int
    loop_examples: int
    loop_rollouts: int
    score_target: float | None
    rollout_target: float | None


EMBEDDED = Plan(40, 8, 24, score_target=25, rollout_target=10)
RANDOM = Plan(8, 1, 4, score_target=8, rollout_target=4)
SHORT = Plan(3, 1, 2, score_target=None, rollout_target=None)


def run(options: Options) -> Iterator[Comparison]:
    """Measure the pairs that are asked for; each comparison comes as soon as it is done."""
    for name in options.pairs:
        plan = SHORT if options.short else {"embedded": EMBEDDED, "random": RANDOM}[name]
        pair = _pair(name, plan.examples, options.short)
        if options.wants("scoring"):
            yield measure_scoring(pair, plan, options.repeats)
        if options.wants("rollouts"):
            yield measure_rollouts(pair, plan, options.repeats)


def _pair(name: str, examples: int, short: bool) -> BenchmarkPair:
    if name == "embedded":
        return embedded_pair(examples)
    if short:
        return random_pair(examples, layers=(1, 2), hidden_size=64, feed_forward=128, vocab_size=512, max_new_tokens=8)
    return random_pair(examples)


def measure_scoring(pair: BenchmarkPair, plan: Plan, repeats: int) -> Comparison:
    """Greedy tokens of both models, hidden states and cases; counted in reference tokens."""
    rows = _scored_rows(pair)  # also warms up what the clock should not see
    looped = _typical(rows, plan.loop_examples)
    loops: list[LoopScores] = []

    def ours() -> int:
        return sum(len(row.case) for row in _scored_rows(pair))

    def reference() -> int:
        loops[:] = [score_token_by_token(pair.slm, pair.llm, _sequence(row)) for row in looped]
        return sum(len(loop.slm_ids) for loop in loops)

    runs = run_in_turn(ours, reference, repeats)
    return Comparison(
        f"{pair.name}: scoring",
        plan.score_target,
        *runs,
        agreement=_agreement(looped, loops),
        settings={
            "examples": len(rows),
            "loop_examples": len(looped),
            "prompt_tokens": _mean_length(row.prompt_ids for row in rows),
            "reference_tokens": _mean_length(row.reference_ids for row in rows),
            "cases": _case_counts(rows),
        },
    )


def measure_rollouts(pair: BenchmarkPair, plan: Plan, repeats: int) -> Comparison:
    """Rollouts of both-wrong states, labels included; counted in tokens written."""
    rows = [_with_share(row, pair.both_wrong_share) for row in _scored_rows(pair)]
    examples = {example.id: example for example in pair.examples}
    states = [state for row in rows for state in _states(row, pair)]
    chosen = [states[index] for index in np.linspace(0, len(states) - 1, plan.loop_rollouts).astype(int)]
    limit, eos = pair.collect.max_new_tokens, sorted(pair.eos_token_ids)
    alone: list[list[int]] = []

    async def decide() -> list[LabelRow]:
        return await pair.labeller().decide(await pair.engine(pair.slm), None, rows, examples)

    async def decode_chosen() -> list[Trace]:
        requests = [Request(state, AlwaysSlm(), limit) for state in chosen]
        return await decode_many(await pair.engine(pair.slm), None, requests, in_flight=len(requests))

    def ours() -> int:
        return sum(row.rollout_tokens for row in asyncio.run(decide()))

    def reference() -> int:
        alone[:] = [roll_out_alone(pair.slm, state, limit, eos) for state in chosen]
        return sum(map(len, alone))

    # `decide` keeps no tokens, so the comparison decodes the chosen states once more; this also warms up.
    traces = asyncio.run(decode_chosen())
    runs = run_in_turn(ours, reference, repeats)
    return Comparison(
        f"{pair.name}: rollouts",
        plan.rollout_target,
        *runs,
        agreement=(sum(trace.token_ids == ids for trace, ids in zip(traces, alone, strict=True)), len(chosen)),
        settings={
            "rollouts": len(states),
            "loop_rollouts": len(chosen),
            "context_tokens": _mean_length(states),
            "rollout_tokens": _mean_length(alone),
        },
    )


def _scored_rows(pair: BenchmarkPair) -> list[LabelRow]:
    """Both scoring steps of a chunk, with fresh engines."""

    async def score() -> list[LabelRow]:
        labeller = pair.labeller()
        rows = await labeller.score_slm(await pair.engine(pair.slm, "score"), pair.examples, chunk=0)
        return await labeller.score_llm(await pair.engine(pair.llm, "score"), rows)

    return asyncio.run(score())


def _sequence(row: LabelRow) -> TokenSequence:
    return TokenSequence(row.prompt_ids, row.reference_ids)


def _mean_length(sequences: Iterable[Sequence[int]]) -> float:
    return round(float(np.mean([len(sequence) for sequence in sequences])), 1)


def _typical(rows: Sequence[LabelRow], count: int) -> list[LabelRow]:
    """The rows whose lengths are closest to the mean, so that a part stands for the whole."""
    lengths_N2 = np.array([(len(row.prompt_ids), len(row.reference_ids)) for row in rows], np.float64)
    distance_N = np.abs(lengths_N2 - lengths_N2.mean(0)).sum(1)
    return [rows[index] for index in np.argsort(distance_N, kind="stable")[:count]]


def _agreement(rows: Sequence[LabelRow], loops: Sequence[LoopScores]) -> tuple[int, int]:
    """Positions at which both ways say the same, of all that were compared."""
    same = total = 0
    for row, loop in zip(rows, loops, strict=True):
        close_T = np.isclose(row.hidden, loop.hidden, atol=2e-3).all(1)
        # Where the LLM was not asked, its token is None: the SLM was right.
        llm_T = [ours in (None, theirs) for ours, theirs in zip(row.llm_ids, loop.llm_ids, strict=True)]
        same += int(np.sum((np.asarray(row.slm_ids) == loop.slm_ids) & llm_T & close_T))
        total += len(row.case)
    return same, total


def _case_counts(rows: Sequence[LabelRow]) -> dict[str, int]:
    counts = np.bincount(np.concatenate([row.case for row in rows]), minlength=len(Case))
    return {case.name.lower(): int(counts[case]) for case in Case}


def _with_share(row: LabelRow, share: float | None) -> LabelRow:
    """The row with a drawn part of its both-wrong states kept as such, and the others settled."""
    if share is None:
        return row
    draws = np.random.default_rng([SEED, int(row.example_id)]).random(len(row.case))
    kept = (np.asarray(row.case) == Case.BOTH_WRONG) & (draws < share)
    return replace(row, case=np.where(kept, Case.BOTH_WRONG, Case.SLM_CORRECT).tolist())


def _states(row: LabelRow, pair: BenchmarkPair) -> list[list[int]]:
    """The contexts that the row's rollouts go on from: those whose first token does not end the response."""
    return [
        [*row.prompt_ids, *row.reference_ids[:position], row.slm_ids[position]]
        for position in np.flatnonzero(np.asarray(row.case) == Case.BOTH_WRONG)
        if row.slm_ids[position] not in pair.eos_token_ids
    ]
