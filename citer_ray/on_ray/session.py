"""Joining a Ray cluster, or starting Ray here for the length of one job, and unwrapping what workers raise."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.data import DataContext
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from citer_ray.config import CiterConfig, RayConfig
from citer_ray.errors import CiterError, ConfigError
from citer_ray.storage import is_remote

logger = logging.getLogger(__name__)

_PROBE_S = 60.0  # a node that takes longer to start a worker is not asked

_started_here = False
_joined = False


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """Use the Ray that this process is connected to, join the configured cluster, or start one on this machine.

    What is started here is stopped on the way out; a cluster that was joined is left running.
    """
    _quiet()
    if ray.is_initialized():
        yield
        return
    global _started_here, _joined
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        _joined = True
    else:
        # Ray's core writes to our terminal otherwise, at each start of a pool; its files in /tmp/ray have it all.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(
            address="local",  # never join a cluster by accident
            num_cpus=config.num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        _started_here = True
    try:
        with _sigterm_as_ctrl_c():
            yield
    finally:
        _started_here = _joined = False
        ray.shutdown()


def joined_cluster() -> bool:
    """Whether Ray is a cluster that somebody else runs: it may grow, and this job may be one of several."""
    return _joined or "RAY_ADDRESS" in os.environ


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """What ends a job from outside (`ray job stop`, Kubernetes) leaves like Ctrl-C: a message, and Ray stopped.

    Only `ray.init` has set its own handler by now, which prints a stack of Ray's core.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet() -> None:
    """Our own progress bar says what users need, and errors are raised to us."""
    for name in ("ray.train", "ray._private.authentication"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It writes each error that it raises with two stacks to the terminal, so that ours drowned (a full disk).
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True  # Ray Data's own wrapper loses the cause: see `unwrapped_errors`


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


def check_resources(config: CiterConfig) -> None:
    """Refuse a configuration that the Ray of this machine can never run: Ray would wait for ever.

    A joined cluster may grow, so there is a warning alone.

    Raises:
        ConfigError: what is needed and what is there.
    """
    for shortage in _shortages(config):
        if _started_here:
            raise ConfigError(shortage)
        logger.warning("%s; waiting for the cluster to grow", shortage)


def _shortages(config: CiterConfig) -> Iterator[str]:
    """What a configuration needs and Ray does not have."""
    collect, workers = config.collect, config.evaluate.workers
    lasting = workers.count * workers.num_cpus if workers.num_gpus == 0 else 0.0
    pools = {"collect.slm": collect.slm, "collect.llm": collect.llm, "collect.rollouts": collect.rollouts}
    collecting = sum(pool.count * pool.num_cpus for pool in pools.values()) + lasting
    fitting = config.fit.workers * config.fit.num_cpus + lasting
    available = ray.cluster_resources().get("CPU", 0.0)
    for stage, needed in (("collect", collecting), ("fit", fitting)):
        if needed > available + 1e-6:
            yield (
                f"{stage} needs {needed:g} CPUs at once (with evaluate.workers, which stay), Ray has {available:g}; "
                f"lower {', '.join(pools)}, fit.workers or evaluate.workers, or raise ray.num_cpus"
            )
    gpus = max(pool.count * pool.num_gpus for pool in (*pools.values(), workers))
    if gpus > ray.cluster_resources().get("GPU", 0.0):
        yield f"a pool of workers needs {gpus:g} GPUs, Ray has fewer; lower num_gpus or count"


def check_shared(folder: Path) -> None:
    """Refuse a local output folder that another node of the cluster does not see: its workers would write elsewhere.

    Nodes that join later are not checked.

    Raises:
        ConfigError: which node, and what to do.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    if is_remote(folder) or len(nodes) < 2:
        return
    with tempfile.NamedTemporaryFile(prefix=".shared-", dir=folder) as probe:
        sees = ray.remote(num_cpus=0, max_retries=2)(_sees)
        asked = {
            sees.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)).remote(
                probe.name
            ): node["NodeManagerAddress"]
            for node in nodes
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE_S)
        for reference in ready:
            if not ray.get(reference):
                raise ConfigError(
                    f"output_dir {folder} of this node is not seen by the node {asked[reference]}; give a folder that "
                    "all nodes share, or s3://bucket/folder"
                )


def _sees(path: str) -> bool:
    return Path(path).exists()
