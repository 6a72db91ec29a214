"""The routed loop: who writes what, what each model is sent, and how responses end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from citer_ray.decoding import Request, Trace, answer_score, decode, decode_many
from citer_ray.engine import Finish
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.policy import (
    LLM_ONLY_THRESHOLD,
    AlwaysLlm,
    AlwaysSlm,
    Cascade,
    Oracle,
    Policy,
    Threshold,
    Writer,
    random_policy,
)
from tests.conformance import naive_generate, prompts
from tests.conftest import EOS_ID, VOCAB_SIZE
from tests.unit.test_hf import make_engine

S, L = Writer.SLM, Writer.LLM
PROMPT = [10, 11, 12]


def position_score(ids: Sequence[int]) -> float:
    """Low at every third position of the response, so that the LLM writes tokens 2, 5, 8, ..."""
    return 0.1 if (len(ids) - len(PROMPT)) % 3 == 2 else 0.9


def scripted_pair(slm_eos_at: int = 99, llm_eos_at: int = 99) -> tuple[ScriptedEngine, ScriptedEngine]:
    """The SLM writes 100 + position, the LLM 200 + position; EOS where told."""

    def rule(base: int, eos_at: int, ids: Sequence[int]) -> int:
        position = len(ids) - len(PROMPT)
        return 2 if position == eos_at else base + position

    slm = ScriptedEngine(lambda ids: rule(100, slm_eos_at, ids), position_score)
    return slm, ScriptedEngine(lambda ids: rule(200, llm_eos_at, ids))


async def run(policy: Policy, count: int = 7, **eos: int) -> tuple[Trace, ScriptedEngine, ScriptedEngine]:
    slm, llm = scripted_pair(**eos)
    trace = await decode(slm, llm, Request(PROMPT, policy, count))
    assert slm.num_open == llm.num_open == 0
    lengths = {len(trace.token_ids), len(trace.writers), len(trace.scores), len(trace.logprobs)}
    assert len(lengths) == 1
    return trace, slm, llm


async def test_threshold_routes_each_token_to_its_writer() -> None:
    trace, slm, llm = await run(Threshold("router", 0.5))
    assert trace.token_ids == [100, 101, 202, 103, 104, 205, 106]
    assert trace.writers == [S, S, L, S, S, L, S]
    assert trace.scores == [0.9, 0.9, 0.1, 0.9, 0.9, 0.1, 0.9]
    assert (trace.finish, trace.visits, trace.num_llm_tokens) == (Finish.LENGTH, 2, 2)
    assert trace.llm_share == pytest.approx(2 / 7)
    # The SLM is sent the LLM's tokens alone, the LLM what it has not seen: its own last token and the SLM's.
    assert [turn.new_ids for turn in slm.turns] == [[], [202], [205]]
    assert [turn.new_ids for turn in llm.turns] == [[], [202, 103, 104]]
    assert trace.prefilled(S) == len(PROMPT) + 2
    assert trace.prefilled(L) == len(PROMPT) + 2 + 3


async def test_passes_are_counted_for_the_cost_model() -> None:
    trace, _, _ = await run(Threshold("router", 0.5))
    assert [(p.writer, p.new_tokens, p.cached_tokens, p.steps) for p in trace.passes] == [
        (S, 3, 0, 3),
        (L, 5, 0, 1),
        (S, 1, 5, 3),
        (L, 3, 5, 1),
        (S, 1, 8, 1),
    ]


async def test_longer_visits() -> None:
    trace, _, _ = await run(Threshold("router", 0.5, llm_tokens_per_visit=2))
    assert trace.writers == [S, S, L, L, S, L, L]
    assert trace.scores[3] is None
    assert trace.visits == 2


@pytest.mark.parametrize(
    ("policy", "base", "visits"),
    [
        (AlwaysSlm(), 100, 0),
        (AlwaysLlm(), 200, 1),
        (Threshold("router", 0.0), 100, 0),
        (Threshold("router", LLM_ONLY_THRESHOLD), 200, 7),
    ],
)
async def test_extremes(policy: Policy, base: int, visits: int) -> None:
    trace, _, _ = await run(policy)
    assert trace.token_ids == [base + i for i in range(7)]
    assert trace.visits == visits


@pytest.mark.parametrize(("eos", "writer"), [({"slm_eos_at": 4}, S), ({"llm_eos_at": 5}, L)])
async def test_eos_ends_a_response_whoever_wrote_it(eos: dict[str, int], writer: Writer) -> None:
    trace, _, _ = await run(Threshold("router", 0.5), **eos)
    assert trace.finish is Finish.EOS
    assert trace.token_ids[-1] == 2 and trace.token_ids.count(2) == 1
    assert trace.writers[-1] is writer


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_limit_on_a_switch(count: int) -> None:
    trace, _, _ = await run(Threshold("router", 0.5, llm_tokens_per_visit=4), count)
    assert len(trace.token_ids) == count
    assert trace.finish is Finish.LENGTH


async def test_oracle_takes_the_llms_token_and_charges_it_where_they_differ() -> None:
    slm = ScriptedEngine(lambda ids: 100 + len(ids) % 4)
    llm = ScriptedEngine(lambda ids: 100 + len(ids) % 2)
    trace = await decode(slm, llm, Request(PROMPT, Oracle(), 6))
    assert trace.token_ids == [101, 100, 101, 100, 101, 100]
    assert trace.writers == [L, S, S, L, L, S]


async def test_a_policy_without_its_engine_is_refused_and_leaks_nothing() -> None:
    slm, _ = scripted_pair()
    with pytest.raises(ValueError, match="needs the LLM"):
        await decode(slm, None, Request(PROMPT, Threshold("router", 0.5), 7))
    assert slm.num_open == 0
    with pytest.raises(ValueError, match="max_new_tokens"):
        await decode(slm, None, Request(PROMPT, AlwaysSlm(), 0))


async def test_many_keeps_order_and_reports_each() -> None:
    slm, llm = scripted_pair()
    requests = [Request(PROMPT, Threshold("router", 0.5), count) for count in (5, 1, 7, 3)]
    seen: list[int] = []
    traces = await decode_many(slm, llm, requests, in_flight=2, on_done=lambda index, _: seen.append(index))
    assert [len(trace.token_ids) for trace in traces] == [5, 1, 7, 3]
    assert sorted(seen) == [0, 1, 2, 3]
    assert await decode_many(slm, llm, [], in_flight=2) == []


async def test_many_stops_at_the_first_error() -> None:
    slm, llm = scripted_pair()
    requests = [Request(PROMPT, AlwaysSlm(), 3), Request(PROMPT, AlwaysSlm(), 0)]
    with pytest.raises(ValueError, match="max_new_tokens"):
        await decode_many(slm, llm, requests, in_flight=2)
    assert slm.num_open == 0


class TestOnRealModels:
    """The loop over two transformers engines equals a naive routed loop without any cache."""

    async def test_routed_equals_naive(self, tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM) -> None:
        slm, llm = make_engine(tiny_slm), make_engine(tiny_llm)
        requests = [Request(p, Threshold("max_probability", t), 20) for p in prompts(8) for t in (0.2, 0.5)]
        traces = await decode_many(slm, llm, requests, in_flight=16)
        shares = [trace.llm_share for trace in traces]
        assert 0 < sum(shares) < len(shares)
        for request, trace in zip(requests, traces, strict=True):
            assert isinstance(request.policy, Threshold)
            expected = self._naive(tiny_slm, tiny_llm, request.prompt_ids, request.policy.threshold)
            assert list(zip(trace.token_ids, trace.writers, strict=True)) == expected

    @staticmethod
    def _naive(
        slm: LlamaForCausalLM, llm: LlamaForCausalLM, prompt: Sequence[int], threshold: float
    ) -> list[tuple[int, Writer]]:
        ids, written = list(prompt), []
        while len(written) < 20 and (not written or written[-1][0] != EOS_ID):
            with torch.inference_mode():
                probabilities = slm(torch.tensor([ids])).logits[0, -1].softmax(-1)
            if float(probabilities.max()) < threshold:
                token, writer = naive_generate(llm, ids, 1, stop_at_eos=True)[0], L
            else:
                token, writer = int(probabilities.argmax()), S
            ids.append(token)
            written.append((token, writer))
        return written

    async def test_random_share_is_met_and_repeats(
        self, tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM
    ) -> None:
        slm, llm = make_engine(tiny_slm), make_engine(tiny_llm)
        requests = [Request(prompt, random_policy(0.3, 4), 30) for prompt in prompts(30)]
        traces = await decode_many(slm, llm, requests, in_flight=30)
        total = sum(len(trace.token_ids) for trace in traces)
        share = sum(trace.num_llm_tokens for trace in traces) / total
        # Binomial: three standard errors.
        assert abs(share - 0.3) < 3 * (0.3 * 0.7 / total) ** 0.5
        again = await decode_many(slm, llm, requests[:5], in_flight=1)
        assert [trace.writers for trace in again] == [trace.writers for trace in traces[:5]]

    async def test_other_vocabulary_padding(self, tiny_slm: LlamaForCausalLM) -> None:
        engine = TransformersEngine(
            tiny_slm, shared_vocab_size=VOCAB_SIZE - 6, eos_token_ids=[EOS_ID], max_model_len=256
        )
        trace = await decode(engine, None, Request([5, 6], AlwaysSlm(), 50))
        assert max(trace.token_ids) < VOCAB_SIZE - 6


@pytest.mark.parametrize(
    ("policy", "score"),
    [
        (Cascade("sum", 0.1), 0.5 * 0.25 * 0.5),
        (Cascade("average", 0.1), (0.5 * 0.25 * 0.5) ** (1 / 3)),
        (Cascade("quantile", 0.1, 0.0), 0.25),
        (Cascade("quantile", 0.1, 1.0), 0.5),
    ],
)
def test_a_cascades_score_of_an_answer(policy: Cascade, score: float) -> None:
    assert answer_score(policy, np.log([0.5, 0.25, 0.5]).tolist()) == pytest.approx(score)


async def test_a_cascade_pays_for_the_dropped_answer() -> None:
    kept, _, llm = await run(Cascade("average", 1.0))  # the scripted log-probabilities are 0: score 1
    assert kept.token_ids == list(range(100, 107)) and kept.visits == 0 and llm.turns == []
    assert kept.answer_score == 1.0
    dropped, _, _ = await run(Cascade("average", 1.1))
    assert dropped.token_ids == list(range(200, 207)) and dropped.writers == [L] * 7
    assert dropped.visits == 1 and dropped.answer_score == 1.0
    assert [(one.writer, one.new_tokens, one.steps) for one in dropped.passes] == [(S, 3, 7), (L, 3, 7)]


async def test_a_query_router_decides_once(tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM) -> None:
    """The scorer's value at the prompt's end decides who writes everything."""
    slm, llm = make_engine(tiny_slm), make_engine(tiny_llm)
    asked = prompts(12, 5)
    first = [
        trace.scores[0]
        for trace in await decode_many(
            slm, None, [Request(prompt, Threshold("router", 0.0), 1) for prompt in asked], in_flight=12
        )
    ]
    middle = float(np.median([score for score in first if score is not None]))
    alone = {
        policy: await decode_many(slm, llm, [Request(prompt, policy, 12) for prompt in asked], in_flight=12)
        for policy in (AlwaysSlm(), AlwaysLlm())
    }
    routed = await decode_many(
        slm,
        llm,
        [Request(prompt, Threshold("prompt:router", middle, llm_tokens_per_visit=12), 12) for prompt in asked],
        in_flight=12,
    )
    for index, (trace, score) in enumerate(zip(routed, first, strict=True)):
        assert score is not None
        writer, policy = (L, AlwaysLlm()) if score < middle else (S, AlwaysSlm())
        assert set(trace.writers) == {writer}
        assert trace.token_ids == alone[policy][index].token_ids
