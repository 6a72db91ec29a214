"""One local Ray for the whole session; tests never call `ray.init` themselves.

Ray's processes inherit the address and the keys of an S3 server that `test_storage.py` runs on a socket opened here.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator

import pytest
import ray

from citer_ray.config import RayConfig
from citer_ray.on_ray.serve_environment import use_fast_paths
from citer_ray.on_ray.session import ray_session as started_ray

use_fast_paths()  # Serve reads it when it is imported

S3_SOCKET = socket.create_server(("127.0.0.1", 0))
os.environ |= {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{S3_SOCKET.getsockname()[1]}",
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def s3_socket() -> socket.socket:
    """The listening socket at AWS_ENDPOINT_URL."""
    return S3_SOCKET


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray with 2 CPUs, stopped at the end."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with started_ray(RayConfig(num_cpus=2)):
        assert ray.is_initialized()
        yield
