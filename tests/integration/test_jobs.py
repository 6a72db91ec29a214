"""`ray job submit` on a real cluster with its dashboard: iterate, what goes wrong, and serving until it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from benchmarks.localhost import free_port
from citer_ray.report import load_report
from citer_ray.router_artifact import load_router
from tests.integration.localhost import wait_until
from tests.integration.mlflow_server import Server

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
SMALL = ["data.collect_limit=12", "data.validation_limit=8", "data.test_limit=8", "collect.examples_per_chunk=6"]
SMALL += ["iterate.max_rounds=2", "iterate.citer_s=false", "iterate.min_area_gain=-1", "evaluate.timed_examples=0"]
RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Cluster:
    """A head node of its own.

    Attributes:
        dashboard: where jobs are submitted.
        home: home folder of the user that it runs as.
        environ: variables of commands that talk to it.
    """

    dashboard: str
    home: Path
    environ: Mapping[str, str]

    def job(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `ray job ...` to its end."""
        verb, *rest = arguments
        command = [str(RAY), "job", verb, "--address", self.dashboard, *rest]
        return subprocess.run(
            command,
            env=self.environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Submit a script of `jobs/` with the smoke configuration."""
        entry = [sys.executable, f"jobs/{script}.py", "--config", "configs/smoke.yaml", *arguments]
        return self.job("submit", "--working-dir", ".", *options, "--", *entry)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("home")
    # What this process's own Ray has set is not for another one.
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key != "MLFLOW_TRACKING_URI"
    }
    environ |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300"}
    dashboard = free_port()
    ports = {
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
    }
    options = [f"--{name}={number}" for name, number in ports.items()]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:  # sockets' paths must be short
        node = ["--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--temp-dir={temporary}"]
        process = subprocess.Popen(
            [str(RAY), "start", *node, "--dashboard-host=127.0.0.1", *options],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = f"http://127.0.0.1:{dashboard}"
            wait_until(
                lambda: process.poll() is not None or answers(f"{address}/api/jobs/"), 300, "the dashboard answers"
            )
            assert process.poll() is None, "ray start ended"
            yield Cluster(address, home, environ)
        finally:
            process.send_signal(signal.SIGTERM)  # `--block` ends the processes that it started, and no others
            process.wait()


def answers(url: str) -> bool:
    """Whether an address answers with 200."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


def test_iterate_leaves_its_results_in_the_home_folder_and_its_runs_in_mlflow(
    cluster: Cluster, mlflow_server: Server
) -> None:
    done = cluster.submit("iterate", "name=job", "output_dir=runs/job", f"tracking.uri={mlflow_server.uri}", *SMALL)
    assert done.returncode == 0, done.stdout
    folder = cluster.home / "runs" / "job"
    assert f"its output goes to {folder}" in " ".join(done.stdout.split())
    assert f"wrote {folder / 'report.md'}" in done.stdout
    assert [one.round for one in load_report(folder / "report.json").rounds] == [1, 2]
    load_router(folder / "routers" / "round-2", slm_fingerprint=None)
    assert not (ROOT / "runs" / "job").exists()

    client = MlflowClient(tracking_uri=mlflow_server.uri)
    experiment = client.get_experiment_by_name("job")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"job", "round-1", "round-2"}
    for number in (1, 2):
        assert runs[f"round-{number}"].data.tags["mlflow.parentRunId"] == runs["job"].info.run_id
        assert runs[f"round-{number}"].info.status == "FINISHED"
    assert client.get_model_version_by_alias("job", "champion").version in ("1", "2")


def test_a_mistake_ends_the_job_with_one_message(cluster: Cluster) -> None:
    done = cluster.submit("collect", "tracking.enabled=false", "data.collect=no/such.jsonl")
    assert done.returncode != 0
    assert "no such file of examples: no/such.jsonl" in done.stdout
    assert "failed" in done.stdout.lower()
    assert "Traceback" not in done.stdout


def test_serve_answers_until_the_job_is_stopped(cluster: Cluster) -> None:
    port = free_port()
    settings = (f"serve.port={port}", "serve.drain_s=1", "output_dir=runs/serve")
    started = cluster.submit("serve", *settings, options=("--no-wait", "--submission-id", "serving"))
    assert started.returncode == 0, started.stdout
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/v1/models"), 300, "serving")
    with httpx.Client(trust_env=False, timeout=60) as client:
        question = {"model": "slm", "max_tokens": 4, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        reply = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=question)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] >= 1
        assert applications(client, cluster) != {}
        stopped = cluster.job("stop", "serving")
        assert stopped.returncode == 0 and "was stopped" in stopped.stdout, stopped.stdout
        wait_until(lambda: applications(client, cluster) == {}, 60, "the application is gone")
        with pytest.raises(httpx.ConnectError):
            client.get(f"http://127.0.0.1:{port}/v1/models")
    listed = json.dumps(httpx.get(f"{cluster.dashboard}/api/jobs/serving", trust_env=False).json())
    assert '"STOPPED"' in listed


def applications(client: httpx.Client, cluster: Cluster) -> dict[str, object]:
    """The applications of Ray Serve in the cluster."""
    found: dict[str, object] = client.get(f"{cluster.dashboard}/api/serve/applications/").json()["applications"]
    return found
