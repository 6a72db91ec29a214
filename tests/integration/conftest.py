"""One local Ray for the whole session; tests never call `ray.init` themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray

from citer_ray.config import RayConfig
from citer_ray.on_ray.serve_environment import use_fast_paths
from citer_ray.on_ray.session import ray_session as started_ray

use_fast_paths()  # Serve reads it when it is imported


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray with 2 CPUs, stopped at the end."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with started_ray(RayConfig(num_cpus=2)):
        assert ray.is_initialized()
        yield
