"""Rules for drafted tokens, against numbers worked by hand, and drafting with real models."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from transformers import LlamaForCausalLM

from citer_ray.decoding import Request, decode, decode_many
from citer_ray.engine import Finish, Sampling
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Rule, Speculative, Writer
from citer_ray.speculation import lenience, verify
from tests.conformance import prompts
from tests.unit.test_hf import make_engine

S, L = Writer.SLM, Writer.LLM
Q = [0.5, 0.3, 0.2]  # the SLM's greedy token is 0
P = [0.3, 0.6, 0.1]  # the LLM's is 1
ENTROPY = -sum(p * math.log(p) for p in P)


def logs(*rows: list[float]) -> npt.NDArray[np.float32]:
    return np.log(np.array(rows, np.float32))


@pytest.mark.parametrize(
    ("rule", "score"),
    [
        ("chow", 0.5),
        ("diff", 0.5 - 0.6),
        ("opt", (0.5 - 0.6) / (0.2 + 0.1)),  # TV = max(0, .5 - .3) + max(0, .2 - .1)
        ("token_v3", 0.3 / 0.6),
        ("typical", max(0.3, (0.3 * math.exp(ENTROPY)) ** 2)),
    ],
)
def test_scores_by_hand_and_the_threshold_between(rule: Rule, score: float) -> None:
    for threshold, kept in ((score - 1e-4, 1), (score + 1e-4, 0)):
        verdict = verify(Speculative(rule, 3, threshold), [0], logs(Q), logs(P, P))
        assert verdict.scores == [pytest.approx(score, abs=1e-6)]
        assert (verdict.kept, verdict.next_token) == (kept, 1)
        assert verdict.next_logprob == pytest.approx(math.log(0.6), abs=1e-6)


@pytest.mark.parametrize("rule", ["exact", "typical", "chow", "diff", "opt", "token_v3"])
def test_equal_greedy_tokens_always_stand(rule: Rule) -> None:
    verdict = verify(Speculative(rule, 3), [1, 0], logs(P, Q), logs(P, P, Q))
    assert (verdict.kept, verdict.next_token) == (1, 1)
    assert verdict.scores[0] is None and len(verdict.scores) == 2


def test_lenience_is_the_rules_own_knob() -> None:
    """Chow keeps iff max q >= 1 - alpha, Diff iff max q >= max p - alpha, TokenV3 iff p >= (1 - alpha) max p."""
    assert lenience("chow", 0.7) == pytest.approx(0.3)
    assert lenience("token_v3", 0.7) == pytest.approx(0.3)
    assert lenience("diff", -0.2) == lenience("opt", -0.2) == 0.2
    assert lenience("typical", 0.09) == 0.09


def peaked(token: int, size: int = 40) -> list[float]:
    return [0.61 if index == token else 0.01 for index in range(size)]


def scripted_pair(wrong_at: set[int], eos_at: int = 99) -> tuple[ScriptedEngine, ScriptedEngine]:
    """After a prompt of 2 ids the LLM writes 10 + position; the SLM the same, but 30 at some positions."""

    def llm(ids: list[int]) -> int:
        return 2 if len(ids) - 2 == eos_at else 10 + len(ids) - 2

    def slm(ids: list[int]) -> int:
        return 30 if len(ids) - 2 in wrong_at else llm(ids)

    return (
        ScriptedEngine(slm, distribution_of=lambda ids: peaked(slm(list(ids)))),  # type: ignore[arg-type]
        ScriptedEngine(llm, distribution_of=lambda ids: peaked(llm(list(ids)))),  # type: ignore[arg-type]
    )


async def test_a_rejected_token_is_replaced_and_the_rest_of_the_draft_dropped() -> None:
    slm, llm = scripted_pair({1, 6})
    trace = await decode(slm, llm, Request([5, 6], Speculative("exact", 3), 9))
    assert trace.token_ids == list(range(10, 19))
    # drafts: 0 x | 2 3 4 (bonus 5) | x | 7 8 -
    assert trace.writers == [S, L, S, S, S, L, L, S, S]
    assert trace.visits == 4 and (trace.drafted, trace.accepted) == (3 + 3 + 3 + 2, 1 + 3 + 0 + 2)
    assert [score is None for score in trace.scores] == [True, False, True, True, True, True, False, True, True]
    # Each pass of the LLM reads what it has not seen, and the draft.
    assert [turn.new_ids for turn in llm.turns] == [[10, 30, 12], [11, 12, 13, 14], [15, 30, 17, 18], [16, 17, 18]]
    assert [turn.new_ids for turn in slm.turns] == [[], [11], [14, 15], [16]]
    assert slm.num_open == llm.num_open == 0


async def test_an_accepted_difference_stays() -> None:
    slm, llm = scripted_pair({1})
    trace = await decode(slm, llm, Request([5, 6], Speculative("chow", 2, 0.6), 3))
    assert trace.token_ids == [10, 30, 12] and trace.writers == [S, S, L]


@pytest.mark.parametrize("wrong_at", [set(), {3}, {2}])
@pytest.mark.parametrize("draft_length", [1, 2, 3, 8])
async def test_eos_ends_the_response_whoever_wrote_it(wrong_at: set[int], draft_length: int) -> None:
    slm, llm = scripted_pair(wrong_at, eos_at=3)
    trace = await decode(slm, llm, Request([5, 6], Speculative("exact", draft_length), 20))
    assert trace.token_ids == [10, 11, 12, 2] and trace.finish is Finish.EOS
    assert len(trace.writers) == len(trace.scores) == len(trace.logprobs) == 4


@pytest.mark.parametrize("draft_length", [1, 4])
async def test_exact_speculation_is_the_llm_and_full_lenience_the_slm(
    tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM, draft_length: int
) -> None:
    slm, llm = make_engine(tiny_slm), make_engine(tiny_llm)
    policies = [AlwaysLlm(), Speculative("exact", draft_length), AlwaysSlm(), Speculative("chow", draft_length, 0.0)]
    requests = [Request(prompt, policy, 24) for policy in policies for prompt in prompts(8)]
    traces = await decode_many(slm, llm, requests, in_flight=32)
    tokens = [trace.token_ids for trace in traces]
    assert tokens[8:16] == tokens[:8]
    for alone, lenient in zip(traces[16:24], traces[24:], strict=True):
        # The SLM's tokens but for the LLM's own after each draft.
        assert lenient.writers.count(L) <= -(-len(lenient.token_ids) // (draft_length + 1))
        assert lenient.token_ids[:draft_length] == alone.token_ids[:draft_length]
    for trace in traces[8:16]:
        assert 0 <= trace.accepted <= trace.drafted


async def test_sampling_is_refused() -> None:
    slm, llm = scripted_pair(set())
    request = Request([5, 6], Speculative("exact", 2), 4, Sampling(temperature=1.0))
    with pytest.raises(ValueError, match="greedy sampling"):
        await decode(slm, llm, request)


@pytest.mark.parametrize("values", [{"draft_length": 0}, {"threshold": math.nan}])
def test_impossible_policies_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="draft_length must be at least 1"):
        Speculative(**{"rule": "exact", "draft_length": 2, **values})  # type: ignore[arg-type]
