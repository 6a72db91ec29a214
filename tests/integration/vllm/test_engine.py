"""`VLLMEngine` on the CPU: the conformance suite, and what is vLLM's own. One engine serves the whole module."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from citer_ray.config import RouterConfig
from citer_ray.decoding import Request, Trace, decode_many
from citer_ray.engine import Engine, Finish, Sampling, TokenSequence
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import RouterScorer
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_launch import VLLMOptions
from citer_ray.errors import RetryableError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.policy import Threshold, Writer
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, load_router, save_router
from tests.conformance import FREE, EngineConformance, decode_in_turns, naive_generate, prompts
from tests.conftest import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.vllm

NUM_ROWS = VOCAB_SIZE + 32  # a padded vocabulary
HANDOFF_ID = VOCAB_SIZE + 1
OPTIONS = VLLMOptions(dtype="float32", kv_cache_gib=0.25, block_size=32, enforce_eager=True, max_num_seqs=32)


def pad_vocabulary(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with further rows of large random weights: unmasked, their ids would win most of the time."""
    padded = copy.deepcopy(model)
    padded.resize_token_embeddings(NUM_ROWS, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    head = padded.get_output_embeddings().weight
    with torch.no_grad():
        head[VOCAB_SIZE:] = 2 * torch.randn(NUM_ROWS - VOCAB_SIZE, head.shape[1], generator=generator)
    return padded


def make_router(folder: Path, hidden_size: int) -> Path:
    """A router with random weights whose scores spread over (0, 1)."""
    config = RouterConfig()
    generator = torch.Generator().manual_seed(5)
    router = Router(hidden_size, config, generator=generator)
    with torch.no_grad():
        router.output.weight.mul_(30)
    save_router(
        router.eval(),
        RouterMetadata(
            architecture=config,
            hidden_size=hidden_size,
            fingerprint=PairFingerprint(slm="slm", llm="llm", tokenizer="tokenizer"),
            round=1,
            handoff_token_id=HANDOFF_ID,
        ),
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def model(tiny_slm: LlamaForCausalLM) -> PreTrainedModel:
    return tiny_slm


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_router(tmp_path_factory.mktemp("router"), hidden_size=64)


@pytest.fixture(scope="module")
def engine(tiny_slm: LlamaForCausalLM, router: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("slm")
    pad_vocabulary(tiny_slm).save_pretrained(folder)
    engine = VLLMEngine(
        str(folder),
        shared_vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        router=router,
        slm_fingerprint="slm",
        options=OPTIONS,
    )
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def reference(tiny_slm: LlamaForCausalLM, router: Path) -> TransformersEngine:
    """The same weights and router in the exact engine."""
    scorer = RouterScorer(load_router(router, slm_fingerprint="slm")[0])
    return TransformersEngine(
        tiny_slm,
        shared_vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        max_model_len=255,
        scorers={"router": scorer},
    )


class TestConformance(EngineConformance):
    """The suite that every engine passes."""


llm_engine_processes: list[psutil.Process] = []


@pytest.fixture(scope="module")
def llm_engine(tiny_llm: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("llm")
    pad_vocabulary(tiny_llm).save_pretrained(folder)
    others = psutil.Process().children(recursive=True)
    engine = VLLMEngine(
        str(folder),
        shared_vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        handoff_token_id=HANDOFF_ID,
        options=OPTIONS,
    )
    started = [process for process in psutil.Process().children(recursive=True) if process not in others]
    llm_engine_processes.extend(process for process in started if "VLLM" in process.name())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def reference_llm(tiny_llm: LlamaForCausalLM) -> TransformersEngine:
    return TransformersEngine(tiny_llm, shared_vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID], max_model_len=255)


def assert_same(ours: Sequence[Trace], theirs: Sequence[Trace], thresholds: Sequence[float]) -> None:
    """Token for token and decision for decision, up to the first near-tie of a score and its threshold."""
    near_ties = 0
    for mine, other, threshold in zip(ours, theirs, thresholds, strict=True):
        same = min(len(mine.token_ids), len(other.token_ids))
        both = zip(mine.writers, mine.token_ids, other.writers, other.token_ids, strict=False)
        first = next((i for i, (w, t, v, u) in enumerate(both) if (w, t) != (v, u)), None)
        if first is not None:
            score = other.scores[first]
            assert score is not None and abs(score - threshold) < 1e-5, f"position {first} differs"
            near_ties, same = near_ties + 1, first
        else:
            assert (len(mine.token_ids), mine.finish) == (len(other.token_ids), other.finish)
        asked = [(a, b) for a, b in zip(mine.scores[:same], other.scores[:same], strict=True) if b is not None]
        assert all(a is not None for a, _ in asked)
        np.testing.assert_allclose([a for a, _ in asked], [b for _, b in asked], atol=1e-4)
        np.testing.assert_allclose(mine.logprobs[:same], other.logprobs[:same], atol=5e-4)
    assert near_ties <= 1


async def test_routed_decoding_equals_the_reference(
    engine: VLLMEngine, llm_engine: VLLMEngine, reference: TransformersEngine, reference_llm: TransformersEngine
) -> None:
    thresholds = [(0.0, 0.3, 0.5, 0.7, 1.5)[index % 5] for index in range(200)]
    requests = [
        Request(prompt, Threshold("router", threshold), 24)
        for prompt, threshold in zip(prompts(200, 11), thresholds, strict=True)
    ]
    ours = await decode_many(engine, llm_engine, requests, in_flight=32)
    theirs = await decode_many(reference, reference_llm, requests, in_flight=32)
    assert_same(ours, theirs, thresholds)
    shares = [trace.llm_share for trace in ours]
    assert min(shares) == 0 and max(shares) == 1 and 0.1 < float(np.mean(shares)) < 0.9
    for request, trace in zip(requests, ours, strict=True):
        # Nothing is computed twice: the visits' new ids add up to all that the LLM had to see.
        llm_passes = [one for one in trace.passes if one.writer is Writer.LLM]
        seen = 0
        for one in llm_passes:
            seen += one.new_tokens
            assert one.cached_tokens == seen - one.new_tokens
        assert seen <= len(request.prompt_ids) + len(trace.token_ids)


async def test_threshold_extremes_are_the_models_own_generation(
    engine: VLLMEngine, llm_engine: VLLMEngine, model: PreTrainedModel, tiny_llm: LlamaForCausalLM
) -> None:
    for threshold, alone in ((0.0, model), (1.5, tiny_llm)):
        for prompt in prompts(6, 21):
            request = Request(prompt, Threshold("router", threshold), 20)
            (trace,) = await decode_many(engine, llm_engine, [request], in_flight=1)
            assert trace.token_ids == naive_generate(alone, prompt, 20, stop_at_eos=True)


async def test_seeded_routing_is_the_same_alone_in_a_crowd_and_in_the_reference(
    engine: VLLMEngine, llm_engine: VLLMEngine, reference: TransformersEngine, reference_llm: TransformersEngine
) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=17)
    requests = [Request(prompt, Threshold("router", 0.5), 16, sampling) for prompt in prompts(33, 31)]
    crowd = await decode_many(engine, llm_engine, requests, in_flight=33)
    alone = await decode_many(engine, llm_engine, requests[:3], in_flight=1)
    assert [trace.token_ids for trace in alone] == [trace.token_ids for trace in crowd[:3]]
    theirs = await decode_many(reference, reference_llm, requests, in_flight=33)
    assert_same(crowd, theirs, [0.5] * len(requests))


async def test_sampling_never_leaves_the_shared_vocabulary(engine: VLLMEngine, llm_engine: VLLMEngine) -> None:
    wild = Sampling(temperature=20.0, seed=2, ignore_eos=True)
    for one in (engine, llm_engine):
        written = await asyncio.gather(*(decode_in_turns(one, prompt, [40], wild) for prompt in prompts(8)))
        assert all(token < VOCAB_SIZE for tokens in written for token in tokens)


async def scored_turn(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    session = await engine.open(prompt, FREE, scorer="router", threshold=0.0)
    turn = await session.turn([], count)
    await session.close()
    assert len(turn.scores) == len(turn.token_ids) == count
    return turn.token_ids, turn.scores


async def test_prefix_caching_changes_neither_scores_nor_their_number(engine: VLLMEngine) -> None:
    prompt = np.random.default_rng(3).integers(3, VOCAB_SIZE, 100).tolist()
    cold = await scored_turn(engine, prompt, 12)
    warm = await scored_turn(engine, prompt, 12)
    shared = await scored_turn(engine, prompt + cold[0][:4], 8)
    assert warm[0] == cold[0] and shared[0] == cold[0][4:]
    np.testing.assert_allclose(warm[1], cold[1], atol=2e-6)
    np.testing.assert_allclose(shared[1], cold[1][4:], atol=2e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200])
async def test_turns_cross_block_boundaries(engine: VLLMEngine, model: PreTrainedModel, length: int) -> None:
    ids: list[int] = np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist()
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
    """The KV cache's usage, after a pass that has to report it."""
    await decode_in_turns(engine, [5, 6, 7], [2], FREE)
    await decode_in_turns(engine, [5, 6, 7], [2], FREE)
    return engine.kv_cache_usage


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


async def test_a_dead_engine_is_a_retryable_error(llm_engine: VLLMEngine) -> None:
    """Kills the LLM's processes."""
    session = await llm_engine.open([5, 6], FREE)
    await session.turn([], 1)
    waiting = asyncio.create_task((await llm_engine.open([7, 8], FREE)).turn([], 200))
    for process in llm_engine_processes:
        process.kill()
    with pytest.raises(RetryableError, match="died"):
        await waiting
    with pytest.raises(RetryableError, match="died"):
        await session.turn([7], 1)
    await session.close()
    with pytest.raises(RetryableError, match="died"):
        await llm_engine.open([5], FREE)


async def test_a_closed_engine_says_so(engine: VLLMEngine) -> None:
    """Last, because it closes the SLM."""
    session = await engine.open([5, 6], FREE)
    await session.turn([], 1)
    await engine.close()
    with pytest.raises(RetryableError, match="closed"):
        await session.turn([7], 1)
    await session.close()
    with pytest.raises(RetryableError, match="closed"):
        await engine.open([5], FREE)
    await engine.close()
