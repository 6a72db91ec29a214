"""The evaluation report: built from a `Frontier`, written to and read from an output folder.

Fed by evaluation; `report.json` and `report.md` are read by people, by the tracker and by tests.
`report_schema` has the fields, `report_text` the words, `plotting` the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import JsonValue, ValidationError

from citer_ray.claims import COMPARED_BUDGETS, COMPARED_SHARES, NEAR_LLM, check_claims
from citer_ray.errors import DataError
from citer_ray.file_replacement import replacing
from citer_ray.frontier import MAX_SHARE, Axis, Frontier, Interval, Point
from citer_ray.pass_times import PassTimes
from citer_ray.report_schema import (
    BudgetReport,
    CostReport,
    Measurement,
    MethodReport,
    NearLlmReport,
    PointReport,
    Report,
    RoundReport,
    ShareReport,
    SpeculationReport,
    TimedReport,
)
from citer_ray.report_text import render_markdown
from citer_ray.storage import storage_path

REPORT_JSON = "report.json"
REPORT_MD = "report.md"


def build_report(
    frontier: Frontier,
    *,
    pair: Mapping[str, JsonValue],
    rounds: Sequence[RoundReport] = (),
    exactness: Mapping[str, tuple[int, int]] | None = None,
    best: str | None = None,
    notes: Sequence[str] = (),
    shares: Sequence[float] = COMPARED_SHARES,
    not_run: Mapping[str, str] | None = None,
    pass_times: PassTimes | None = None,
    timed: Sequence[TimedReport] = (),
    speculation: SpeculationReport | None = None,
) -> Report:
    """Put everything that was measured into one report.

    Args:
        frontier: all methods on the reported examples.
        pair: names, sizes and fingerprints of the models; `slm` and `llm` are shown in the heading.
        rounds: what each round did.
        exactness: see `claims.check_claims`.
        best: see `claims.check_claims`.
        notes: sentences on how it was measured.
        shares: LLM shares at which all methods are compared.
        not_run: methods that could not run, and why.
        pass_times: what passes took.
        timed: responses that were decoded alone.
        speculation: exact speculation against routing.
    """
    claims, not_checked = check_claims(frontier, exactness=exactness, best=best)
    return Report(
        pair=dict(pair),
        n=frontier.num_examples,
        methods={name: _method(frontier, name, shares) for name in frontier.methods},
        rounds=list(rounds),
        claims=claims,
        not_checked=not_checked,
        measurement=Measurement(
            resamples=frontier.resamples,
            seed=frontier.seed,
            confidence=frontier.confidence,
            max_share=MAX_SHARE,
            notes=list(notes),
        ),
        not_run=dict(not_run or {}),
        pass_times=pass_times,
        timed=list(timed),
        speculation=speculation,
    )


def write_report(report: Report, output_dir: str | Path) -> tuple[Path, Path]:
    """Write `report.json` and `report.md`, and return their paths."""
    folder = storage_path(output_dir)
    json_path, markdown_path = folder / REPORT_JSON, folder / REPORT_MD
    with replacing(json_path) as temporary:
        temporary.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    with replacing(markdown_path) as temporary:
        temporary.write_text(render_markdown(report), encoding="utf-8")
    return json_path, markdown_path


def load_report(path: str | Path) -> Report:
    """Read a `report.json`.

    Raises:
        DataError: it does not exist or does not follow the schema.
    """
    path = storage_path(path)
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"report {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"report {path} does not follow the schema: {where}: {first['msg']}") from None


def _method(frontier: Frontier, name: str, shares: Sequence[float]) -> MethodReport:
    area, area_gigabytes = frontier.area(name), frontier.area_between(name, "gigabytes")
    budgets = [part * frontier.llm.gigabytes for part in COMPARED_BUDGETS]
    return MethodReport(
        points=[_point(point, frontier.point_accuracy(point)) for point in frontier.points(name)],
        area=area.value,
        area_interval=(area.low, area.high),
        at_shares=[
            ShareReport(llm_share=share, accuracy=at.value, accuracy_interval=(at.low, at.high))
            for share, at in zip(shares, frontier.accuracy(name, shares), strict=True)
        ],
        at_budgets=[
            BudgetReport(of_llm_only=part, gigabytes=budget, accuracy=at.value, accuracy_interval=(at.low, at.high))
            for part, budget, at in zip(
                COMPARED_BUDGETS, budgets, frontier.accuracy(name, budgets, axis="gigabytes"), strict=True
            )
        ],
        area_gigabytes=area_gigabytes.value,
        area_gigabytes_interval=(area_gigabytes.low, area_gigabytes.high),
        near_llm=_near_llm(frontier, name),
    )


def _near_llm(frontier: Frontier, name: str) -> NearLlmReport | None:
    axes: list[Axis] = ["llm_share", "gigabytes", "flops"]
    if frontier.llm.seconds is not None:
        axes.append("seconds")
    costs = {axis: frontier.cost_within(name, NEAR_LLM, axis=axis) for axis in axes}
    if not np.isfinite(list(costs.values())).all():
        return None
    near = {axis: CostReport(value=cost.value, interval=(cost.low, cost.high)) for axis, cost in costs.items()}
    return NearLlmReport(**near)


def _point(point: Point, accuracy: Interval) -> PointReport:
    return PointReport(
        knob=point.knob,
        llm_share=point.llm_share,
        accuracy=accuracy.value,
        gigabytes=point.gigabytes,
        flops=point.flops,
        tokens_per_answer=point.tokens_per_answer,
        accuracy_interval=(accuracy.low, accuracy.high),
        unanswered=point.unanswered,
        seconds=point.mean_seconds,
        slm_passes=None if point.passes is None else point.passes[0],
        llm_passes=None if point.passes is None else point.passes[1],
    )
