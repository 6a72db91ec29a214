"""The MLflow tracker against real stores: a sqlite file, and a tracking server that is killed and comes back."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from citer_ray.config import CiterConfig
from citer_ray.errors import ConfigError
from citer_ray.mlflow_store import fetch_router, tracking_uri
from citer_ray.mlflow_tracker import MlflowBackend, make_tracker
from citer_ray.tracking import NullTracker, Tracker
from citer_ray.tracking_backlog import BACKLOG_JSONL, BufferedTracker
from tests.integration.mlflow_server import Server


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs; its store is made once, since MLflow's migrations take seconds."""
    return tmp_path_factory.mktemp("work") / "runs"


@pytest.fixture(autouse=True)
def clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory that must stay empty, and no MLflow settings from outside."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)
    yield
    assert list(empty.iterdir()) == [], "MLflow left something in the working directory"


def config(output_dir: Path, **tracking: Any) -> CiterConfig:
    return CiterConfig.model_validate(
        {
            "name": output_dir.name,
            "output_dir": str(output_dir),
            "pair": {"slm": {"path": "embedded:slm"}, "llm": {"path": "embedded:llm"}},
            "data": {"collect": "embedded:train:64"},
            "tracking": tracking,
        }
    )


def router(folder: Path, content: str = "weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "router.safetensors").write_bytes(content.encode())
    (folder / "router.json").write_text('{"round": 1}', encoding="utf-8")
    return folder


def client_of(runs: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")


def runs_of(client: MlflowClient, experiment: str) -> dict[str, Run]:
    """All runs of an experiment by name; a name that occurs twice fails."""
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    named: dict[str, Run] = {}
    for run in client.search_runs([found.experiment_id]):
        assert run.info.run_name not in named, f"two runs are called {run.info.run_name}"
        named[run.info.run_name] = run
    return named


def history(client: MlflowClient, run: Run, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


def kept_kinds(output_dir: Path) -> list[str]:
    lines = (output_dir / BACKLOG_JSONL).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["kind"] for line in lines]


def one_round(tracker: Tracker, output_dir: Path, number: int, accuracy: float) -> str | None:
    tracker.start_round(number, {"rollout_threshold": 0.9})
    tracker.log_dataset("d" * 64, "embedded:train:64", 64)
    for epoch in range(3):
        tracker.log_metrics({"train/loss": 1.0 / (epoch + 1)}, epoch)
    tracker.log_metrics({"labels/slm_correct": 100.0 * number, "validation/area": accuracy})
    tracker.log_curve("frontier", [{"llm_share": 0.05, "accuracy": accuracy}, {"llm_share": 0.1, "accuracy": 0.9}])
    version = tracker.register_router(router(output_dir / f"router-{number}", f"weights {number}"), number)
    tracker.end_round()
    return version


def test_rounds_are_nested_runs_with_everything_in_them(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    output_dir = runs / "complete"
    output_dir.mkdir(parents=True)
    (output_dir / "provenance.json").write_text('{"git": {"revision": "abc123", "dirty": false}}', encoding="utf-8")
    (output_dir / "report.md").write_text("# Report\n", encoding="utf-8")
    tracker = make_tracker(config(output_dir))
    tracker.start_experiment(config(output_dir))
    assert one_round(tracker, output_dir, 1, 0.6) == "1"
    assert one_round(tracker, output_dir, 2, 0.8) == "2"
    tracker.log_artifact(output_dir / "report.md")
    tracker.promote(2)
    tracker.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []

    client = client_of(runs)
    named = runs_of(client, "complete")
    assert set(named) == {"complete", "round-1", "round-2"}
    parent, second = named["complete"], named["round-2"]
    assert {run.info.status for run in named.values()} == {"FINISHED"}
    assert second.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.tags["mlflow.source.git.commit"] == "abc123"
    assert parent.data.params["pair.slm.path"] == "embedded:slm"
    assert second.data.params["rollout_threshold"] == "0.9"
    assert second.data.metrics["labels/slm_correct"] == 200.0
    assert history(client, second, "train/loss") == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert history(client, second, "frontier/accuracy") == [(500, 0.8), (1000, 0.9)]
    assert history(client, parent, "validation/area") == [(1, 0.6), (2, 0.8)]
    (dataset,) = second.inputs.dataset_inputs
    assert dataset.dataset.name == "embedded:train:64"
    assert json.loads(dataset.dataset.source)["digest"] == "d" * 64
    assert json.loads(dataset.dataset.profile) == {"num_examples": 64}
    assert [artifact.path for artifact in client.list_artifacts(parent.info.run_id)] == ["report.md"]
    assert (runs / "mlartifacts" / "complete").is_dir()
    assert sorted(path.name for path in runs.iterdir()) == ["complete", "mlartifacts", "mlflow.db"]


def test_champion_is_loaded_by_alias_and_versions_keep_their_files(runs: Path, tmp_path: Path) -> None:
    output_dir = runs / "registry"
    tracker = make_tracker(config(output_dir, registered_model="citer-demo"))
    first = one_round(tracker, output_dir, 1, 0.6)
    second = one_round(tracker, output_dir, 2, 0.8)
    tracker.promote(1)
    tracker.promote(2)
    tracker.close()
    assert (first, second) == ("1", "2")
    uri = f"sqlite:///{runs / 'mlflow.db'}"
    champion = fetch_router("models:/citer-demo@champion", tmp_path / "champion", uri)
    assert (champion / "router.safetensors").read_bytes() == b"weights 2"
    old = fetch_router("models:/citer-demo/1", tmp_path / "old", uri)
    assert sorted(path.name for path in old.iterdir()) == ["router.json", "router.safetensors"]
    assert (old / "router.safetensors").read_bytes() == b"weights 1"
    version = client_of(runs).get_model_version_by_alias("citer-demo", "champion")
    assert (int(version.version), version.tags["citer.round"]) == (2, "2")


def test_mlflow_s_own_download_resolves_the_alias(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir = runs / "download"
    tracker = make_tracker(config(output_dir))
    one_round(tracker, output_dir, 1, 0.6)
    tracker.promote(1)
    tracker.close()
    # Not `mlflow.set_tracking_uri`: it leaves this variable behind for every later test.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{runs / 'mlflow.db'}")
    path = mlflow.artifacts.download_artifacts("models:/download@champion", dst_path=str(tmp_path / "files"))
    assert (Path(path) / "router.safetensors").read_bytes() == b"weights 1"


def test_the_same_router_keeps_its_version_and_another_gets_a_new_one(runs: Path, tmp_path: Path) -> None:
    output_dir = runs / "versions"
    versions = []
    for content in ("a", "a", "b"):
        tracker = make_tracker(config(output_dir))
        tracker.start_round(1, {})
        versions.append(tracker.register_router(router(output_dir / "router", content), 1))
        tracker.close()
    assert versions == ["1", "1", "2"]
    uri = f"sqlite:///{runs / 'mlflow.db'}"
    assert (fetch_router("models:/versions/1", tmp_path / "v1", uri) / "router.safetensors").read_bytes() == b"a"


@pytest.mark.parametrize("remembered", [True, False])
def test_resumed_run_goes_on_with_the_same_mlflow_runs(runs: Path, remembered: bool) -> None:
    output_dir = runs / f"resumed-{remembered}"
    killed = make_tracker(config(output_dir))
    killed.start_experiment(config(output_dir))
    killed.start_round(1, {"rollout_threshold": 0.9})
    killed.log_metrics({"train/loss": 1.0}, 0)
    # The process dies here: nothing is closed.
    if not remembered:
        (output_dir / "tracking.json").unlink()
    changed = config(output_dir, uri=f"sqlite:///{runs / 'mlflow.db'}")
    tracker = make_tracker(changed)
    tracker.start_experiment(changed)
    tracker.start_round(1, {"rollout_threshold": 0.97})
    tracker.log_metrics({"train/loss": 0.5}, 1)
    tracker.end_round()
    tracker.close()
    client = client_of(runs)
    named = runs_of(client, output_dir.name)
    assert set(named) == {output_dir.name, "round-1"}
    assert history(client, named["round-1"], "train/loss") == [(0, 1.0), (1, 0.5)]
    assert named["round-1"].data.params["rollout_threshold"] == "0.9"  # MLflow never changes a param
    assert named["round-1"].data.tags["citer.changed.rollout_threshold"] == "0.97"
    assert named["round-1"].info.status == "FINISHED"


def test_finished_run_is_running_again_while_it_is_resumed(runs: Path) -> None:
    output_dir = runs / "again"
    for expected in (["round-1"], ["round-1", "round-2"]):
        tracker = make_tracker(config(output_dir))
        tracker.start_experiment(config(output_dir))
        assert runs_of(client_of(runs), "again")["again"].info.status == "RUNNING"
        tracker.start_round(len(expected), {})
        tracker.end_round()
        tracker.close()
        named = runs_of(client_of(runs), "again")
        assert sorted(named) == ["again", *expected]
        assert named["again"].info.status == "FINISHED"


def test_two_folders_of_one_experiment_are_two_parent_runs(runs: Path) -> None:
    for name in ("left", "right"):
        tracker = make_tracker(config(runs / name, experiment="shared"))
        tracker.start_round(1, {})
        tracker.close("failed")
    experiment = client_of(runs).get_experiment_by_name("shared")
    found = client_of(runs).search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in found) == ["left", "right", "round-1", "round-1"]
    assert {run.info.status for run in found} == {"FAILED"}


def test_deleted_run_is_started_afresh(runs: Path) -> None:
    output_dir = runs / "deleted"
    client = client_of(runs)
    for step in range(2):
        tracker = make_tracker(config(output_dir))
        tracker.log_metrics({"a": float(step)}, step)
        tracker.close()
        run = runs_of(client, "deleted")["deleted"]
        assert history(client, run, "a") == [(step, float(step))]
        client.delete_run(run.info.run_id)


def test_deleted_experiment_is_restored(runs: Path) -> None:
    output_dir = runs / "restored"
    client = client_of(runs)
    for step in range(2):
        tracker = make_tracker(config(output_dir))
        tracker.log_metrics({"a": float(step)}, step)
        tracker.close()
        run = runs_of(client, "restored")["restored"]
        assert history(client, run, "a") == [(n, float(n)) for n in range(step + 1)]
        client.delete_experiment(run.info.experiment_id)


def test_what_mlflow_refuses_does_not_stop_the_run(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    output_dir = runs / "refused"
    tracker = make_tracker(config(output_dir))
    tracker.log_metrics({"a?b": 1.0})  # not a metric's name
    tracker.log_artifact(output_dir / "missing.png")
    tracker.promote(1)
    tracker.log_metrics({"fine": float("nan"), "large": float("inf")})
    tracker.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 3
    assert "refused metrics and it is left out" in warnings[0]
    assert "missing.png does not exist" in warnings[1]
    assert "round 1 has no registered router" in warnings[2]
    assert "fine" in runs_of(client_of(runs), "refused")["refused"].data.metrics
    assert not (output_dir / BACKLOG_JSONL).exists()


def test_unusable_sqlite_file_is_kept_out_of_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.db").write_text("not a database, but long enough to look like one" * 10, encoding="utf-8")
    tracker = make_tracker(config(tmp_path / "run", uri=f"sqlite:///{tmp_path / 'broken.db'}"))
    tracker.start_round(1, {})
    tracker.close()
    assert "cannot be reached (DatabaseError" in caplog.records[0].getMessage()
    assert kept_kinds(tmp_path / "run") == ["round", "end", "end"]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("localhost:5000", "is not a tracking URI"),
        ("ftp://host", "is not a tracking URI"),
        ("./mlruns", "no longer takes plain folders"),
        ("http://", "names no host"),
        ("http://host:port", "is not a URI"),
        ("sqlite://", "names no file"),
        ("http://me:secret@host:x", r"http://\*\*\*@host:x"),
    ],
)
def test_malformed_uri_is_an_error_before_anything_runs(tmp_path: Path, uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tracking\.uri: .*{message}"):
        make_tracker(config(tmp_path / "run", uri=uri))
    with pytest.raises(ConfigError, match=rf"MLFLOW_TRACKING_URI: .*{message}"):
        make_tracker(config(tmp_path / "run"), {"MLFLOW_TRACKING_URI": uri})


def test_precedence_of_uris(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://server:5000"}
    default = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert tracking_uri(config(tmp_path / "run", uri="sqlite:///x.db"), environ) == "sqlite:///x.db"
    assert tracking_uri(config(tmp_path / "run"), environ) == "http://server:5000"
    assert tracking_uri(config(tmp_path / "run"), {}) == default
    assert tracking_uri(config(tmp_path / "run"), {"MLFLOW_TRACKING_URI": ""}) == default


def test_disabled_tracking_tracks_nothing(tmp_path: Path) -> None:
    assert isinstance(make_tracker(config(tmp_path / "run", enabled=False, uri="nonsense")), NullTracker)


@pytest.mark.parametrize(
    ("model_uri", "message"),
    [
        ("models:/nobody@champion", "cannot be fetched from MLflow at sqlite"),
        ("models:/nobody/1", "cannot be fetched"),
        ("runs:/abc/router", "is not a registered router"),
        ("models:/name", "is not a registered router"),
        ("models:/name/latest", "is not a registered router"),
        ("name@champion", "is not a registered router"),
    ],
)
def test_router_that_cannot_be_fetched(runs: Path, tmp_path: Path, model_uri: str, message: str) -> None:
    tracker = make_tracker(config(runs / "fetching"))
    tracker.log_metrics({"a": 1.0})
    tracker.close()
    with pytest.raises(ConfigError, match=message):
        fetch_router(model_uri, tmp_path / "x", f"sqlite:///{runs / 'mlflow.db'}")


def test_fetching_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        fetch_router("models:/a/1", tmp_path / "x", f"sqlite:///{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()


def test_making_a_tracker_imports_no_mlflow(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from citer_ray.config_loading import load_config\n"
        "from citer_ray.mlflow_tracker import MlflowBackend, make_tracker\n"
        f"tracker = make_tracker(load_config({str(tmp_path / 'c.yaml')!r}))\n"
        "tracker.close()\n"
        "sys.exit('mlflow' in sys.modules)\n"
    )
    (tmp_path / "c.yaml").write_text(
        f"name: a\noutput_dir: {tmp_path / 'run'}\n"
        "pair: {slm: {path: a}, llm: {path: b}}\ndata: {collect: c}\n",
        encoding="utf-8",
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not (tmp_path / "run").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.kill()


def test_server_that_comes_late_and_leaves_early(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = tmp_path / "runs" / "lossy"
    backend = MlflowBackend(config(output_dir), server.uri)
    now = [0.0]
    tracker = BufferedTracker(backend, output_dir, clock=lambda: now[0])
    tracker.start_experiment(config(output_dir))
    assert one_round(tracker, output_dir, 1, 0.6) is None
    tracker.promote(1)
    assert f"MLflow at {server.uri} cannot be reached" in caplog.text

    server.start()
    now[0] = 60.0
    assert one_round(tracker, output_dir, 2, 0.8) == "2"
    assert not (output_dir / BACKLOG_JSONL).exists()
    client = MlflowClient(tracking_uri=server.uri)
    named = runs_of(client, "lossy")
    assert set(named) == {"lossy", "round-1", "round-2"}
    for number in (1, 2):
        run = named[f"round-{number}"]
        assert run.info.status == "FINISHED"
        assert history(client, run, "train/loss") == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    champion = fetch_router("models:/lossy@champion", tmp_path / "champion", server.uri)
    assert (champion / "router.safetensors").read_bytes() == b"weights 1"
    assert not (tmp_path / "runs" / "mlflow.db").exists()

    server.kill()
    tracker.promote(2)
    tracker.close()
    assert kept_kinds(output_dir) == ["promote", "end"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 3
    assert "cannot be reached" in warnings[1]
    assert "2 tracked entries could not be sent" in warnings[2]


def test_server_that_is_away_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        output_dir = tmp_path / "runs" / "away"
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracker = make_tracker(config(output_dir, uri=uri))
        tracker.start_experiment(config(output_dir))
        assert one_round(tracker, output_dir, 1, 0.6) is None
        tracker.close()
    kinds = kept_kinds(output_dir)
    assert kinds[:2] == ["experiment", "round"]
    assert kinds[-1] == "end"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "could not be sent" in warnings[1]
