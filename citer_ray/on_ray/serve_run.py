"""Running the application until it is told to stop: Ray, the HTTP proxy, the deployments, and a graceful end."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve

from citer_ray.config import CiterConfig
from citer_ray.errors import ConfigError
from citer_ray.on_ray.serve_app import APP_NAME, build_application
from citer_ray.on_ray.session import ray_session

logger = logging.getLogger(__name__)


@contextmanager
def serving(config: CiterConfig) -> Iterator[str]:
    """The application in service; gives its address. What was started is stopped on the way out.

    Raises:
        ConfigError: the port is taken, or a replica does not start.
    """
    with ray_session(config.ray):
        application = build_application(config)
        serve.start(http_options={"host": config.serve.host, "port": config.serve.port})
        try:
            serve.run(application, name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            serve.shutdown()
            raise ConfigError(f"serving did not start: {error}") from error
        try:
            yield f"http://{config.serve.host}:{config.serve.port}"
        finally:
            serve.shutdown()


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
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
