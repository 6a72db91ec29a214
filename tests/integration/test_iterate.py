"""The whole loop on the embedded pair: report, MLflow, resuming, and what a command says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.frontier import CITER_S, CONFIDENCE, LLM, ORACLE, RANDOM, SLM
from citer_ray.on_ray.experiment import Experiment
from citer_ray.report import load_report
from citer_ray.report_schema import Report
from citer_ray.router_artifact import load_router

pytestmark = pytest.mark.ray
SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def run(config: CiterConfig) -> Report:
    with Experiment.start(config, ["test"]) as experiment:
        return experiment.iterate()


def rounded(report: Report) -> object:
    """The report without wall times, its floats to 5 digits: thresholds are quantiles of float32 scores."""
    values = json.loads(report.model_dump_json(), parse_float=lambda text: round(float(text), 5))
    return untimed({key: value for key, value in values.items() if key not in ("pass_times", "timed")})


def untimed(value: Any) -> Any:
    """A value of JSON without anything in seconds, which is measured anew each time."""
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if "seconds" not in key}
    return [untimed(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CiterConfig:
    return load_config(SMOKE, [f"output_dir={tmp_path_factory.mktemp('iterate') / 'run'}"])


@pytest.fixture(scope="module")
def report(ray_session: None, config: CiterConfig) -> Report:
    return run(config)


def test_report_has_every_method_and_exact_ends(report: Report, config: CiterConfig) -> None:
    folder = Path(config.output_dir)
    methods = {SLM, LLM, RANDOM, CONFIDENCE, CITER_S, ORACLE, "citer_round_1", "citer_round_2"}
    assert set(report.methods) == methods
    assert report.n == 40 and [one.round for one in report.rounds] == [1, 2]
    ends = [claim for claim in report.claims if "exactly" in claim.statement]
    assert len(ends) == 2 and all(claim.holds for claim in ends)
    assert load_report(folder / "report.json") == report
    assert (folder / "frontier.png").stat().st_size > 10_000
    assert "CITER round 2" in (folder / "report.md").read_text(encoding="utf-8")
    slm, llm = report.methods[SLM].points[0], report.methods[LLM].points[0]
    assert slm.accuracy < llm.accuracy and slm.gigabytes < llm.gigabytes
    for point in report.methods["citer_round_2"].points:
        assert 0 < point.llm_share < 1
        assert slm.gigabytes < point.gigabytes < llm.gigabytes


def test_routers_carry_their_calibration(report: Report, config: CiterConfig) -> None:
    for name in ("round-1", "round-2", CITER_S):
        _, metadata = load_router(Path(config.output_dir) / "routers" / name, slm_fingerprint=None)
        shares = [point.llm_share for point in metadata.calibration.points]
        assert len(shares) == 2 and shares == sorted(shares)
        assert metadata.calibration.threshold_for(0.1) > 0
        assert metadata.metrics is not None and metadata.metrics.auc is not None


def test_mlflow_has_one_run_a_round_and_a_champion(report: Report, config: CiterConfig) -> None:
    store = Path(config.output_dir).parent / "mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}")
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    nested = [one for one in runs if "mlflow.parentRunId" in one.data.tags]
    assert len(runs) == 3 and len(nested) == 2
    assert all(one.info.status == "FINISHED" for one in runs)
    assert all(one.data.metrics["validation/area"] > 0 for one in nested)
    for one in nested:
        shares = [metric.value for metric in client.get_metric_history(one.info.run_id, "frontier/llm_share")]
        assert len(shares) >= 2 and all(0 <= share <= 1 for share in shares)
        epochs = [metric.step for metric in client.get_metric_history(one.info.run_id, "validation/loss")]
        assert sorted(set(epochs)) == list(range(1, max(epochs) + 1))
    assert int(client.get_model_version_by_alias(config.name, "champion").version) in (1, 2)


def test_a_finished_iteration_repeats_nothing(report: Report, config: CiterConfig) -> None:
    folder = Path(config.output_dir)
    files = {path: path.stat().st_mtime_ns for path in folder.glob("labels/*/part-*.parquet")}
    again = run(config)
    assert rounded(again) == rounded(report)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("labels/*/part-*.parquet")} == files
    test_mlflow_has_one_run_a_round_and_a_champion(again, config)


def test_run_yaml_reproduces_the_configuration(report: Report, config: CiterConfig) -> None:
    folder = Path(config.output_dir)
    assert load_config(folder / "run.yaml", []) == config
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["argv"] == ["test"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "-c", "no/such.yaml"], "no/such.yaml"),
        (["collect", "-c", str(SMOKE), "collect.max_tokens=3"], "collect.max_tokens"),
        (["collect", "-c", str(SMOKE), "pair.llm.path=no/model"], "no/model"),
        (["collect", "-c", str(SMOKE), "data.collect=no/data.jsonl"], "no/data.jsonl"),
        (["collect", "-c", str(SMOKE), "output_dir=/proc/nowhere"], "output_dir /proc/nowhere"),
        (["collect", "-c", str(SMOKE), "collect.rollouts.num_cpus=64"], "collect needs"),
        (["fit", "-c", str(SMOKE), "--labels", "round-7"], "run collect first"),
        (["decode", "-c", str(SMOKE), "hello"], "--router"),
    ],
)
def test_a_users_error_is_one_message_and_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    settings = [] if any("output_dir" in one for one in arguments) else [f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "citer_ray.cli", *arguments]
    if arguments[0] != "decode":  # which takes settings by --set alone
        command += [*settings, "tracking.enabled=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr
