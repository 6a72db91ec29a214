"""Joining a Ray cluster, or starting Ray here for the length of one job, and unwrapping what workers raise."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.data import DataContext
from ray.exceptions import RayError, RayTaskError

from citer_ray.config import RayConfig
from citer_ray.errors import CiterError


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """Use the Ray that this process is connected to, join the configured cluster, or start one on this machine.

    What is started here is stopped on the way out; a cluster that was joined is left running.
    """
    _quiet()
    if ray.is_initialized():
        yield
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        ray.init(
            address="local",  # never join a cluster by accident
            num_cpus=config.num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _quiet() -> None:
    """Our own progress bar says what users need; Ray Data's logs go to its files."""
    for name in ("ray.data", "ray.train", "ray._private.authentication"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False


@contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Raise a worker's `CiterError` as itself, without Ray's wrapping; other errors pass as they are."""
    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RayTaskError) and isinstance(cause.cause, CiterError):
                raise cause.cause from error
            if isinstance(cause, CiterError) and not isinstance(cause, RayError):
                raise cause from error
            cause = cause.__cause__
        raise
