"""Predictions for GPUs: how long and how much a collection takes on 8 to 512 of them, and what decides it.

For each number of GPUs the pools' sizes and the size of a chunk are chosen by simulating the promising ones. Also the
time of the same labels token by token, which is how research code collects them. Read by `scale`; docs/scale.md has
the table and the assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from benchmarks.scale_simulation import Outcome, Pool, simulate
from benchmarks.scale_times import (
    Batching,
    ChunkSeconds,
    GpuPass,
    first_round_seconds,
    routed_rollout_seconds,
)
from benchmarks.scale_work import GSM8K, ChunkWork, Workload, draw_chunks
from citer_ray.cost import ModelCost
from citer_ray.sizing import Gpu

SIZES = (8, 16, 32, 64, 128, 256, 512)
CHUNK_SIZES = (32, 16, 8, 4)  # `collect.examples_per_chunk`
ROUTED_EXAMPLES = 512  # whose routed rollouts are simulated token by token
SLM, LLM, ROLLOUTS = "SLM scoring", "LLM scoring", "rollouts"

# Published shapes.
QWEN2_1_5B: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN2_72B: Mapping[str, Any] = {
    **QWEN2_1_5B,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Site:
    """What a pair runs on; times are assumptions unless measured.

    Attributes:
        gpu: its data sheet.
        llm_gpus: of one LLM (tensor parallel).
        engine_start_s: until an engine with loaded weights takes work: compilation, graphs, profiling.
        worker_bytes_per_s: that one worker reads from storage.
        storage_bytes_per_s: that storage gives to all workers together.
        driver_s: of the driver, for a chunk and pool.
        batching: of all engines.
    """

    gpu: Gpu
    llm_gpus: int = 4
    engine_start_s: float = 60.0
    worker_bytes_per_s: float = 2e9
    storage_bytes_per_s: float = 20e9
    driver_s: float = 0.02
    batching: Batching = field(default_factory=Batching)


@dataclass(frozen=True)
class Prediction:
    """One line of the table.

    Attributes:
        gpus: that are there; a few may stay free.
        pools: workers of each pool.
        chunk: examples a chunk.
        outcome: of the simulation.
        price: of a GPU's hour.
    """

    gpus: int
    pools: tuple[int, ...]
    chunk: int
    outcome: Outcome
    price: float

    @property
    def hours(self) -> float:
        return self.outcome.seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """All GPUs are paid for until the end."""
        return self.hours * self.gpus

    @property
    def dollars(self) -> float:
        return self.gpu_hours * self.price


@dataclass(frozen=True)
class Pair:
    """Two models on a site, with a workload."""

    slm: ModelCost
    llm: ModelCost
    site: Site
    workload: Workload = GSM8K
    seed: int = 0

    @classmethod
    def qwen2(cls, site: Site, workload: Workload = GSM8K) -> Pair:
        """Qwen2-1.5B and Qwen2-72B."""
        return cls(ModelCost.from_config(QWEN2_1_5B), ModelCost.from_config(QWEN2_72B), site, workload)

    @cached_property
    def slm_pass(self) -> GpuPass:
        """A pass of the SLM on its GPU."""
        return GpuPass(self.slm, self.site.gpu)

    @cached_property
    def llm_pass(self) -> GpuPass:
        """A pass of the LLM on its GPUs."""
        return GpuPass(self.llm, self.site.gpu, self.site.llm_gpus)

    @cached_property
    def _first_round(self) -> dict[int, list[ChunkSeconds]]:
        return {size: self._seconds(self.chunks(size)) for size in CHUNK_SIZES}

    def chunks(self, size: int) -> list[ChunkWork]:
        """The work of all chunks."""
        return list(draw_chunks(self.workload, size, self.seed))

    def _seconds(self, chunks: Sequence[ChunkWork]) -> list[ChunkSeconds]:
        return first_round_seconds(chunks, self.slm_pass, self.llm_pass, self.site.batching)

    def first_round(self, gpus: int, sizes: Sequence[int] = CHUNK_SIZES) -> Prediction:
        """The first round with the quickest split of the GPUs: one an SLM worker, `llm_gpus` an LLM, one a rollout
        worker, since the SLM alone rolls out."""
        found = [
            Prediction(gpus, split, size, self._run(split, self._first_round[size]), self.site.gpu.price)
            for size in sizes
            for split in self._splits(gpus, self._first_round[size])
        ]
        return min(found, key=lambda one: one.outcome.seconds)

    def _run(self, split: tuple[int, int, int], seconds: Sequence[ChunkSeconds]) -> Outcome:
        slm, llm, rollouts = split
        weights = (self.slm.weight_bytes, self.llm.weight_bytes, self.slm.weight_bytes)
        everything = sum(count * size for count, size in zip(split, weights, strict=True))
        loads = [self._load_seconds(size, everything) for size in weights]
        pools = (
            Pool(SLM, slm, loads[0], [one.slm for one in seconds]),
            Pool(LLM, llm, loads[1], [one.llm for one in seconds]),
            Pool(ROLLOUTS, rollouts, loads[2], [one.rollouts for one in seconds]),
        )
        return simulate(pools, driver_s=self.site.driver_s)

    def _load_seconds(self, num_bytes: float, everything: float) -> float:
        """All workers load at the same time; storage serves them evenly."""
        slowest = everything / self.site.storage_bytes_per_s
        return self.site.engine_start_s + max(num_bytes / self.site.worker_bytes_per_s, min(slowest, 3600.0))

    def _splits(self, gpus: int, seconds: Sequence[ChunkSeconds], tried: int = 6) -> Iterator[tuple[int, int, int]]:
        """The splits that would be quickest if work were spread evenly."""
        slm, llm, rollouts = (math.fsum(getattr(one, name) for one in seconds) for name in ("slm", "llm", "rollouts"))
        splits = []
        for num_llm in range(1, (gpus - 2) // self.site.llm_gpus + 1):
            free = gpus - num_llm * self.site.llm_gpus
            for num_slm in range(1, min(free - 1, max(1, len(seconds))) + 1):
                num_rollouts = min(free - num_slm, len(seconds))
                longest = max(slm / num_slm, llm / num_llm, rollouts / num_rollouts)
                splits.append((longest, (num_slm, num_llm, num_rollouts)))
        return (split for _, split in sorted(splits)[:tried])

    def later_round(self, gpus: int, llm_share: float, size: int = 32) -> Prediction:
        """A later round: rollouts alone, routed, by workers that hold both models; `size` is the first round's."""
        each = 1 + self.site.llm_gpus
        chunks = self.chunks(size)
        workers = min(gpus // each, len(chunks))
        if workers < 1:
            raise ValueError(f"{gpus} GPUs do not hold both models, which take {each}")
        weights = self.slm.weight_bytes + self.llm.weight_bytes
        load_s = self._load_seconds(weights, workers * weights)
        seconds = self._routed(size, llm_share, chunks)
        outcome = simulate((Pool(ROLLOUTS, workers, load_s, seconds),), driver_s=self.site.driver_s)
        return Prediction(gpus, (workers,), size, outcome, self.site.gpu.price)

    def _routed(self, size: int, llm_share: float, chunks: Sequence[ChunkWork]) -> list[float]:
        """Seconds of each chunk; simulated for some of them, whose times stand for the others in turn."""
        key = (size, llm_share)
        if key not in self._routed_cache:
            self._routed_cache[key] = [
                routed_rollout_seconds(work, self.slm_pass, self.llm_pass, self.site.batching, llm_share, seed)
                for seed, work in enumerate(chunks[: max(1, ROUTED_EXAMPLES // size)])
            ]
        known = self._routed_cache[key]
        return [known[index % len(known)] for index in range(len(chunks))]

    @cached_property
    def _routed_cache(self) -> dict[tuple[int, float], list[float]]:
        return {}


def token_by_token_hours(
    pair: Pair, gpus: int, *, pass_overhead_s: float = 0.02, llm_only_where_wrong: bool = True
) -> float:
    """The first round as research code does it: a cached pass a token, one rollout after the other.

    Every `llm_gpus` GPUs hold one copy of both models and work on their own examples.

    Args:
        pair: the models, the site and the workload.
        gpus: how many.
        pass_overhead_s: of a pass of plain `transformers`, whose kernels are launched one by one.
        llm_only_where_wrong: the LLM is asked at positions where the SLM is wrong; otherwise at all.
    """
    copies = max(1, gpus // pair.site.llm_gpus)
    slm = replace(pair.slm_pass, overhead_s=pass_overhead_s)
    llm = replace(pair.llm_pass, overhead_s=pass_overhead_s * pair.llm.shape.num_layers / pair.slm.shape.num_layers)
    part = pair.workload.slm_wrong if llm_only_where_wrong else 1.0
    seconds = 0.0
    for work in pair.chunks(32):
        for prompt, reference in zip(work.prompts.tolist(), work.references.tolist(), strict=True):
            middle = prompt + reference / 2
            seconds += reference * (slm(1, 1, middle) + part * llm(1, 1, middle))
        for context, tokens in zip(work.contexts.tolist(), work.tokens.tolist(), strict=True):
            seconds += slm(1, context, 0.0) + (tokens - 1) * slm(1, 1, context + tokens / 2)
    return seconds / copies / 3600
