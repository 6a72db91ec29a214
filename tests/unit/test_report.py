"""Reports and their claims, on a frontier made up of plausible numbers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from citer_ray.claims import Claim, check_claims
from citer_ray.errors import DataError
from citer_ray.frontier import LLM, SLM, Frontier, MethodCurve, Point
from citer_ray.learned import LearnedPage, ShownResponse
from citer_ray.method_names import method_label
from citer_ray.pass_times import PassTimes
from citer_ray.report import build_report, load_report, write_report
from citer_ray.report_pages import write_learned_page, write_report_page
from citer_ray.report_schema import DraftReport, Report, RoundReport, SpeculationReport, TimedReport
from citer_ray.report_text import claims_table, render_markdown, terminal_table
from citer_ray.router_metrics import ReliabilityBin

SHARES = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3)
CURVES = {
    "random": (0.392, 0.394, 0.398, 0.400, 0.405, 0.421, 0.5),
    "confidence": (0.531, 0.588, 0.650, 0.680, 0.780, 0.890, 0.95),
    "citer_s": (0.697, 0.821, 0.912, 0.963, 0.976, 0.984, 0.985),
    "citer_round_1": (0.620, 0.700, 0.764, 0.830, 0.859, 0.896, 0.96),
    "citer_round_2": (0.703, 0.853, 0.945, 0.976, 0.984, 0.985, 0.985),
}
EXACT = {SLM: (400, 400), LLM: (400, 400)}
ZERO_IS_SLM, ABOVE_ONE_IS_LLM = "threshold_zero_is_slm", "threshold_above_one_is_llm"


def make_point(accuracy: float, share: float, knob: float | None, n: int = 400, seed: int = 0) -> Point:
    """Answers of one difficulty order for all methods, so that they err on much the same examples."""
    rng = np.random.default_rng(seed)
    difficulty = (np.arange(n) + 0.5) / n
    noise = np.random.default_rng(round(1e6 * accuracy)).normal(0, 0.01, n)
    correct = np.argsort(np.argsort(difficulty + noise)) < round(accuracy * n)
    total = rng.integers(40, 80, n)
    llm = np.floor(total * share + rng.random(n)).astype(int).clip(0, total) if 0 < share < 1 else total * int(share)
    answered = correct | (rng.random(n) < 0.9)
    return Point(knob, correct, llm, total, total * 4e5 + llm * 3e6, total * 2e5 + llm * 1e5, answered)


def make_frontier(curves: Mapping[str, Sequence[float]] = CURVES, resamples: int = 200) -> Frontier:
    methods = {
        name: MethodCurve(name, tuple(make_point(a, s, 1 - s) for a, s in zip(accuracies, SHARES, strict=True)))
        for name, accuracies in curves.items()
    }
    if curves is CURVES:
        methods["oracle"] = MethodCurve("oracle", (make_point(0.985, 0.036, None),))
    return Frontier(make_point(0.38, 0.0, None), make_point(0.985, 1.0, None), methods, resamples=resamples)


ROUNDS = [
    RoundReport(
        round=1,
        method="citer_round_1",
        cases={"slm_correct": 8860, "llm_correct": 290, "both_wrong": 850},
        rollouts=850,
        label_mean=0.91,
        fit={"validation_loss": 0.21, "auc": 0.93},
    ),
    RoundReport.model_validate(
        {"round": 2, "method": "citer_round_2", "rollout_threshold": 0.9, "label_flips": 120, "seconds": 12.5}
    ),
]


def make_report(**changes: Any) -> Report:
    arguments: dict[str, Any] = {
        "pair": {"slm": "embedded:slm", "llm": "embedded:llm", "parameters": [107456, 706944]},
        "rounds": ROUNDS,
        "exactness": EXACT,
        "notes": ["Thresholds were chosen on 200 validation examples."],
    }
    return build_report(make_frontier(), **{**arguments, **changes})


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


def changed(**curves: Sequence[float]) -> dict[str, Claim]:
    claims, _ = check_claims(make_frontier({**CURVES, **curves}), exactness=EXACT)
    return {claim.name: claim for claim in claims}


def test_json_has_the_agreed_shape(report: Report, tmp_path: Path) -> None:
    json_path, _ = write_report(report, tmp_path)
    content = json.loads(json_path.read_text(encoding="utf-8"))
    assert content["pair"]["slm"] == "embedded:slm"
    assert content["n"] == 400
    assert list(content["methods"]) == ["slm", "llm", *CURVES, "oracle"]
    for method in content["methods"].values():
        assert 0 <= method["area_interval"][0] <= method["area"] <= method["area_interval"][1] <= 1
        for point in method["points"]:
            needed = {"knob", "llm_share", "accuracy", "gigabytes", "flops", "tokens_per_answer"}
            needed |= {"accuracy_interval", "unanswered", "seconds", "slm_passes", "llm_passes"}
            assert needed == set(point)
            assert point["accuracy_interval"][0] <= point["accuracy"] <= point["accuracy_interval"][1]
    assert [r["round"] for r in content["rounds"]] == [1, 2]
    assert content["rounds"][1]["seconds"] == 12.5
    assert all(isinstance(claim["holds"], bool) for claim in content["claims"])


def test_figures_are_those_of_the_frontier(report: Report) -> None:
    frontier = make_frontier()
    method = report.methods["citer_round_2"]
    assert method.area == frontier.area("citer_round_2").value
    assert [point.llm_share for point in method.points] == sorted(point.llm_share for point in method.points)
    at = {at.llm_share: at for at in method.at_shares}
    expected = frontier.accuracy("citer_round_2", [0.05])[0]
    assert (at[0.05].accuracy, *at[0.05].accuracy_interval) == tuple(expected)
    assert report.methods["slm"].points[0].unanswered == frontier.slm.unanswered > 0
    assert report.methods["slm"].area == pytest.approx(0.38)


def test_cost_of_coming_near_the_llm(report: Report) -> None:
    near = report.methods["citer_round_2"].near_llm
    assert near is not None
    claim = next(claim for claim in report.claims if claim.name == "llm_accuracy_at_small_share")
    assert (near.llm_share.value, near.llm_share.interval) == (claim.value, claim.interval)
    llm = report.methods["llm"].points[0]
    assert near.gigabytes.value < 0.25 * llm.gigabytes
    assert near.flops.interval[0] <= near.flops.value <= near.flops.interval[1]
    assert report.methods["slm"].near_llm is None
    line = next(
        line for line in render_markdown(report).splitlines() if f"| CITER round 2 | {100 * claim.value:.1f}" in line
    )
    assert f"({100 * near.gigabytes.value / llm.gigabytes:.1f} %)" in line


def test_report_reloads_equal(report: Report, tmp_path: Path) -> None:
    json_path, _ = write_report(report, tmp_path)
    assert load_report(json_path) == report


def test_report_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json cannot be read: No such file"):
        load_report(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"n": 0}', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.json does not follow the schema: pair"):
        load_report(tmp_path / "bad.json")


def test_all_claims_hold_on_the_good_frontier(report: Report) -> None:
    assert {claim.name: claim.holds for claim in report.claims} == {
        "beats_random": True,
        "beats_confidence": True,
        "round_2_above_round_1": True,
        "labels_at_least_citer_s": True,
        "llm_accuracy_at_small_share": True,
        "area_above_random": True,
        "area_above_confidence": True,
        "area_above_citer_s": True,
        ZERO_IS_SLM: True,
        ABOVE_ONE_IS_LLM: True,
    }
    assert report.not_checked == []


def test_both_baselines_are_beaten_at_one_and_the_same_share() -> None:
    claims = changed()
    share = claims["beats_random"].measured.split(" at ")[-1]
    assert claims["beats_confidence"].measured.endswith(f" at {share}")
    assert claims["beats_confidence"].value == pytest.approx(0.295, abs=0.01)
    assert claims["beats_random"].value > 0.5


def test_too_small_a_gain_does_not_hold() -> None:
    close = [accuracy - 0.1 for accuracy in CURVES["citer_round_2"]]
    claims = changed(confidence=close)
    assert not claims["beats_confidence"].holds
    assert claims["beats_confidence"].value == pytest.approx(0.1, abs=0.02)
    assert claims["beats_random"].holds


def test_gain_inside_the_interval_holds_but_not_for_certain() -> None:
    claims = changed(confidence=[accuracy - 0.155 for accuracy in CURVES["citer_round_2"]])
    assert claims["beats_confidence"].holds
    assert not claims["beats_confidence"].certain


def test_later_round_must_be_better() -> None:
    claims = changed(citer_round_1=CURVES["citer_round_2"], citer_round_2=CURVES["citer_round_1"])
    assert not claims["round_2_above_round_1"].holds
    assert claims["round_2_above_round_1"].value < 0
    assert not claims["llm_accuracy_at_small_share"].holds
    assert claims["llm_accuracy_at_small_share"].value > 0.15


def test_labelling_must_be_better_somewhere() -> None:
    assert not changed(citer_s=CURVES["citer_round_2"])["labels_at_least_citer_s"].holds


def test_labelling_must_not_be_worse_anywhere() -> None:
    dip = list(CURVES["citer_round_2"])
    dip[4] = 0.85
    claim = changed(citer_round_2=dip)["labels_at_least_citer_s"]
    assert not claim.holds
    assert claim.value > 0
    assert "worst: -12." in claim.measured


def test_best_labelling_may_be_named() -> None:
    frontier = make_frontier({**CURVES, "other": [0.5] * len(SHARES)})
    claims, _ = check_claims(frontier, best="other")
    assert not next(claim for claim in claims if claim.name == "labels_at_least_citer_s").holds


def test_a_single_different_response_breaks_exactness() -> None:
    claims, _ = check_claims(make_frontier(), exactness={SLM: (399, 400), LLM: (0, 0)})
    found = {claim.name: claim for claim in claims}
    assert not found[ZERO_IS_SLM].holds
    assert found[ZERO_IS_SLM].measured == "399 of 400 responses are equal, token for token"
    assert not found[ABOVE_ONE_IS_LLM].holds  # nothing was compared


def test_what_was_not_evaluated_is_said() -> None:
    report = build_report(make_frontier({"citer_round_1": CURVES["citer_round_1"]}), pair={})
    reasons = {missing.name: missing.reason for missing in report.not_checked}
    assert reasons == {
        "beats_random_and_confidence": "not evaluated: random, confidence",
        "round_2_above_round_1": "not evaluated: citer_round_2",
        "labels_at_least_citer_s": "not evaluated: citer_s",
        ZERO_IS_SLM: "responses were not compared",
        ABOVE_ONE_IS_LLM: "responses were not compared",
    }
    assert [claim.name for claim in report.claims] == ["llm_accuracy_at_small_share"]
    assert "Not checked: beats_random_and_confidence (not evaluated: random, confidence)" in render_markdown(report)


def test_report_without_any_routed_method() -> None:
    frontier = Frontier(make_point(0.4, 0.0, None), make_point(0.9, 1.0, None), {}, resamples=10)
    text = render_markdown(build_report(frontier, pair={}))
    assert "## End points" in text
    assert "equal LLM share" not in text
    assert "All hold" not in text


def test_markdown_tables(report: Report) -> None:
    text = render_markdown(report)
    assert "Pair: SLM `embedded:slm` and LLM `embedded:llm`. 400 examples." in text
    assert "![Accuracy against LLM share](frontier.png)" in text
    header = next(line for line in text.splitlines() if line.startswith("| method | 2 % |"))
    assert header == "| method | 2 % | 3 % | 5 % | 7.5 % | 10 % | 15 % | area to 50 % |"
    best = next(line for line in text.splitlines() if line.startswith("| CITER round 2 |"))
    assert best.count("**") == 2 * 7
    assert next(line for line in text.splitlines() if line.startswith("| oracle |")).count("**") == 0
    assert "| SLM only | 38.0 (" in text
    assert "- Thresholds were chosen on 200 validation examples." in text
    assert "| 2 | round 1, threshold 0.9 |" in text
    assert "All hold." in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1


def test_markdown_says_what_does_not_hold() -> None:
    text = render_markdown(make_report(exactness={**EXACT, SLM: (399, 400)}))
    assert "**1 of 10 do not hold.**" in text
    assert "| 399 of 400 responses are equal, token for token | **no** |" in text


def test_terminal_tables(report: Report) -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(terminal_table(report))
    console.print(claims_table(report))
    text = console.export_text()
    assert "7.5 %" in text
    assert "SLM only 38.0 %, LLM only 98.5 %" in text
    row = next(line for line in text.splitlines() if "CITER round 2" in line)
    assert "85." in row
    assert text.count("yes") == 10


def test_equal_bytes_are_parts_of_the_llms(report: Report) -> None:
    frontier = make_frontier()
    method = report.methods["citer_round_2"]
    budget = method.at_budgets[1]
    assert budget.gigabytes == pytest.approx(0.3 * frontier.llm.gigabytes)
    expected = frontier.accuracy("citer_round_2", [budget.gigabytes], axis="gigabytes")[0]
    assert (budget.accuracy, *budget.accuracy_interval) == tuple(expected)
    assert method.area_gigabytes is not None and report.methods["random"].area_gigabytes is not None
    assert method.area_gigabytes > report.methods["random"].area_gigabytes
    assert "## Accuracy at equal bytes moved" in render_markdown(report)


def test_speculation_times_and_what_was_not_run_have_sections() -> None:
    times = PassTimes(slm_pass=0.001, llm_pass=0.004, slm_token=0, llm_token=1e-5, decision=1e-4)
    draft = DraftReport(
        draft_length=4,
        acceptance=0.86,
        tokens_per_llm_pass=3.4,
        gigabytes=1e-3,
        of_llm_only=0.5,
        modelled_break_even=0.31,
    )
    report = make_report(
        speculation=SpeculationReport(
            drafts=[draft],
            cheapest=4,
            method="citer_round_2",
            break_even_share=0.3,
            accuracy_there=0.97,
            llm_accuracy=0.985,
        ),
        pass_times=times,
        timed=[
            TimedReport(method=name, knob=None, responses=3, seconds=s, predicted=s, tokens_per_second=60 / s)
            for name, s in (("llm", 0.2), ("citer_round_2", 0.1))
        ],
        not_run={"r2r": "no labels"},
    )
    text = render_markdown(report)
    assert "| 4 | 86.0 | 3.40 | 0.001 (50.0 %) | 31.0 |" in text
    assert "below an LLM share of 30.0 %; there it answers 97.0 % right, the LLM 98.5 %." in text
    assert "| CITER round 2 |  | 0.1 | 0.1 | 600 | 2.00 |" in text and "4.00 ms a pass of the LLM" in text
    assert "| R2R-style | no labels |" in text


def test_pages_hold_their_data_and_load_nothing(report: Report, tmp_path: Path) -> None:
    """A token that would end the script element does not."""
    page = LearnedPage.build(
        "citer_round_2",
        0.9,
        [
            ShownResponse(
                question="q",
                correct=True,
                tokens=["</script>", "4", "4"],
                by_llm=[True, True, False],
                scores=[0.2, 0.3, 1],
            )
        ],
        shown=1,
        reliability=[ReliabilityBin(positions=5, p_slm=0.9, label=0.8)],
    )
    assert page.llm_share == pytest.approx(2 / 3) and page.accuracy == 1
    assert [(one.token, one.by_llm, one.total) for one in page.most_routed] == [("</script>", 1, 1), ("4", 1, 2)]
    paths = [
        write_report_page(report, tmp_path / "report.html"),
        write_learned_page(page, tmp_path / "learned.html"),
    ]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert text.count("</script>") == 1 and "/*DATA*/" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_labels_of_methods() -> None:
    assert [method_label(name) for name in (SLM, LLM, "citer_round_12", "mine")] == [
        "SLM only",
        "LLM only",
        "CITER round 12",
        "mine",
    ]
