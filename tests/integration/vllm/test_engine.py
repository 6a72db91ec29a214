"""`VLLMEngine` on the embedded pair: the conformance suite, and the same tokens and decisions as the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedModel

from citer_ray.decoding import Request, decode_many
from citer_ray.engine import Engine, Finish, Sampling, TokenSequence
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.policy import LLM_ONLY_THRESHOLD, Policy, Threshold, Writer, random_policy
from tests.conformance import FREE, EngineConformance, decode_in_turns, naive_generate, prompts
from tests.integration.vllm.settings import OPTIONS
from tests.integration.vllm.traces import assert_same

pytestmark = pytest.mark.vllm

Record = Callable[[str, object], None]


class TestConformance(EngineConformance):
    """The suite that every engine passes."""

    @pytest.fixture
    def masked_ids(self, model: PreTrainedModel, shared: int, handoff_id: int) -> list[int]:
        return [handoff_id, *range(shared, model.config.vocab_size)]


@pytest.fixture
def models(slm_model: PreTrainedModel, llm_model: PreTrainedModel) -> dict[Writer, PreTrainedModel]:
    return {Writer.SLM: slm_model, Writer.LLM: llm_model}


async def test_routed_decoding_equals_the_reference_on_200_problems(
    engine: VLLMEngine,
    llm_engine: VLLMEngine,
    reference: TransformersEngine,
    reference_llm: TransformersEngine,
    models: dict[Writer, PreTrainedModel],
    problem_prompts: list[list[int]],
    record_property: Record,
) -> None:
    policies: list[Policy] = [
        Threshold("router", 0.1),
        Threshold("router", 0.5),
        Threshold("router", 0.9),
        Threshold("router", 0.5, llm_tokens_per_visit=3),
        random_policy(0.2, seed=7),
    ]
    requests = [Request(prompt, policies[index % 5], 40) for index, prompt in enumerate(problem_prompts)]
    assert len(requests) == 200
    ours = await decode_many(engine, llm_engine, requests, in_flight=32)
    theirs = await decode_many(reference, reference_llm, requests, in_flight=200)
    near_ties = assert_same(requests, ours, theirs, models)
    record_property("near_ties", near_ties)
    assert near_ties <= 2
    shares = [float(np.mean([trace.llm_share for trace in ours[index::5]])) for index in range(5)]
    assert 0 < shares[0] < shares[1] < shares[2] < 1 and 0.1 < shares[4] < 0.3


async def test_threshold_extremes_are_the_models_own_generation(
    engine: VLLMEngine,
    llm_engine: VLLMEngine,
    models: dict[Writer, PreTrainedModel],
    problem_prompts: list[list[int]],
) -> None:
    chosen = problem_prompts[:16]
    for threshold, writer in ((0.0, Writer.SLM), (LLM_ONLY_THRESHOLD, Writer.LLM)):
        requests = [Request(prompt, Threshold("router", threshold), 40) for prompt in chosen]
        traces = await decode_many(engine, llm_engine, requests, in_flight=32)
        for request, trace in zip(requests, traces, strict=True):
            assert set(trace.writers) == {writer}
            assert trace.token_ids == naive_generate(models[writer], request.prompt_ids, 40, stop_at_eos=True)


async def test_a_visit_computes_exactly_what_the_llm_has_not_seen(
    engine: VLLMEngine, llm_engine: VLLMEngine, problem_prompts: list[list[int]]
) -> None:
    watch = llm_engine.watch
    for prompt in problem_prompts[150:156]:
        await llm_engine.reset_prefix_cache()
        passes, prefilled = watch.num_passes, watch.num_prefilled
        request = Request(prompt, Threshold("router", 0.5), 40)
        (trace,) = await decode_many(engine, llm_engine, [request], in_flight=1)
        visits = [one for one in trace.passes if one.writer is Writer.LLM]
        assert len(visits) > 1
        unseen = 0
        for visit in visits:
            unseen += visit.new_tokens
            assert visit.cached_tokens + visit.new_tokens == unseen
        last = max(index for index, writer in enumerate(trace.writers) if writer is Writer.LLM)
        # All that stands before the last visit's token, each once: the prompt, the SLM's tokens, and its own.
        assert unseen == len(prompt) + last
        # vLLM's own count.
        assert watch.num_prefilled - prefilled == unseen
        assert watch.num_passes - passes == len(visits)


async def test_seeded_routing_is_the_same_alone_in_a_crowd_and_in_the_reference(
    engine: VLLMEngine,
    llm_engine: VLLMEngine,
    reference: TransformersEngine,
    reference_llm: TransformersEngine,
    models: dict[Writer, PreTrainedModel],
    problem_prompts: list[list[int]],
) -> None:
    requests = [
        Request(prompt, Threshold("router", 0.5), 16, Sampling(temperature=0.9, top_p=0.95, seed=index))
        for index, prompt in enumerate(problem_prompts[:33])
    ]
    crowd = await decode_many(engine, llm_engine, requests, in_flight=33)
    alone = await decode_many(engine, llm_engine, requests[:6], in_flight=1)
    assert [trace.token_ids for trace in alone] == [trace.token_ids for trace in crowd[:6]]
    theirs = await decode_many(reference, reference_llm, requests, in_flight=33)
    assert assert_same(requests, crowd, theirs, models) == 0


async def test_sampling_never_leaves_the_shared_vocabulary(
    engine: VLLMEngine, llm_engine: VLLMEngine, shared: int, handoff_id: int
) -> None:
    wild = Sampling(temperature=20.0, seed=2, ignore_eos=True)
    for one in (engine, llm_engine):
        written = await asyncio.gather(*(decode_in_turns(one, prompt, [40], wild) for prompt in prompts(8)))
        assert all(token < shared and token != handoff_id for tokens in written for token in tokens)


async def scored_turn(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    session = await engine.open(prompt, FREE, scorer="router", threshold=0.0)
    turn = await session.turn([], count)
    await session.close()
    assert len(turn.scores) == len(turn.token_ids) == count
    return turn.token_ids, turn.scores


async def test_prefix_caching_changes_neither_scores_nor_their_number(engine: VLLMEngine, shared: int) -> None:
    prompt = np.random.default_rng(3).integers(5, shared, 100).tolist()
    cold = await scored_turn(engine, prompt, 12)
    warm = await scored_turn(engine, prompt, 12)
    shared = await scored_turn(engine, prompt + cold[0][:4], 8)
    assert warm[0] == cold[0] and shared[0] == cold[0][4:]
    np.testing.assert_allclose(warm[1], cold[1], atol=2e-6)
    np.testing.assert_allclose(shared[1], cold[1][4:], atol=2e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200])
async def test_turns_cross_block_boundaries(
    engine: VLLMEngine, model: PreTrainedModel, shared: int, length: int
) -> None:
    ids: list[int] = np.random.default_rng(length).integers(5, shared, length).tolist()
    session = await engine.open(ids, FREE)
    for _ in range(2):
        turn = await session.turn(ids[session.num_tokens :], 2)
        assert turn.token_ids == naive_generate(model, ids, 2, stop_at_eos=False)
        ids += [*turn.token_ids, 50]
    await session.close()


async def test_thresholds_of_a_batch_do_not_mix(engine: VLLMEngine) -> None:
    async def first_handoff(threshold: float) -> tuple[list[int], Finish]:
        session = await engine.open(prompts(1, 5)[0], FREE, scorer="router", threshold=threshold)
        turn = await session.turn([], 16)
        await session.close()
        return turn.token_ids, turn.finish

    thresholds = [0.0, 1.5, 0.2, 0.4, 0.6, 0.8, 0.5, 0.3]
    together = await asyncio.gather(*(first_handoff(threshold) for threshold in thresholds))
    assert together == [await first_handoff(threshold) for threshold in thresholds]
    assert len({len(tokens) for tokens, _ in together}) > 2


async def test_idle_sessions_make_room_for_others(engine: VLLMEngine, model: PreTrainedModel) -> None:
    contexts = prompts(OPTIONS.max_num_seqs + 8, 41)
    sessions = [await engine.open(context, FREE) for context in contexts]
    for _ in range(2):
        for session, context in zip(sessions, contexts, strict=True):
            context += (await session.turn(context[session.num_tokens :], 1)).token_ids
    await asyncio.gather(*(session.close() for session in sessions))
    for before, after in zip(prompts(OPTIONS.max_num_seqs + 8, 41), contexts, strict=True):
        assert after == before + naive_generate(model, before, 2, stop_at_eos=False)


async def free_blocks(engine: VLLMEngine) -> float:
    """The KV cache's usage, after passes that have to report it: the least, since a pass may report its own block."""
    usages = []
    for _ in range(10):
        await decode_in_turns(engine, [5, 6, 7], [2], FREE)
        usages.append(engine.watch.usage)
    return min(usages)


