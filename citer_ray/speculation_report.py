"""What was measured of exact speculation, and how long single responses took beside what pass times predict.

Fed by the rows of an evaluation; part of `report.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from citer_ray.break_even import BreakEven
from citer_ray.evaluation import Setting
from citer_ray.frontier import Frontier, citer_method, citer_rounds
from citer_ray.method_names import SPECULATIVE
from citer_ray.pass_times import PassTimes
from citer_ray.report_schema import DraftReport, SpeculationReport, TimedReport


def speculation_report(
    frontier: Frontier, rows: pa.Table, settings: Sequence[Setting], typical: BreakEven
) -> SpeculationReport | None:
    """Acceptance and bytes of every draft length, and where routing begins to move fewer; None if it was not run."""
    drafts = []
    for index, setting in enumerate(settings):
        if setting.method != SPECULATIVE or setting.knob is None:
            continue
        own = rows.filter(pa.compute.equal(rows["setting"], index)).to_pandas()
        acceptance = float(own["accepted"].sum() / max(1, own["judged"].sum()))
        drafts.append(
            DraftReport(
                draft_length=int(setting.knob),
                acceptance=acceptance,
                tokens_per_llm_pass=float(own["tokens"].sum() / own["llm_passes"].sum()),
                gigabytes=float(own["bytes"].mean() / 1e9),
                of_llm_only=float(own["bytes"].mean() / 1e9 / frontier.llm.gigabytes),
                modelled_break_even=typical.share(acceptance, int(setting.knob)),
            )
        )
    if not drafts:
        return None
    cheapest = min(drafts, key=lambda draft: draft.gigabytes)
    rounds = citer_rounds(frontier.methods)
    method = citer_method(rounds[-1]) if rounds else None
    share = None if method is None else _measured_share(frontier, method, cheapest.gigabytes)
    accuracy = None if method is None or share is None else frontier.accuracy(method, [share])[0].value
    return SpeculationReport(
        drafts=drafts,
        cheapest=cheapest.draft_length,
        method=method,
        break_even_share=share,
        accuracy_there=accuracy,
        llm_accuracy=frontier.llm.accuracy,
    )


def _measured_share(frontier: Frontier, method: str, gigabytes: float) -> float:
    """The LLM share at which a method moves as many bytes, between its measured points."""
    knots = sorted(
        (point.gigabytes, point.llm_share) for point in (frontier.slm, *frontier.points(method), frontier.llm)
    )
    return float(np.interp(gigabytes, [cost for cost, _ in knots], [share for _, share in knots]))


def timed_report(
    timed: Sequence[Mapping[str, Any]], settings: Sequence[Setting], times: PassTimes
) -> list[TimedReport]:
    """For every timed setting, seconds a response as measured and as its passes predict."""
    found = []
    for index in dict.fromkeys(row["setting"] for row in timed):
        own = [row for row in timed if row["setting"] == index]
        columns = {name: np.array([row[name] for row in own]) for name in own[0] if name != "example_id"}
        found.append(
            TimedReport(
                method=settings[index].method,
                knob=settings[index].knob,
                responses=len(own),
                seconds=float(columns["seconds"].mean()),
                predicted=float(times.seconds(columns).mean()),
                tokens_per_second=float(columns["tokens"].sum() / columns["seconds"].sum()),
            )
        )
    return found
