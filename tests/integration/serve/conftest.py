"""One application for all tests of this folder: the embedded pair on two SLM and two LLM replicas, over real HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from ray import serve
from ray.serve.exceptions import RayServeException

from benchmarks.localhost import free_port
from benchmarks.untrained_router import write_router
from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.decoding import Request, Trace, decode
from citer_ray.engine import GREEDY, Sampling
from citer_ray.engines.build import build_engine
from citer_ray.on_ray.serve_app import APP_NAME, build_application
from citer_ray.policy import Policy
from citer_ray.preparation import engine_spec, prepare
from tests.integration.localhost import wait_until

SETTINGS = (
    "serve.on_llm_unavailable=slm",
    "serve.llm_unavailable_after_s=10",
    "serve.turn_timeout_s=2",
    "serve.max_attempts=20",
    "serve.router_poll_s=0.5",
    "serve.drain_s=5",
    "serve.session_idle_s=8",
    "serve.max_body_bytes=100000",
    "serve.ingress={num_cpus: 0.1, max_ongoing: 400, health_check_timeout_s: 60}",
    "serve.slm={min_replicas: 2, max_replicas: 2, num_cpus: 0.1, health_check_timeout_s: 60}",
    "serve.llm={min_replicas: 2, max_replicas: 2, num_cpus: 0.1, health_check_timeout_s: 60}",
)


@dataclass
class Server:
    """The application in service."""

    url: str
    config: CiterConfig
    router: Path

    def openai(self) -> OpenAI:
        return OpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=120)

    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=120)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def replicas(self, deployment: str) -> list[dict[str, int]]:
        """What each replica of a deployment has in use."""
        handle = serve.get_deployment_handle(deployment, APP_NAME)
        try:
            found = handle.broadcast("open_sessions").results(timeout_s=30, return_exceptions=True)
        except RayServeException:  # none is there at the moment
            return []
        return [one for one in found if isinstance(one, dict)]

    def busy(self, deployment: str, what: str = "jobs") -> int | None:
        """Process id of a replica that has something in use, if there is one."""
        return next((one["pid"] for one in self.replicas(deployment) if one[what] > 0), None)

    def in_use(self) -> int:
        """Everything that any replica has in use."""
        found = [one for name in ("RoutingIngress", "SLM", "LLM") for one in self.replicas(name)]
        return sum(count for one in found for what, count in one.items() if what != "pid")

    def wait_until_idle(self, seconds: float = 20) -> None:
        wait_until(lambda: self.in_use() == 0, seconds, "nothing in use")

    def wait_until_whole(self) -> None:
        """All replicas are there again."""
        wait_until(
            lambda: [len(self.replicas(name)) for name in ("RoutingIngress", "SLM", "LLM")] == [1, 2, 2],
            120,
            "all replicas run",
        )


@contextmanager
def served(folder: Path, settings: Iterable[str]) -> Iterator[Server]:
    """The embedded pair in service with an untrained router; Serve is stopped at the end."""
    router = folder / "router"
    config = load_config("configs/embedded.yaml", [f"output_dir={folder / 'run'}", f"serve.router={router}", *settings])
    asyncio.run(write_router(config, router))
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_application(config), name=APP_NAME, route_prefix="/")
    yield Server(f"http://127.0.0.1:{port}", config, router)
    serve.shutdown()


@pytest.fixture(scope="package")
def server(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("serving"), SETTINGS) as started:
        yield started


@dataclass
class Reference:
    """The same responses without Serve: the loop on two engines of this process."""

    prepared: Any
    slm: Any
    llm: Any

    def prompt(self, content: str) -> list[int]:
        tokenizer = self.prepared.tokenizer
        ids: list[int] = tokenizer.encode(f"{content}\n", add_special_tokens=False)
        return [tokenizer.bos_token_id, *ids]

    def decode(self, content: str, policy: Policy, max_tokens: int, sampling: Sampling = GREEDY) -> Trace:
        return asyncio.run(decode(self.slm, self.llm, Request(self.prompt(content), policy, max_tokens, sampling)))


@pytest.fixture(scope="package")
def reference(server: Server) -> Reference:
    prepared = prepare(server.config)
    spec = engine_spec(prepared)
    return Reference(prepared, build_engine("slm", spec, router=server.router), build_engine("llm", spec))


@pytest.fixture
def stopped() -> Iterator[Callable[[int], None]]:
    """Stop processes (SIGSTOP) and let them go on at the end."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        pids.append(pid)

    yield stop
    for pid in pids:
        with suppress(ProcessLookupError):  # Serve has replaced it
            os.kill(pid, signal.SIGCONT)
