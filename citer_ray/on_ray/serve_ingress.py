"""The deployment `RoutingIngress`: HTTP in front, streams of reports from the models' replicas behind.

It holds the ids of every response. A replica that dies, hangs or restarts loses nothing: the job goes to the next one
with the tokens so far, and the stream to the client continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from citer_ray.config_serve import ServeConfig
from citer_ray.engines.build import EngineSpec
from citer_ray.errors import CiterError
from citer_ray.on_ray.evaluation_worker import pair_cost
from citer_ray.on_ray.serve_calls import is_retryable, overload, reports
from citer_ray.on_ray.serve_environment import join_logs
from citer_ray.on_ray.serve_metrics import IngressMetrics
from citer_ray.on_ray.serve_routers import RouterSource
from citer_ray.on_ray.serve_routing import session_id
from citer_ray.pair.models import load_tokenizer
from citer_ray.serving.api_errors import ApiError, overloaded
from citer_ray.serving.app import Service, build_app
from citer_ray.serving.jobs import Job, Report
from citer_ray.serving.planning import ServedPair
from citer_ray.serving.prompting import PromptEncoder
from citer_ray.serving.responding import LlmUnavailableError

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 2.0


class HandleBackend:
    """Replicas behind handles as a backend of the application."""

    def __init__(self, slm: DeploymentHandle[Any], llm: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._slm, self._llm, self._config = slm, llm, config

    async def respond(self, job: Job) -> AsyncGenerator[Report, None]:
        """Reports of a job, from as many replicas as it takes."""
        written: list[int] = []
        attempt = failures = 0
        while failures < self._config.max_attempts:
            current = replace(job, attempt=attempt, written_ids=tuple(written))
            heard = False
            try:
                async with aclosing(self._reports(current)) as stream:
                    async for report in stream:
                        heard = True
                        for run in report.runs:
                            written += run.token_ids
                        yield report
                        if report.finish is not None:
                            return
            except BackPressureError as error:
                raise overload(error, self._config.retry_after_s) from None
            except LlmUnavailableError as error:
                raise overloaded(f"the LLM is unavailable: {error}", retry_after_s=self._config.retry_after_s) from None
            except Exception as error:
                if isinstance(error, ApiError) or not is_retryable(error):
                    raise
                logger.warning("response %s goes on elsewhere after %s", job.session, _brief(error))
                last = error
                # A job that no replica has taken yet is waiting in a queue; the request's deadline ends that.
                failures += heard or not isinstance(error, TimeoutError)
            attempt += 1
            if heard:
                yield Report([], rebuilds=1)
        raise overloaded(
            f"no replica finished the response in {self._config.max_attempts} attempts; the last: {_brief(last)}",
            retry_after_s=self._config.retry_after_s,
        )

    def _reports(self, job: Job) -> AsyncGenerator[Any, None]:
        handle = self._llm if job.model == "llm" else self._slm
        pinned = handle.options(stream=True, session_id=session_id(job.session, job.attempt))
        return reports(pinned.respond.remote(job), self._config.turn_timeout_s)

    async def ready(self) -> bool:
        """Whether a replica of the SLM answers."""
        with suppress(Exception):
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._slm.open_sessions.remote()
                return True
        return False


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"[:300]


class RoutingIngress:
    """See the module.

    Args:
        spec: the pair.
        slm: handle of the deployment `SLM`.
        llm: handle of the deployment `LLM`.
        source: where routers come from; `user_config` may change it without a restart.
    """

    def __init__(
        self, spec: EngineSpec, slm: DeploymentHandle[Any], llm: DeploymentHandle[Any], source: RouterSource
    ) -> None:
        join_logs()
        config = spec.config.serve
        tokenizer = load_tokenizer(spec.config.pair.slm)
        reserved = [] if spec.handoff_token_id is None else [spec.handoff_token_id]
        encoder = PromptEncoder(tokenizer, spec.config.prompt, spec.shared_vocab_size, reserved)
        pair = ServedPair(tokenizer, encoder, spec.eos_token_ids, spec.max_model_len, pair_cost(spec))
        keys = tuple(key for key in os.environ.get(config.api_keys_env, "").split(",") if key.strip())
        self._source = source
        backend = HandleBackend(slm, llm, config)
        self._service = Service(config, pair, backend, source.load(), keys, IngressMetrics(), sends_request_ids=False)
        self._watcher: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, built once the pair is known."""
        return build_app(self._service)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take in other routers, as a Serve config file names them; and watch their sources."""
        self._source = self._source.changed(user_config)
        self._service.routers = await asyncio.to_thread(self._source.load)
        if self._watcher is None and self._source.poll_s is not None:
            self._watcher = asyncio.create_task(self._watch())

    async def drain(self) -> None:
        """Refuse new requests; running responses go on."""
        self._service.draining = True

    async def open_sessions(self) -> dict[str, int]:
        """What this process has in use, for tests and for people who look."""
        return {"pid": os.getpid(), "jobs": self._service.in_flight}

    async def _watch(self) -> None:
        """Take in a router that replaced the one at its source."""
        assert self._source.poll_s is not None
        seen: object = None
        while True:
            await asyncio.sleep(self._source.poll_s)
            try:
                stamp = await asyncio.to_thread(self._source.stamp)
                if stamp == seen:
                    continue
                routers, seen = await asyncio.to_thread(self._source.load), stamp
            except CiterError as error:
                logger.warning("the routers in service stay: %s", error)
                continue
            if routers != self._service.routers:
                self._service.routers = routers
                logger.info("router in service: %s", routers.current and routers.current.ref.version)
