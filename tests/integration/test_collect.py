"""Collection on Ray: the same labels as in one process, after a kill too; bad rows and foreign folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import ray.data

from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config
from citer_ray.errors import DataError
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelStore
from citer_ray.on_ray.collect import run_collection
from citer_ray.on_ray.session import unwrapped_errors
from citer_ray.preparation import Prepared, engine_spec, load_purpose, prepare
from tests.integration.labels_here import labels_here

pytestmark = pytest.mark.ray
SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def smoke(folder: Path, *overrides: str) -> CiterConfig:
    return load_config(
        SMOKE,
        [
            f"output_dir={folder}",
            "tracking.enabled=false",
            "data.collect_limit=20",
            "collect.examples_per_chunk=4",
            *overrides,
        ],
    )


def label_here(prepared: Prepared) -> pa.Table:
    return pa.concat_tables(rows_to_table(rows, rows[0].hidden.shape[1]) for rows in labels_here(prepared))


def collect(prepared: Prepared, digest: str = "d") -> pa.Table:
    examples = load_purpose(prepared, "collect")
    run_collection(prepared, engine_spec(prepared), examples, name="round-1", digest=digest)
    return LabelStore(prepared.workspace.labels("round-1")).read_rows()


def test_ray_gives_the_labels_of_one_process_bit_for_bit(ray_session: None, tmp_path: Path) -> None:
    prepared = prepare(smoke(tmp_path))
    labels = collect(prepared)
    assert labels.equals(label_here(prepared))
    manifest = LabelStore(prepared.workspace.labels("round-1")).read_manifest()
    assert manifest.examples == 20
    assert manifest.positions == sum(manifest.cases.values()) == manifest.labels
    assert manifest.rollouts > 0 and manifest.quarantined == 0
    with pytest.raises(DataError, match="another configuration"):
        collect(prepared, digest="other")


def test_a_killed_collection_goes_on_and_ends_alike(ray_session: None, tmp_path: Path) -> None:
    config = smoke(tmp_path / "killed")
    (tmp_path / "run.yaml").write_text(dump_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "citer_ray.cli", "collect", "--config", str(tmp_path / "run.yaml")]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    store = LabelStore(tmp_path / "killed" / "labels" / "round-1")
    deadline = time.monotonic() + 300
    while not store.done_chunks() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)  # polling for a file that another process writes
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.done_chunks(), "the collection wrote nothing before it was killed"
    assert not store.is_complete()
    digest = store.digest()
    assert digest is not None
    prepared = prepare(config)
    resumed = collect(prepared, digest=digest)
    assert resumed.equals(label_here(prepared))


def test_bad_rows_are_set_aside_with_their_reasons(ray_session: None, tmp_path: Path) -> None:
    rows = [
        {"id": str(n), "question": f"Tom has {n} apples.", "solution": f"It is \\boxed{{{n}}}", "answer": str(n)}
        for n in range(6)
    ]
    lines = [json.dumps(row) for row in rows]
    lines[2] = lines[2][:-4]
    lines[4] = json.dumps({**rows[4], "solution": ""})
    source = tmp_path / "examples.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prepared = prepare(smoke(tmp_path / "out", f"data.collect={source}"))
    labels = collect(prepared)
    assert labels["example_id"].to_pylist() == ["0", "1", "3", "5"]
    kept = [json.loads(line) for line in prepared.workspace.quarantine("collect").read_text().splitlines()]
    assert [one["row"] for one in kept] == [3, 5]
    assert LabelStore(prepared.workspace.labels("round-1")).read_manifest().quarantined == 2


def test_a_workers_error_arrives_as_itself(ray_session: None) -> None:
    def full(batch: dict[str, object]) -> dict[str, object]:
        raise DataError("cannot write part-00003.parquet: no space left")

    with pytest.raises(DataError, match=r"^cannot write part-00003\.parquet: no space left"), unwrapped_errors():
        ray.data.range(4).map_batches(full).materialize()
