"""A run in an object store, against a real S3 server: the results of a local run, resuming, and one-line errors."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from botocore.session import get_session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError
from citer_ray.label_store import LabelStore
from citer_ray.on_ray.experiment import Experiment
from citer_ray.on_ray.serve_routers import router_source
from citer_ray.preparation import prepare
from citer_ray.report import load_report
from citer_ray.report_schema import Report
from citer_ray.router_artifact import read_metadata
from citer_ray.storage import storage_path
from citer_ray.training import RouterFit
from citer_ray.training_data import stored_data
from citer_ray.training_plan import make_plan
from tests.integration.test_iterate import rounded
from tests.integration.test_ray_train import CONFIG, WINDOW, KillOnce, assert_same_fit, fit_on_ray
from tests.planted_labels import write_planted_labels

pytestmark = pytest.mark.ray
SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
SMALL = ["data.collect_limit=16", "data.validation_limit=8", "data.test_limit=8", "collect.examples_per_chunk=4"]
SMALL += ["iterate.max_rounds=1", "iterate.citer_s=false", "evaluate.timed_examples=0", "tracking.enabled=false"]
RUN = "s3://bucket/runs/one"


@pytest.fixture(scope="module", autouse=True)
def bucket(s3_socket: socket.socket) -> Iterator[None]:
    """An S3 server with one bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, fd=s3_socket.fileno())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    get_session().create_client("s3").create_bucket(Bucket="bucket")
    yield
    server.shutdown()
    thread.join()


def config(output_dir: str | Path) -> CiterConfig:
    return load_config(SMOKE, [f"output_dir={output_dir}", *SMALL])


def run(output_dir: str | Path) -> Report:
    with Experiment.start(config(output_dir), ["test"]) as experiment:
        return experiment.iterate()


@pytest.fixture(scope="module")
def local(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "one"
    run(folder)
    return folder


@pytest.fixture(scope="module")
def remote(ray_session: None) -> Path:
    run(RUN)
    return storage_path(RUN)


def assert_same_results(local: Path, remote: Path) -> None:
    here, there = (LabelStore(root / "labels" / "round-1") for root in (local, remote))
    assert here.read_rows().equals(there.read_rows())
    assert here.read_manifest().digest() == there.read_manifest().digest()
    # With the digest of the weights.
    assert read_metadata(local / "routers" / "round-1") == read_metadata(remote / "routers" / "round-1")
    assert rounded(load_report(local / "report.json")) == rounded(load_report(remote / "report.json"))


def modified() -> dict[str, str]:
    """When each file of the run was written."""
    return {name: str(info["LastModified"]) + info["ETag"] for name, info in objects().items()}


def objects() -> dict[str, dict[str, object]]:
    found = fsspec.filesystem("s3", use_listings_cache=False).find(RUN, detail=True)
    return {name.removeprefix(f"{RUN.removeprefix('s3://')}/"): info for name, info in found.items()}


def test_a_run_at_s3_gives_what_a_local_run_gives(local: Path, remote: Path) -> None:
    assert_same_results(local, remote)
    assert set(objects()) == {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()}
    assert (remote / "frontier.png").stat().st_size > 10_000
    provenance = (remote / "provenance.json").read_text(encoding="utf-8")
    assert json.loads(provenance)["argv"] == ["test"] and "AWS" not in provenance
    assert f"output_dir: {RUN}" in (remote / "run.yaml").read_text(encoding="utf-8")


def test_a_run_at_s3_goes_on_where_it_was_cut(local: Path, remote: Path) -> None:
    before = modified()
    cut = ("labels/round-1/manifest.json", "labels/round-1/part-00001.parquet", "routers/round-1/router.json")
    for name in cut:
        (remote / name).unlink()
    run(RUN)
    assert_same_results(local, remote)
    after = modified()
    anew = {name for name in after if after[name] != before.get(name)}
    assert set(cut) <= anew
    assert not [name for name in anew if name.startswith("evaluation/")], "measured again"
    assert {name for name in anew if name.startswith("labels/")} == set(cut[:2])


def test_a_killed_fit_goes_on_from_its_checkpoint_at_s3(ray_session: None) -> None:
    storage = storage_path("s3://bucket/fits")
    labels = write_planted_labels(storage_path("s3://bucket/planted"))
    settings = CONFIG.model_copy(update={"max_epochs": 20, "patience": 20})
    kill = KillOnce()
    result = fit_on_ray(labels, storage, settings, progress=kill, checkpoint_every_s=0.0)
    assert [record.epoch for record in result.history] == list(range(1, 21))
    assert len(kill.killed) == 1 and len(kill.records) < 30, "the fit started from scratch"
    plan = make_plan(labels, validation_fraction=0.25, window_positions=WINDOW, seed=0)
    assert_same_fit(result, RouterFit(stored_data(labels, plan), settings, seed=0))
    assert not storage.exists(), "a finished fit leaves nothing in the storage"


def test_a_router_at_s3_is_served_from_a_copy_beside_it(remote: Path) -> None:
    settings = config(RUN)
    serve = settings.serve.model_copy(update={"router": f"{RUN}/routers/round-1"})
    slm = read_metadata(remote / "routers" / "round-1").fingerprint.slm
    source = router_source(settings.model_copy(update={"serve": serve}), slm)
    assert source.stamp() == source.stamp()
    served = source.load().current
    assert served is not None and served.ref.source.startswith(f"{RUN}/served_routers/round-1-")
    assert read_metadata(served.ref.source) == read_metadata(remote / "routers" / "round-1")


def test_a_bucket_that_is_not_there_is_one_message_and_is_not_made() -> None:
    with pytest.raises(ConfigError, match=r"s3://nowhere/run cannot be written: .*check the bucket's name") as caught:
        prepare(config("s3://nowhere/run"))
    assert "\n" not in str(caught.value)
    assert [one["Name"] for one in get_session().create_client("s3").list_buckets()["Buckets"]] == ["bucket"]


def test_missing_credentials_are_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"cannot be written: .*credentials.*AWS_ACCESS_KEY_ID"):
        prepare(config("s3://bucket/run"))
    S3FileSystem.clear_instance_cache()
