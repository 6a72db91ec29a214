"""Paced engines for replicas (`engine.factory: benchmarks.paced_pair:build`): the whole server without any arithmetic.

A request's threshold is its LLM share: scores are seeded and uniform. Read by `serving_pairs` and `vllm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paced import PacedEngine, PacedSession
from citer_ray.engine import Sampling
from citer_ray.engines.build import EngineSpec, Role

SECONDS = {"slm": 0.006, "llm": 0.06}  # a small and a large model's pass on a GPU


class ServedPacedEngine(PacedEngine):
    """Takes any router's name for a random one."""

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> PacedSession:
        named = None if scorer is None else "random:1"
        return await super().open(prompt_ids, sampling, scorer=named, threshold=threshold)


def build(role: Role, spec: EngineSpec) -> PacedEngine:
    """The engine of a role."""
    return ServedPacedEngine(SECONDS[role])
