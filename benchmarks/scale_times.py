"""How long a chunk takes each pool of a collection, from the time of one forward pass.

`GpuPass` prices a pass by the roofline of a GPU's data sheet and the cost model; `LinearPass` by times that were
measured here. Scoring is a few large passes. Rollouts are continuous batching: all that are in flight write a token a
pass, and whoever ends makes room for the next. Read by `scale` and `scale_measured`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.scale_work import ChunkWork, Ints
from citer_ray.cost import ModelCost
from citer_ray.sizing import Gpu

# Data sheets: memory, bandwidth, dense bfloat16. Prices are assumptions, in dollars an hour.
GPUS = {
    "h100": Gpu(gigabytes=80, gigabytes_per_s=3350, teraflops=989, price=3.0, efficiency=0.5),
    "h200": Gpu(gigabytes=141, gigabytes_per_s=4800, teraflops=989, price=3.8, efficiency=0.5),
    "a100": Gpu(gigabytes=80, gigabytes_per_s=2039, teraflops=312, price=1.8, efficiency=0.5),
}


class PassTime(Protocol):
    """Seconds of one forward pass."""

    def __call__(self, rows: int, new_tokens: int, cached_tokens: float) -> float:
        """Args:
        rows: sequences in the pass.
        new_tokens: computed, of all rows together.
        cached_tokens: read from the KV cache, of all rows together.
        """
        ...


@dataclass(frozen=True)
class GpuPass:
    """Roofline: the longer of moving the bytes and computing, plus a fixed time a pass.

    Attributes:
        cost: the model.
        gpu: its data sheet.
        gpus: tensor parallel; nothing is charged for their talk beyond `overhead_s`.
        overhead_s: of scheduling, sampling and launching; assumed.
    """

    cost: ModelCost
    gpu: Gpu
    gpus: int = 1
    overhead_s: float = 0.003

    def __call__(self, rows: int, new_tokens: int, cached_tokens: float) -> float:
        """See `PassTime`; attention is that of rows of equal length."""
        shape = self.cost.shape
        num_bytes = self.cost.weight_bytes + self.cost.kv_bytes_per_token * (cached_tokens + new_tokens)
        context = (cached_tokens + new_tokens / 2) / rows
        attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * new_tokens * context
        flops = 2.0 * shape.active_params * new_tokens + attention
        speed = self.gpu.efficiency * self.gpus
        return self.overhead_s + max(
            num_bytes / (self.gpu.gigabytes_per_s * 1e9 * speed), flops / (self.gpu.teraflops * 1e12 * speed)
        )


@dataclass(frozen=True)
class LinearPass:
    """Measured: `a + b rows + c new tokens + d cached tokens`, in seconds."""

    fixed: float
    row: float = 0.0
    token: float = 0.0
    cached: float = 0.0

    def __call__(self, rows: int, new_tokens: int, cached_tokens: float) -> float:
        """See `PassTime`."""
        return self.fixed + self.row * rows + self.token * new_tokens + self.cached * cached_tokens


@dataclass(frozen=True, slots=True)
class Batching:
    """Limits of an engine: tokens of a pass (`engine.max_pass_tokens`), rollouts in flight (`engine.max_rows`)."""

    pass_tokens: int = 8192
    in_flight: int = 128


def prefill_seconds(lengths: Ints, pass_time: PassTime, batching: Batching) -> float:
    """Whole sequences, in passes that are as full as may be."""
    total = int(lengths.sum())
    if total == 0:
        return 0.0
    passes = max(1, math.ceil(total / batching.pass_tokens))
    rows = max(1, round(len(lengths) / passes))
    return passes * pass_time(rows, total // passes, 0.0)


def rollout_seconds(work: ChunkWork, pass_time: PassTime, batching: Batching) -> float:
    """All rollouts of a chunk by one model: first come, first served, `in_flight` at once, one token each a pass."""
    seconds = prefill_seconds(work.shared_contexts, pass_time, batching)
    # (the step after which it ends, its context at the start less the step of its start)
    running: list[tuple[int, int]] = []
    waiting = list(zip(work.tokens.tolist(), work.contexts.tolist(), strict=True))[::-1]
    step, offsets = 0, 0  # cached tokens of all running rows are offsets + rows * step
    while waiting or running:
        while waiting and len(running) < batching.in_flight:
            tokens, context = waiting.pop()
            heapq.heappush(running, (step + tokens, context - step))
            offsets += context - step
        steps = running[0][0] - step
        rows = len(running)
        middle = offsets + rows * (step + (steps - 1) / 2)
        seconds += steps * pass_time(rows, rows, middle)
        step += steps
        while running and running[0][0] == step:
            offsets -= heapq.heappop(running)[1]
    return seconds


def routed_rollout_seconds(
    work: ChunkWork, slm: PassTime, llm: PassTime, batching: Batching, llm_share: float, seed: int = 0
) -> float:
    """The same under a policy that gives `llm_share` of the tokens to the LLM, whose passes run beside the SLM's.

    A response is at the SLM until it hands off, which happens at each token with probability `llm_share`; the LLM's
    next pass takes all that wait, reads what each has not seen, and writes one token.
    """
    generator = np.random.default_rng(seed)
    count = len(work.tokens)
    left, contexts = work.tokens.copy(), work.contexts.copy()
    unseen = contexts.copy()  # by the LLM
    is_at_llm = np.zeros(count, np.bool_)
    in_llm_pass = np.zeros(count, np.bool_)
    admitted, now = min(count, batching.in_flight), prefill_seconds(work.shared_contexts, slm, batching)
    llm_end = math.inf
    slm_rows, slm_end = np.empty(0, np.int64), math.inf
    while np.any(left > 0):
        if slm_end == math.inf:
            slm_rows = np.flatnonzero((left[:admitted] > 0) & ~is_at_llm[:admitted])
            if len(slm_rows):
                slm_end = now + slm(len(slm_rows), len(slm_rows), float(contexts[slm_rows].sum()))
        if llm_end == math.inf:
            rows = np.flatnonzero(is_at_llm)
            if len(rows):
                in_llm_pass[rows] = True
                new = int(unseen[rows].sum())
                llm_end = now + llm(len(rows), new, float((contexts[rows] - unseen[rows]).sum()))
        now = min(slm_end, llm_end)
        if llm_end == now:
            rows, llm_end = np.flatnonzero(in_llm_pass), math.inf
            unseen[rows], is_at_llm[rows], in_llm_pass[rows] = 0, False, False
            left[rows] -= 1
            contexts[rows] += 1
        if slm_end == now:
            slm_end = math.inf
            hands_off = generator.random(len(slm_rows)) < llm_share
            is_at_llm[slm_rows[hands_off]] = True
            rows = slm_rows[~hands_off]
            left[rows] -= 1
            contexts[rows] += 1
            unseen[rows] += 1
        open_rows = int(np.count_nonzero(left[:admitted] > 0))
        admitted = min(count, admitted + batching.in_flight - open_rows)
    return now


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """What one chunk takes a worker of each pool, in seconds."""

    slm: float
    llm: float
    rollouts: float


def first_round_seconds(
    chunks: Sequence[ChunkWork], slm: PassTime, llm: PassTime, batching: Batching, rollout: PassTime | None = None
) -> list[ChunkSeconds]:
    """The first round: the SLM scores all, the LLM what it must, and the SLM alone rolls out.

    Args:
        chunks: the work.
        slm: the SLM's passes when it scores.
        llm: the LLM's.
        batching: of all engines.
        rollout: the SLM's passes when it decodes; the same as `slm` if not given.
    """
    return [
        ChunkSeconds(
            prefill_seconds(work.sequences, slm, batching),
            prefill_seconds(work.sequences[work.asked], llm, batching),
            rollout_seconds(work, rollout or slm, batching),
        )
        for work in chunks
    ]
