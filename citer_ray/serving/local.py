"""Engines of this process as a backend: what tests and benchmarks serve from, and the measure of what Serve adds."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from citer_ray.engine import Engine
from citer_ray.serving.jobs import Job, Report
from citer_ray.serving.responding import ResponseSettings, respond


class LocalBackend:
    """Decodes jobs on two engines. The SLM's engine has a scorer for each router in service (`jobs.scorer_name`)."""

    def __init__(self, slm: Engine, llm: Engine, settings: ResponseSettings | None = None) -> None:
        self._slm, self._llm, self._settings = slm, llm, settings or ResponseSettings()

    def respond(self, job: Job) -> AsyncGenerator[Report, None]:
        """See `choices.Backend`."""
        return respond(job, self._slm, self._llm, self._settings)

    async def ready(self) -> bool:
        """Engines are there from the beginning."""
        return True
