"""Several Ray nodes on one machine, as processes beside pytest; jobs join them by address, pytest itself does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 100 * 2**20


class RayNodes:
    """A head and more nodes, of one CPU each."""

    def __init__(self) -> None:
        common = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**common, "include_dashboard": False, "resources": {"head": 1}}
        )
        self.head: Node = self.cluster.head_node
        self._common = common
        self.workers: list[Node] = []

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, count: int, **resources: float) -> list[Node]:
        """Start nodes and wait until they are known."""
        with _own_sigterm():
            added = [
                self.cluster.add_node(wait=False, resources=resources or None, **self._common) for _ in range(count)
            ]
        self.cluster.wait_for_nodes(timeout=120)
        self.workers += added
        return added

    def kill(self, node: Node) -> None:
        """SIGKILL to all of a node, its workers first: nothing of it can finish or say good-bye."""
        for process in (*_children(node), _raylet(node)):
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                process.kill()
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def using(self, title: str) -> list[Node]:
        """Nodes that run a worker process whose title holds a text."""
        return [node for node in (self.head, *self.workers) if any(title in one for one in _titles(node))]

    def cpu_seconds(self, title: str) -> dict[Node, float]:
        """CPU time of each node's worker processes whose title holds a text."""
        seconds: dict[Node, float] = {}
        for node in (self.head, *self.workers):
            times = [one.cpu_times() for one in _children(node) if title in _title(one)]
            seconds[node] = sum(time.user + time.system for time in times)
        return seconds


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Nodes that are gone at the end, with all that ran on them."""
    environment = {"RAY_BACKEND_LOG_LEVEL": "fatal"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update({name: value for name, value in environment.items() if before[name] is None})
    with _own_sigterm():
        nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Nodes set a handler that drains them for 30 s; pytest's own stays."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raylet(node: Node) -> psutil.Process:
    return psutil.Process(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)


def _children(node: Node) -> list[psutil.Process]:
    try:
        return _raylet(node).children(recursive=True)
    except (KeyError, psutil.NoSuchProcess):
        return []


def _titles(node: Node) -> list[str]:
    return [_title(process) for process in _children(node)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
