"""Collection on Ray: the same labels as in one process, after a kill too; bad rows and foreign folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import ray.data
from rich.console import Console

from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config
from citer_ray.errors import DataError
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelStore
from citer_ray.on_ray.collect import run_collection
from citer_ray.on_ray.session import unwrapped_errors
from citer_ray.preparation import Prepared, engine_spec, load_purpose, prepare
from citer_ray.stage_tables import labels_table
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


def start(config: CiterConfig, folder: Path) -> subprocess.Popen[str]:
    """`citer collect` in a process of its own, with a Ray of its own."""
    (folder / "run.yaml").write_text(dump_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "citer_ray.cli", "collect", "--config", str(folder / "run.yaml")]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def wait_until(found: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Poll for what another process does."""
    deadline = time.monotonic() + 300
    while not found():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail("it ended, or took too long")
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_stopped_collection_goes_on_and_ends_alike(ray_session: None, tmp_path: Path, number: signal.Signals) -> None:
    config = smoke(tmp_path / "stopped")
    process = start(config, tmp_path)
    store = LabelStore(tmp_path / "stopped" / "labels" / "round-1")
    wait_until(store.done_chunks, process)
    # After SIGKILL, Ray's agents look for its server for about a minute before they end, too.
    rays = [one for one in family(process) if number == signal.SIGTERM or "Agent" not in title(one)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=400)
    if number == signal.SIGTERM:
        assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors, errors
    _, left = psutil.wait_procs(rays, timeout=60)
    assert rays and not left, f"processes of Ray stay: {left}"
    assert not store.is_complete()
    digest = store.digest()
    assert digest is not None
    prepared = prepare(config)
    resumed = collect(prepared, digest=digest)
    assert resumed.equals(label_here(prepared))


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    """The writer may not make files beyond a few bytes: the system's answer differs in its words alone (EFBIG)."""
    process = start(smoke(tmp_path / "full"), tmp_path)

    def limited() -> bool:
        writers = [one for one in family(process) if "DecideWorker" in title(one)]
        for one in writers:
            one.rlimit(psutil.RLIMIT_FSIZE, (512, 512))
        return bool(writers)

    wait_until(limited, process)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 2, errors
    said = " ".join(errors.split())
    assert "cannot write" in said and "free space" in said and "Traceback" not in errors, errors


def test_bad_rows_are_set_aside_with_their_reasons(ray_session: None, tmp_path: Path) -> None:
    """Two of forty: a line that is no JSON, and a row without a rationale."""
    rows = [
        {"id": str(n), "question": f"Tom has {n} apples.", "solution": f"It is \\boxed{{{n}}}", "answer": str(n)}
        for n in range(40)
    ]
    lines = [json.dumps(row) for row in rows]
    lines[2] = lines[2][:-4]
    lines[34] = json.dumps({**rows[34], "solution": ""})
    source = tmp_path / "examples.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prepared = prepare(
        smoke(tmp_path / "out", f"data.collect={source}", "data.collect_limit=null", "collect.examples_per_chunk=20")
    )
    labels = collect(prepared)
    assert labels["example_id"].to_pylist() == [str(n) for n in range(40) if n not in (2, 34)]
    kept = [json.loads(line) for line in prepared.workspace.quarantine("collect").read_text().splitlines()]
    assert [one["row"] for one in kept] == [3, 35] and all(one["reason"] for one in kept)
    manifest = LabelStore(prepared.workspace.labels("round-1")).read_manifest()
    assert (manifest.examples, manifest.quarantined) == (38, 2)
    console = Console(width=100)
    with console.capture() as summary:
        console.print(labels_table(1, manifest))
    assert "38 (2 set aside)" in summary.get()


def test_a_workers_error_arrives_as_itself(ray_session: None) -> None:
    def full(batch: dict[str, object]) -> dict[str, object]:
        raise DataError("cannot write part-00003.parquet: no space left")

    with pytest.raises(DataError, match=r"^cannot write part-00003\.parquet: no space left"), unwrapped_errors():
        ray.data.range(4).map_batches(full).materialize()
