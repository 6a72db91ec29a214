"""Collecting labels against token-by-token loops: scoring without rollouts, and rollouts of both-wrong states.

The library's way is `Labeller` with `TransformersEngine`, as the collection's workers run it: one pass per example and
model, then all rollouts of a chunk at once. The other way is `token_loop`. Same models, same threads, in turn. The
slow way runs on a part of the work and is compared by tokens per second. Read by `__main__`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import Comparison, compare
from benchmarks.pairs import SEED, BenchmarkPair, embedded_pair, random_pair
from benchmarks.token_loop import roll_out_alone, score_token_by_token
from citer_ray.decoding import Request, decode_many
from citer_ray.engine import TokenSequence
from citer_ray.label_rows import LabelRow
from citer_ray.labels import Case
from citer_ray.policy import AlwaysSlm


@dataclass(frozen=True, slots=True)
class Plan:
    """How much work one pair gets.

    Attributes:
        examples: labelled by us in one run.
        loop_examples: labelled by the loop in one run.
        rollout_examples: whose both-wrong states we roll out in one run.
        loop_rollouts: states that are rolled out one at a time in one run.
        score_target: ratio for scoring.
        rollout_target: ratio for rollouts.
    """

    examples: int
    loop_examples: int
    rollout_examples: int
    loop_rollouts: int
    score_target: float | None
    rollout_target: float | None


EMBEDDED = Plan(40, 8, 40, 24, score_target=25, rollout_target=10)
RANDOM = Plan(8, 1, 8, 4, score_target=8, rollout_target=4)
SHORT = Plan(3, 1, 3, 2, score_target=None, rollout_target=None)


def run(*, pairs: Sequence[str] = ("embedded", "random"), short: bool = False, repeats: int = 3) -> list[Comparison]:
    """Measure the named pairs.

    Args:
        pairs: `embedded`, `random`, or both.
        short: a minute's worth of work at most, with a small random pair, and no verdict.
        repeats: turns of each comparison.
    """
    results: list[Comparison] = []
    for name in pairs:
        plan = SHORT if short else {"embedded": EMBEDDED, "random": RANDOM}[name]
        pair = _pair(name, plan.examples, short)
        rows = _scored_rows(pair)
        results.append(measure_scoring(pair, plan, rows, repeats))
        results.append(measure_rollouts(pair, plan, rows, repeats))
    return results


def _pair(name: str, examples: int, short: bool) -> BenchmarkPair:
    if name == "embedded":
        return embedded_pair(examples)
    if short:
        return random_pair(examples, layers=(1, 2), hidden_size=64, feed_forward=128, vocab_size=512, max_new_tokens=8)
    return random_pair(examples)


def measure_scoring(pair: BenchmarkPair, plan: Plan, rows: Sequence[LabelRow], repeats: int) -> Comparison:
    """Greedy tokens of both models, hidden states and cases; counted in reference tokens."""
    looped = _typical(rows, plan.loop_examples)

    def ours() -> int:
        return sum(len(row.case) for row in _scored_rows(pair))

    def reference() -> int:
        return sum(len(score_token_by_token(pair.slm, pair.llm, _sequence(row)).slm_ids) for row in looped)

    same = total = 0
    for row in looped:
        loop = score_token_by_token(pair.slm, pair.llm, _sequence(row))
        # Where the LLM was not asked, its token is None: the SLM was right.
        pairs = zip(loop.slm_ids, row.slm_ids, loop.llm_ids, row.llm_ids, strict=True)
        same += sum(a == b and d in (c, None) for a, b, c, d in pairs)
        total += len(row.case)
        np.testing.assert_allclose(row.hidden, loop.hidden, atol=2e-3)
    return compare(
        f"{pair.name}: scoring",
        ours,
        reference,
        target=plan.score_target,
        repeats=repeats,
        agreement=(same, total),
        settings={
            "examples": len(rows),
            "loop_examples": len(looped),
            "prompt_tokens": float(np.mean([len(row.prompt_ids) for row in rows])),
            "reference_tokens": float(np.mean([len(row.reference_ids) for row in rows])),
            "cases": _case_counts(rows),
        },
    )


def measure_rollouts(pair: BenchmarkPair, plan: Plan, rows: Sequence[LabelRow], repeats: int) -> Comparison:
    """Rollouts of both-wrong states, labels included; counted in tokens written."""
    rows = [_with_share(row, pair.both_wrong_share) for row in rows[: plan.rollout_examples]]
    examples = {example.id: example for example in pair.examples}
    states = [state for row in rows for state in _states(row, pair)]
    chosen = [states[index] for index in np.linspace(0, len(states) - 1, plan.loop_rollouts).astype(int)]
    limit = pair.collect.max_new_tokens

    def ours() -> int:
        decided = asyncio.run(pair.labeller().decide(pair.engine(pair.slm), None, rows, examples))
        return sum(row.rollout_tokens for row in decided)

    def reference() -> int:
        return sum(len(roll_out_alone(pair.slm, state, limit, sorted(pair.eos_token_ids))) for state in chosen)

    ours()
    requests = [Request(state, AlwaysSlm(), limit) for state in chosen]
    traces = asyncio.run(decode_many(pair.engine(pair.slm), None, requests, in_flight=len(requests)))
    alone = [roll_out_alone(pair.slm, state, limit, sorted(pair.eos_token_ids)) for state in chosen]
    return compare(
        f"{pair.name}: rollouts",
        ours,
        reference,
        target=plan.rollout_target,
        repeats=repeats,
        agreement=(sum(a.token_ids == b for a, b in zip(traces, alone, strict=True)), len(chosen)),
        settings={
            "rollouts": len(states),
            "loop_rollouts": len(chosen),
            "context_tokens": float(np.mean([len(state) for state in states])),
            "rollout_tokens": float(np.mean([len(tokens) for tokens in alone])),
        },
    )


def _scored_rows(pair: BenchmarkPair) -> list[LabelRow]:
    """Both scoring steps of a chunk, with fresh engines."""

    async def score() -> list[LabelRow]:
        labeller = pair.labeller()
        rows = await labeller.score_slm(pair.engine(pair.slm), pair.examples, chunk=0)
        return await labeller.score_llm(pair.engine(pair.llm), rows)

    return asyncio.run(score())


def _sequence(row: LabelRow) -> TokenSequence:
    return TokenSequence(row.prompt_ids, row.reference_ids)


def _typical(rows: Sequence[LabelRow], count: int) -> list[LabelRow]:
    """The rows whose lengths are closest to the mean, so that a part stands for the whole."""
    lengths_N2 = np.array([(len(row.prompt_ids), len(row.reference_ids)) for row in rows], np.float64)
    distance_N = np.abs(lengths_N2 - lengths_N2.mean(0)).sum(1)
    return [rows[index] for index in np.argsort(distance_N, kind="stable")[:count]]


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
