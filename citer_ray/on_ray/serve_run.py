"""Running the application until it is told to stop: Ray, the HTTP proxy, the deployments, and a graceful end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util import list_named_actors

from citer_ray.config import CiterConfig
from citer_ray.errors import ConfigError, RetryableError
from citer_ray.on_ray.serve_app import APP_NAME, build_application
from citer_ray.on_ray.session import ray_session

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
_POLL_S = 0.1


@contextmanager
def serving(config: CiterConfig) -> Iterator[str]:
    """The application in service; gives its address. What was started is stopped on the way out, however it is left.

    Ray Serve itself is left running where it ran before, with the applications of others.

    Raises:
        ConfigError: the port is taken, or a replica does not start.
        RetryableError: Ray Serve itself does not start.
    """
    with ray_session(config.ray):
        application = build_application(config)
        shared = _serve_runs()
        try:
            try:
                serve.start(
                    proxy_location=config.serve.proxy_location,
                    http_options={"host": config.serve.host, "port": config.serve.port},
                )
                serve.run(application, name=APP_NAME, route_prefix="/")
            except RuntimeError as error:
                raise ConfigError(f"serving did not start: {error}") from error
            except RayError as error:  # a proxy that a busy node was too slow to start
                raise RetryableError(f"serving did not start: {type(error).__name__}; run it again") from error
            yield f"http://{config.serve.host}:{config.serve.port}"
        finally:
            # Serve's controller does the work: it goes on even if this process is killed for taking too long.
            if shared:
                serve.delete(APP_NAME)
            else:
                serve.shutdown()


def drain(name: str, seconds: float) -> bool:
    """Let an application's running responses end, while new ones are refused.

    Serve's own graceful end is each deployment's: the LLM's replicas would be gone between two visits.

    Args:
        name: of the application.
        seconds: that they get at most.

    Returns:
        Whether all of them ended.
    """
    ingress = serve.get_deployment_handle("RoutingIngress", name)
    deadline = time.monotonic() + seconds
    _all_answers(ingress, "drain")
    # A replica that does not answer any more has no response to wait for.
    while sum(one["jobs"] for one in _all_answers(ingress, "open_sessions") if isinstance(one, dict)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _all_answers(handle: DeploymentHandle[Any], method: str) -> list[Any]:
    """What each replica answers, or its error; nothing if none is there."""
    try:
        found: list[Any] = handle.broadcast(method).results(timeout_s=_ANSWER_TIMEOUT_S, return_exceptions=True)
    except (RayServeException, TimeoutError):
        return []
    return found


def _serve_runs() -> bool:
    """Whether Ray Serve is in this cluster already; asking it by its own interface would start it."""
    names = list_named_actors(all_namespaces=True)
    return any(actor["name"] == SERVE_CONTROLLER_NAME for actor in names)


def serve_until_stopped(config: CiterConfig, announce: object) -> None:
    """Serve until SIGINT or SIGTERM; `announce` is called with the address."""
    assert callable(announce)
    stop = threading.Event()
    with serving(config) as address:
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        announce(address)
        try:
            while not stop.wait(1.0):
                pass
            logger.info("stopping; running responses get up to %g s", config.serve.drain_s)
            drain(APP_NAME, config.serve.drain_s)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