async def test_500_sessions_opened_and_cancelled_leave_no_block_behind(engine: VLLMEngine) -> None:
    before = await free_blocks(engine)

    async def begin(prompt: list[int], index: int) -> None:
        session = await engine.open(prompt, FREE, scorer="router", threshold=0.1)
        turn = asyncio.create_task(session.turn([], 100))
        for _ in range(index % 7):
            await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        if index % 2:
            await session.close()

    many = prompts(500, 51)
    for start in range(0, 500, 50):
        batch = enumerate(many[start : start + 50])
        await asyncio.gather(*(begin(prompt, index) for index, prompt in batch))
    assert await free_blocks(engine) == before


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
async def test_bad_thresholds_are_refused(engine: VLLMEngine, threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        await engine.open([5], FREE, scorer="router", threshold=threshold)


async def test_the_llm_has_no_scorer(llm_engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match="without a router"):
        await llm_engine.open([5], FREE, scorer="router", threshold=0.5)


async def test_scores_of_both_ways_agree(engine: VLLMEngine, reference: TransformersEngine) -> None:
    batch = [TokenSequence(a, b) for a, b in zip(prompts(12, 61), prompts(12, 62), strict=True)]
    batch.append(TokenSequence([5, 6], []))
    by_logprobs = await engine.score(batch)
    by_states = await engine.score(batch, hidden=True)
    exact = await reference.score(batch, hidden=True)
    for one, two, right in zip(by_logprobs, by_states, exact, strict=True):
        assert one.greedy.tolist() == two.greedy.tolist() == right.greedy.tolist()
        np.testing.assert_allclose(one.reference_logprob, right.reference_logprob, atol=2e-4)
        np.testing.assert_allclose(two.reference_logprob, right.reference_logprob, atol=2e-4)
        assert one.hidden is None
        assert two.hidden is not None and right.hidden is not None
        assert two.hidden.shape == right.hidden.shape
        np.testing.assert_allclose(two.hidden, right.hidden, atol=2e-4)
