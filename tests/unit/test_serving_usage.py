"""Usage derived from the writers equals what the loop's own trace says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from citer_ray.decoding import Request, decode
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.evaluation import single_passes
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Policy, Threshold, Writer
from citer_ray.serving.usage import Tally


def score_of(ids: Sequence[int]) -> float:
    return 0.1 if len(ids) % 3 == 0 or len(ids) % 7 == 1 else 0.9


@pytest.mark.parametrize(
    ("policy", "visits"),
    [
        (Threshold("router", 0.5), None),
        (Threshold("router", 0.5, llm_tokens_per_visit=3), None),
        (Threshold("router", 0.0), 0),
        (Threshold("router", 2.0), None),
        (AlwaysSlm(), 0),
        (AlwaysLlm(), 1),
    ],
)
async def test_passes_and_visits_are_those_of_the_trace(policy: Policy, visits: int | None) -> None:
    slm = ScriptedEngine(lambda ids: 10 + len(ids), score_of)
    llm = ScriptedEngine(lambda ids: 100 + len(ids))
    trace = await decode(slm, llm, Request([5, 6, 7, 8], policy, 25))
    tally = Tally(4)
    for writer, score in zip(trace.writers, trace.scores, strict=True):
        tally.add(writer, score)
    assert tally.passes() == (single_passes(trace.passes, Writer.SLM), single_passes(trace.passes, Writer.LLM))
    assert tally.visits == trace.visits
    assert (tally.slm_tokens, tally.llm_tokens) == (25 - trace.num_llm_tokens, trace.num_llm_tokens)
    if visits is not None:
        assert tally.visits == visits
