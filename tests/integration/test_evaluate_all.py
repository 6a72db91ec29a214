"""`citer evaluate --methods all` on the embedded pair: every method runs, exact ones are exact, files are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.frontier import LLM, SLM
from citer_ray.method_names import CITER, LABELS, SPECULATIVE
from citer_ray.methods import TRAINED
from citer_ray.on_ray.evaluation_stage import REPORT_FILES
from citer_ray.on_ray.experiment import Experiment
from citer_ray.report import load_report
from citer_ray.report_schema import Report
from citer_ray.router_artifact import read_metadata

pytestmark = pytest.mark.ray
SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
SETTINGS = [
    "data.test_limit=12",
    "data.validation_limit=12",
    "baselines.examples=30",
    "iterate.max_rounds=1",
    "evaluate.quantiles=[0.5]",
    "evaluate.draft_lengths=[2, 4]",
    "evaluate.llm_shares=[0.1, 0.3]",
    "evaluate.timed_examples=1",
    "evaluate.shown_examples=3",
    "evaluate.bootstrap_samples=50",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CiterConfig:
    return load_config(SMOKE, [f"output_dir={tmp_path_factory.mktemp('evaluate') / 'run'}", *SETTINGS])


@pytest.fixture(scope="module")
def report(ray_session: None, config: CiterConfig) -> Report:
    """Round 1 and CITER-S, then everything."""
    with Experiment.start(config, ["test"]) as experiment:
        experiment.collect(1)
        for name in ("round-1", "citer_s"):
            experiment.fit(name)
    everything = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"methods": ("all",)})})
    with Experiment.start(everything, ["test"]) as experiment:
        return experiment.evaluate_and_track()


def test_every_method_ran(report: Report) -> None:
    assert set(report.methods) == {*LABELS, "citer_round_1"} and CITER not in report.methods
    assert report.not_run == {} and report.n == 12
    llm = report.methods[LLM].points[0]
    for name, method in report.methods.items():
        for point in method.points:
            assert point.seconds is not None and point.seconds > 0, name
            assert point.slm_passes or point.llm_passes, name
            assert 0 <= point.llm_share <= 1 and point.gigabytes < 3 * llm.gigabytes


def test_exact_methods_are_exact(report: Report) -> None:
    exact = {claim.name: claim for claim in report.claims if claim.interval is None}
    assert {claim.name for claim in exact.values() if claim.holds} == set(exact) and len(exact) == 3
    assert all(point.accuracy == report.methods[LLM].points[0].accuracy for point in report.methods[SPECULATIVE].points)
    assert report.speculation is not None
    assert [draft.draft_length for draft in report.speculation.drafts] == [2, 4]
    for draft in report.speculation.drafts:
        assert 0 < draft.acceptance < 1 and 1 < draft.tokens_per_llm_pass < draft.draft_length + 1


def test_costs_are_those_of_what_ran(report: Report) -> None:
    slm, llm = (report.methods[name].points[0] for name in (SLM, LLM))
    for point in report.methods["cascade_sum"].points:
        assert slm.gigabytes <= point.gigabytes <= slm.gigabytes + llm.gigabytes
        assert point.slm_passes == pytest.approx(slm.slm_passes)
    for point in report.methods["citer_round_1"].points:
        assert point.llm_passes == pytest.approx(point.llm_share * point.tokens_per_answer)


def test_routers_of_other_methods_were_fitted_with_their_own_shape(report: Report, config: CiterConfig) -> None:
    routers = Path(config.output_dir) / "routers"
    shapes = {name: read_metadata(routers / name) for name in TRAINED}
    assert shapes["routellm"].architecture.widths == () and shapes["collm"].architecture.widths == ()
    assert shapes["r2r"].architecture.features == ("hidden", "top_logits", "token_embedding")
    hidden_size = read_metadata(routers / "round-1").hidden_size
    assert shapes["r2r"].hidden_size > 2 * hidden_size and shapes["collm"].hidden_size == hidden_size


def test_files_are_whole_and_need_nothing_else(report: Report, config: CiterConfig) -> None:
    folder = Path(config.output_dir)
    for name in REPORT_FILES:
        assert (folder / name).stat().st_size > 2000, name
    assert load_report(folder / "report.json") == report
    for name in ("report.html", "learned.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert "/*DATA*/" not in page and "</html>" not in page.split("<script>")[1].split("</script>")[0]
        assert not re.search(r"(src|href)=\"(https?:)?//|@import|url\(", page)
    assert "Why not just speculate?" in (folder / "report.md").read_text(encoding="utf-8")
