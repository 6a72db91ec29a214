"""The simulation of a collection against cases that are worked by hand, and what must hold for any work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import scale_prediction
from benchmarks.scale_prediction import SIZES, Pair, Site, token_by_token_hours
from benchmarks.scale_simulation import DRIVER, LOADING, STRAGGLERS, Pool, simulate
from benchmarks.scale_times import (
    GPUS,
    Batching,
    GpuPass,
    LinearPass,
    prefill_seconds,
    rollout_seconds,
    routed_rollout_seconds,
)
from benchmarks.scale_work import GSM8K, ChunkWork, draw_chunks

STEP = LinearPass(1.0)  # a second a pass, whatever it holds
WIDE = Batching(pass_tokens=10**9, in_flight=10**9)


def pool(name: str, workers: int, *seconds: float, load_s: float = 0.0) -> Pool:
    return Pool(name, workers, load_s, seconds)


def work(tokens: list[int], context: int = 10) -> ChunkWork:
    count = len(tokens)
    return ChunkWork(
        prompts=np.full(count, context - 1),
        references=np.full(count, 5),
        asked=np.ones(count, np.bool_),
        rows=np.arange(count),
        contexts=np.full(count, context),
        tokens=np.array(tokens),
    )


# -- the pipeline --------------------------------------------------------------------------------------------------


def test_one_worker_does_one_chunk_after_the_other() -> None:
    outcome = simulate([pool("a", 1, 1.0, 2.0, 3.0, load_s=10.0)])
    assert outcome.seconds == 16.0 and outcome.done_s == (11.0, 13.0, 16.0)
    assert outcome.parts == {"a": 6.0, DRIVER: 0.0, LOADING: 10.0, STRAGGLERS: 0.0}
    assert outcome.bottleneck == LOADING


def test_a_pipeline_takes_its_slowest_stage_and_the_way_there() -> None:
    outcome = simulate([pool("a", 1, *[1.0] * 5), pool("b", 1, *[4.0] * 5), pool("c", 1, *[0.5] * 5)])
    assert outcome.seconds == 1 + 5 * 4 + 0.5
    assert outcome.bottleneck == "b"


def test_workers_share_chunks_and_wait_at_the_end() -> None:
    outcome = simulate([pool("a", 3, 2.0, 2.0, 2.0, 2.0)])
    assert outcome.seconds == 4.0
    assert outcome.parts[STRAGGLERS] == pytest.approx((2.0 + 2.0) / 3)
    assert simulate([pool("a", 100, 5.0, 1.0)]).bottleneck == "stragglers at the end"


def test_a_slow_driver_limits_any_number_of_workers() -> None:
    outcome = simulate([pool("a", 50, *[0.1] * 40), pool("b", 50, *[0.1] * 40)], driver_s=1.0)
    assert outcome.bottleneck == DRIVER
    assert 80.0 <= outcome.seconds <= 80.3


def test_cores_are_shared_evenly() -> None:
    alone = simulate([pool("a", 2, 4.0, 4.0)], cores=2)
    shared = simulate([pool("a", 2, 4.0, 4.0)], cores=1)
    assert alone.seconds == pytest.approx(4.0)
    assert shared.seconds == pytest.approx(8.0)
    assert min(shared.done_s) > 7.8, "both go on at half the speed"


def test_work_is_conserved() -> None:
    generator = np.random.default_rng(1)
    seconds = [generator.gamma(2.0, 1.0, 60) for _ in range(3)]
    for workers in ((1, 1, 1), (2, 5, 3), (70, 70, 70)):
        pools = [pool(name, count, *row) for name, count, row in zip("abc", workers, seconds, strict=True)]
        outcome = simulate(pools)
        assert len(outcome.done_s) == 60
        assert outcome.busy_s == pytest.approx({name: row.sum() for name, row in zip("abc", seconds, strict=True)})
        bounds = [row.sum() / count for row, count in zip(seconds, workers, strict=True)]
        assert outcome.seconds >= max(*bounds, float(np.sum(seconds, 0).max())) - 1e-9


def test_impossible_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        simulate([pool("a", 0, 1.0)])
    with pytest.raises(ValueError, match="every chunk"):
        simulate([pool("a", 1, 1.0), pool("b", 1, 1.0, 2.0)])


# -- chunks --------------------------------------------------------------------------------------------------------


def test_rollouts_of_one_batch_take_the_longest() -> None:
    assert rollout_seconds(work([3, 9, 5]), STEP, WIDE) == 1 + 9  # one pass reads the contexts


def test_whoever_ends_makes_room() -> None:
    # Two at once: 3 and 9, then 5 in the place of the 3.
    assert rollout_seconds(work([3, 9, 5]), STEP, Batching(10**9, in_flight=2)) == 1 + 9
    assert rollout_seconds(work([3, 9, 5]), STEP, Batching(10**9, in_flight=1)) == 1 + 17


def test_a_pass_is_charged_for_the_cache_that_it_reads() -> None:
    per_cached = LinearPass(0.0, cached=1.0)
    # Contexts of 10: reads 10, 11, 12 and 10, 11; prefill has an empty cache.
    assert rollout_seconds(work([3, 2]), per_cached, WIDE) == (10 + 11 + 12) + (10 + 11)
    assert rollout_seconds(work([3, 2]), per_cached, Batching(10**9, 1)) == (10 + 11 + 12) + (10 + 11)


def test_prefill_fills_passes() -> None:
    assert prefill_seconds(np.array([600, 600]), STEP, Batching(pass_tokens=1000)) == 2
    assert prefill_seconds(np.array([], np.int64), STEP, WIDE) == 0


def test_routed_rollouts_without_the_llm_and_with_it_alone() -> None:
    slow = LinearPass(5.0)
    assert routed_rollout_seconds(work([3, 9]), STEP, slow, WIDE, llm_share=0.0) == 1 + 9
    # Every token: a pass of the SLM that hands off, and a visit.
    assert routed_rollout_seconds(work([4]), STEP, slow, WIDE, llm_share=1.0) == 1 + 4 * 6
    one = routed_rollout_seconds(work([400]), STEP, slow, WIDE, llm_share=0.2)
    assert one == pytest.approx(1 + 400 * (1 + 0.2 * 5), rel=0.1)
    many = routed_rollout_seconds(work([400] * 20), STEP, slow, WIDE, llm_share=0.2)
    assert one < many < 3 * one, "they share passes"


def test_chunks_hold_the_same_examples_whatever_their_size() -> None:
    workload = replace(GSM8K, examples=20)
    small, large = (list(draw_chunks(workload, size)) for size in (3, 20))
    assert [len(one.prompts) for one in small] == [3] * 6 + [2]
    assert np.array_equal(np.concatenate([one.tokens for one in small]), large[0].tokens)
    wrong = sum(len(one.tokens) for one in small) / sum(one.references.sum() for one in small)
    assert wrong == pytest.approx(workload.both_wrong, rel=0.2)
    more = next(draw_chunks(replace(workload, mismatches=True, branches=2), 20))
    assert len(more.tokens) > 2 * len(large[0].tokens)


def test_roofline_of_a_gpu() -> None:
    pair = Pair.qwen2(Site(GPUS["h100"]))
    one = GpuPass(pair.llm, GPUS["h100"], 4, overhead_s=0.0)
    # Few rows: weights over bandwidth. The embedding is not read.
    assert one(1, 1, 0) == pytest.approx(142.9e9 / (4 * 0.5 * 3350e9), rel=0.01)
    # A full pass: two operations a parameter and token.
    assert one(40, 8192, 0) == pytest.approx(2 * 71.5e9 * 8192 / (4 * 0.5 * 989e12), rel=0.03)


# -- predictions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.qwen2(Site(GPUS["h100"]), replace(GSM8K, examples=400))


def test_more_gpus_never_take_much_longer_and_never_pay_back_more(pair: Pair) -> None:
    # Storage gives more workers less each, so loading grows; that is the only reason to be slower.
    site = replace(pair.site, storage_bytes_per_s=1e15)
    found = [replace(pair, site=site).first_round(gpus, (8,)) for gpus in SIZES[:4]]
    for fewer, more in pairwise(found):
        assert more.outcome.seconds <= 1.02 * fewer.outcome.seconds
        assert more.gpu_hours >= fewer.gpu_hours / 1.02 or fewer.outcome.bottleneck != more.outcome.bottleneck
        assert sum(n * g for n, g in zip(more.pools, (1, 4, 1), strict=True)) <= more.gpus


def test_a_later_round_needs_both_models_and_more_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_prediction, "ROUTED_EXAMPLES", 32)
    first, later = pair.first_round(16, (32,)), pair.later_round(16, 0.3)
    assert later.pools == (3,)
    assert later.outcome.busy_s["rollouts"] > first.outcome.busy_s["rollouts"]
    with pytest.raises(ValueError, match="both models"):
        pair.later_round(4, 0.3)


def test_token_by_token_takes_far_longer(pair: Pair) -> None:
    ours = pair.first_round(8, (32,))
    assert token_by_token_hours(pair, 8, pass_overhead_s=0.003) > 10 * (ours.hours - ours.outcome.parts[LOADING] / 3600)
    assert token_by_token_hours(pair, 16) == pytest.approx(token_by_token_hours(pair, 8) / 2)
