"""More than one node: collection uses all, and neither labels nor served streams are lost with one of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openai import OpenAI

from benchmarks.localhost import free_port
from benchmarks.untrained_router import QUESTIONS, write_router
from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelStore
from citer_ray.preparation import prepare
from tests.integration.labels_here import labels_here
from tests.integration.ray_nodes import RayNodes, ray_nodes

pytestmark = pytest.mark.ray
SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
LIMIT_S = 400


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as started:
        started.add(1, slm=1)
        started.add(2, llm=1)
        yield started


@dataclass
class Command:
    """A command of `citer` in a process of its own, which joins the nodes; what it says goes to files."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str, folder: Path, config: CiterConfig) -> Command:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        arguments = [sys.executable, "-m", "citer_ray.cli", name, "--config", str(folder / "config.yaml")]
        with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
            return cls(folder, subprocess.Popen(arguments, stdout=output, stderr=errors))

    def said(self, stream: str = "stdout") -> str:
        return (self.folder / stream).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, true: Callable[[], Any], what: str) -> Any:
        """Poll until something is there; a process that has ended will not bring it."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := true()):
            assert self.process.poll() is None, f"it ended without {what}: {self.said('stderr')[-2000:]}"
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
            time.sleep(0.05)
        return found

    def end(self) -> int:
        return self.process.wait(timeout=LIMIT_S)


Start = Callable[[str, Path, CiterConfig], Command]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start commands; what a test that fails leaves running is stopped, and what it said is shown."""
    commands: list[Command] = []

    def one(name: str, folder: Path, config: CiterConfig) -> Command:
        commands.append(Command.start(name, folder, config))
        return commands[-1]

    yield one
    for command in commands:
        command.process.terminate()
        command.end()
        sys.stderr.write(command.said("stderr")[-5000:])


# -- collection ----------------------------------------------------------------------------------------------------


def collection(folder: Path, address: str) -> CiterConfig:
    """Every CPU of four nodes is taken by a worker, and chunks are small."""
    return load_config(
        SMOKE,
        [
            f"output_dir={folder}",
            f"ray.address={address}",
            "tracking.enabled=false",
            "data.collect_limit=24",
            "collect.examples_per_chunk=2",
            "collect.branches=none",
            "collect.shortcut=false",  # rollouts everywhere, so that there is something to do
            "collect.state_fraction=0.2",
            "collect.slm={count: 1, num_cpus: 0.5}",
            "collect.llm={count: 1, num_cpus: 0.5}",
            "collect.rollouts={count: 3, num_cpus: 1}",
            "evaluate.workers={count: 1, num_cpus: 0}",
        ],
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The labels of one process."""
    prepared = prepare(collection(tmp_path_factory.mktemp("expected"), "unused"))
    return pa.concat_tables(rows_to_table(rows, rows[0].hidden.shape[1]) for rows in labels_here(prepared))


def labels_of(command: Command, store: LabelStore) -> pa.Table:
    """The labels once the collection has ended."""
    assert command.end() == 0, command.said("stderr")[-3000:]
    assert store.is_complete()
    return store.read_rows()


def test_collection_uses_all_nodes_and_gives_the_labels_of_one_process(
    nodes: RayNodes, start: Start, expected: pa.Table, tmp_path: Path
) -> None:
    command = start("collect", tmp_path, collection(tmp_path / "run", nodes.address))
    command.wait_for(lambda: len(nodes.using("MapWorker")) == 4, "a worker on every node")
    assert labels_of(command, LabelStore(tmp_path / "run" / "labels" / "round-1")).equals(expected)


def test_a_node_that_dies_loses_nothing(nodes: RayNodes, start: Start, expected: pa.Table, tmp_path: Path) -> None:
    command = start("collect", tmp_path, collection(tmp_path / "run", nodes.address))
    store = LabelStore(tmp_path / "run" / "labels" / "round-1")
    command.wait_for(store.done_chunks, "a chunk")
    busy = command.wait_for(
        lambda: [node for node in nodes.using("DecideWorker") if node in nodes.workers], "a worker on a node"
    )
    place = nodes.workers.index(busy[-1])
    nodes.kill(busy[-1])
    assert len(store.done_chunks()) < 12, "the node died too late to matter"
    labels = labels_of(command, store)
    (again,) = nodes.add(1, **({"slm": 1.0} if place == 0 else {"llm": 1.0}))
    nodes.workers.insert(place, nodes.workers.pop(nodes.workers.index(again)))
    assert labels.equals(expected)
    assert len(set(labels["example_id"].to_pylist())) == labels.num_rows == 24


# -- serving -------------------------------------------------------------------------------------------------------


def service(folder: Path, address: str, port: int) -> CiterConfig:
    """Replicas of the models on nodes of their own, two of the LLM."""
    return load_config(
        "configs/embedded.yaml",
        [
            f"output_dir={folder / 'run'}",
            f"ray.address={address}",
            f"serve.port={port}",
            "serve.proxy_location=HeadOnly",  # nodes of one machine share the port, and one of them dies
            f"serve.router={folder / 'router'}",
            "serve.turn_timeout_s=5",
            "serve.ingress={num_cpus: 0.1, resources: {head: 1}}",  # its death would end its clients' streams
            "serve.slm={num_cpus: 0.1, resources: {slm: 1}}",
            "serve.llm={num_cpus: 0.1, resources: {llm: 1}, min_replicas: 2, max_replicas: 2}",
        ],
    )


class Streams:
    """Routed streams, one of each question, whose first tokens are read."""

    def __init__(self, port: int) -> None:
        client = OpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=120)
        self._streams = [
            client.chat.completions.create(
                model="routed",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=120,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"llm_share": 0.4, "ignore_eos": True, "citer": {"trace": True}},
            )
            for question in QUESTIONS
        ]
        self._tokens: list[list[tuple[int, str]]] = [[] for _ in QUESTIONS]
        self.rebuilds = 0
        for index in range(len(QUESTIONS)):
            self._read(index, 2)

    def _read(self, index: int, chunks: int | None) -> None:
        for chunk in islice(self._streams[index], chunks):
            if chunk.choices:
                tokens = chunk.choices[0].model_extra["citer"]["tokens"]
                self._tokens[index] += [(token["id"], token["writer"]) for token in tokens]
            else:
                self.rebuilds += chunk.usage.model_extra["citer"]["rebuilds"]

    def rest(self) -> list[list[tuple[int, str]]]:
        """Ids and writers of all tokens, by stream."""
        for index in range(len(QUESTIONS)):
            self._read(index, None)
        return self._tokens


def test_streams_go_on_when_a_node_of_the_llm_dies(nodes: RayNodes, start: Start, tmp_path: Path) -> None:
    port = free_port()
    config = service(tmp_path, nodes.address, port)
    asyncio.run(write_router(config, tmp_path / "router"))
    command = start("serve", tmp_path, config)
    command.wait_for(lambda: "serving on" in command.said(), "service")
    slm, *llm = nodes.workers
    assert nodes.using("ServeReplica:citer:SLM") == [slm]
    assert nodes.using("ServeReplica:citer:LLM") == llm
    undisturbed = Streams(port).rest()
    before = nodes.cpu_seconds("ServeReplica:citer:LLM")
    streams = Streams(port)
    used = nodes.cpu_seconds("ServeReplica:citer:LLM")
    nodes.kill(max(llm, key=lambda node: used[node] - before[node]))
    assert streams.rest() == undisturbed
    assert streams.rebuilds >= 1, "no stream was at that node"
    writers = {writer for tokens in undisturbed for _, writer in tokens}
    assert writers == {"slm", "llm"}
