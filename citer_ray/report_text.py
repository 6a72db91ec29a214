"""The report in words: `report.md`, and short tables for the terminal.

Fed by a `Report`; what is written here is shown by the command line and published with results. Accuracies
are in per cent, with the interval behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from citer_ray.claims import NEAR_LLM
from citer_ray.frontier import LLM, ORACLE, SLM
from citer_ray.method_names import method_label
from citer_ray.report_costs_text import not_run_section, speculation_section, timed_section
from citer_ray.report_schema import CostReport, MethodReport, Report, RoundReport, ShareReport
from citer_ray.report_table import table

PLOT_NAME = "frontier.png"
TABLE_SHARES = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15)


def render_markdown(report: Report, plot: str = PLOT_NAME) -> str:
    """`report.md`; `plot` is the picture's path relative to it."""
    sections = [
        _heading(report, plot),
        _share_section(report),
        _end_point_section(report),
        _budget_section(report),
        _near_llm_section(report),
        speculation_section(report),
        _claim_section(report),
        _round_section(report.rounds),
        timed_section(report),
        not_run_section(report),
        _measurement_section(report),
        _point_section(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def terminal_table(report: Report) -> Table:
    """Accuracy at equal LLM shares, one row for each routed method."""
    alone = ", ".join(
        f"{method_label(name)} {_percent(report.methods[name].points[0].accuracy)}"
        for name in (SLM, LLM)
        if name in report.methods
    )
    shares = _table_shares(report)
    table = Table(
        title="Accuracy in % at equal LLM share",
        caption=f"{report.n} examples; {alone}; area: mean up to {_share(report.measurement.max_share)}",
    )
    table.add_column("method", no_wrap=True)
    for share in shares:
        table.add_column(_share(share), justify="right")
    table.add_column("area", justify="right")
    for name, method in _routed(report).items():
        values = [f"{100 * at.accuracy:.1f}" for at in _at(method, shares)]
        table.add_row(method_label(name), *values, f"{100 * method.area:.1f}")
    return table


def claims_table(report: Report) -> Table:
    """What was claimed, and whether it was measured so."""
    table = Table(title="Checked statements")
    table.add_column("holds")
    table.add_column("statement")
    table.add_column("measured")
    for claim in report.claims:
        table.add_row("[green]yes" if claim.holds else "[red]NO", claim.statement, claim.measured)
    for missing in report.not_checked:
        table.add_row("-", missing.name, missing.reason)
    return table


def _heading(report: Report, plot: str) -> str:
    models = " and ".join(f"{role.upper()} `{report.pair[role]}`" for role in (SLM, LLM) if role in report.pair)
    pair = f"Pair: {models}. " if models else ""
    return f"# Accuracy against cost\n\n{pair}{report.n} examples.\n\n![Accuracy against LLM share]({plot})"


def _share_section(report: Report) -> str:
    shares = _table_shares(report)
    routed = _routed(report)
    if not routed:
        return ""
    best = _best_values(report, shares)
    rows = []
    for name, method in routed.items():
        figures = [(at.accuracy, at.accuracy_interval) for at in _at(method, shares)]
        figures.append((method.area, method.area_interval))
        cells = [
            _bold(f"{100 * value:.1f} ({_range(bounds)})", name != ORACLE and value == top)
            for (value, bounds), top in zip(figures, best, strict=True)
        ]
        rows.append([method_label(name), *cells])
    header = [
        "method",
        *(_share(share) for share in shares),
        f"area to {_share(report.measurement.max_share)}",
    ]
    mass = f"{report.measurement.confidence:.0%}".replace("%", " %")
    return (
        "## Accuracy at equal LLM share\n\n"
        f"In per cent, with {mass} bootstrap intervals over examples; the best method in bold (the oracle, "
        "which knows both models' tokens, apart). A value between two measured points is interpolated.\n\n"
        + table(header, rows)
    )


def _end_point_section(report: Report) -> str:
    llm = report.methods.get(LLM)
    rows = []
    for name in (SLM, LLM):
        if name not in report.methods:
            continue
        point = report.methods[name].points[0]
        accuracy = f"{100 * point.accuracy:.1f} ({_range(point.accuracy_interval)})"
        rows.append(
            [
                method_label(name),
                accuracy,
                f"{point.gigabytes:.4g}",
                f"{point.flops / 1e9:.4g}",
                f"{point.tokens_per_answer:.1f}",
                str(point.unanswered),
            ]
        )
    if not rows or llm is None:
        return ""
    header = [
        "method",
        "accuracy",
        "GB per answer",
        "GFLOPs per answer",
        "tokens per answer",
        "without an answer",
    ]
    return "## End points\n\n" + table(header, rows)


def _budget_section(report: Report) -> str:
    """Accuracy at equal bytes moved."""
    routed = {name: method for name, method in _routed(report).items() if method.at_budgets}
    if not routed:
        return ""
    first = next(iter(routed.values())).at_budgets
    header = ["method", *(f"{_share(at.of_llm_only)} ({at.gigabytes:.3g} GB)" for at in first), "area"]
    rows = [
        [
            method_label(name),
            *(f"{100 * at.accuracy:.1f} ({_range(at.accuracy_interval)})" for at in method.at_budgets),
            "" if method.area_gigabytes is None else f"{100 * method.area_gigabytes:.1f}",
        ]
        for name, method in routed.items()
    ]
    return (
        "## Accuracy at equal bytes moved\n\nParts of the bytes that the LLM alone moves; below a method's own "
        "cheapest point its curve runs from the SLM alone. Area: mean from the SLM-only to the LLM-only answer's "
        "bytes.\n\n" + table(header, rows)
    )


def _near_llm_section(report: Report) -> str:
    """What it costs to come near the LLM's accuracy, also as a part of what the LLM alone costs."""
    llm = report.methods[LLM].points[0] if LLM in report.methods else None
    near = {name: method.near_llm for name, method in _routed(report).items() if method.near_llm}
    if llm is None or not near:
        return ""
    rows = [
        [
            method_label(name),
            f"{100 * costs.llm_share.value:.1f} ({_range(costs.llm_share.interval)})",
            f"{costs.gigabytes.value:.4g} ({_relative(costs.gigabytes, llm.gigabytes)})",
            f"{costs.flops.value / 1e9:.4g} ({_relative(costs.flops, llm.flops)})",
            _seconds(costs.seconds, llm.seconds),
        ]
        for name, costs in near.items()
    ]
    header = ["method", "LLM share %", "GB per answer (of LLM only)", "GFLOPs per answer (of LLM only)", "seconds"]
    title = f"## Smallest cost within {100 * NEAR_LLM:g} points of the LLM's accuracy"
    return f"{title}\n\n" + table(header, rows)


def _claim_section(report: Report) -> str:
    rows = [
        [
            claim.statement,
            claim.measured,
            ("yes" if claim.certain else "yes, but not at the interval's other end") if claim.holds else "**no**",
        ]
        for claim in report.claims
    ]
    failed = sum(not claim.holds for claim in report.claims)
    summary = "All hold." if not failed else f"**{failed} of {len(rows)} do not hold.**"
    text = ["## Checked statements"]
    if rows:
        text += [summary, table(["statement", "measured", "holds"], rows)]
    if report.not_checked:
        text.append("Not checked: " + "; ".join(f"{m.name} ({m.reason})" for m in report.not_checked) + ".")
    return "\n\n".join(text)


def _round_section(rounds: Sequence[RoundReport]) -> str:
    if not rounds:
        return ""
    columns: dict[str, list[object]] = {
        "round": [r.round for r in rounds],
        "rollouts' policy": [_rollout_policy(r) for r in rounds],
        "rollouts": [r.rollouts for r in rounds],
        "mean label": [r.label_mean for r in rounds],
        "label flips": [r.label_flips for r in rounds],
        **{f"{case} positions": [r.cases.get(case) for r in rounds] for case in _keys(rounds, "cases")},
        **{name.replace("_", " "): [r.fit.get(name) for r in rounds] for name in _keys(rounds, "fit")},
        "validation area": [r.validation_area for r in rounds],
    }
    used = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    rows = [[_value(value) for value in row] for row in zip(*used.values(), strict=True)]
    return "## Rounds\n\n" + table(list(used), rows)


def _rollout_policy(round_report: RoundReport) -> str:
    if round_report.rollout_threshold is None:
        return "SLM alone"
    return f"round {round_report.round - 1}, threshold {round_report.rollout_threshold:g}"


def _keys(rounds: Sequence[RoundReport], name: str) -> list[str]:
    return list(dict.fromkeys(key for r in rounds for key in getattr(r, name)))


def _measurement_section(report: Report) -> str:
    m = report.measurement
    lines = [
        "LLM share: tokens that the LLM wrote / all tokens, over all responses together.",
        "A curve joins a method's measured points by straight lines in order of LLM share, from the SLM-only "
        "to the LLM-only point. Area: mean accuracy of that curve over LLM shares from 0 to "
        f"{_share(m.max_share)}.",
        f"Intervals: percentile bootstrap, {m.resamples} resamples of the examples (seed {m.seed}), drawn "
        "jointly for all methods; intervals of differences are paired.",
        "GB and FLOPs come from the cost model at batch 1, mean per answer, the router's own included; they "
        "are not measured traffic. A response without an extractable answer counts as wrong.",
        *m.notes,
    ]
    return "## How it was measured\n\n" + "\n".join(f"- {line}" for line in lines)


def _point_section(report: Report) -> str:
    rows = [
        [
            method_label(name),
            "" if point.knob is None else f"{point.knob:.5g}",
            f"{100 * point.llm_share:.2f}",
            f"{100 * point.accuracy:.1f} ({_range(point.accuracy_interval)})",
            f"{point.gigabytes:.4g}",
            f"{point.flops / 1e9:.4g}",
            f"{point.tokens_per_answer:.1f}",
            str(point.unanswered),
            *("" if value is None else f"{value:.3g}" for value in (point.slm_passes, point.llm_passes, point.seconds)),
        ]
        for name, method in report.methods.items()
        for point in method.points
    ]
    header = ["method", "knob", "LLM share %", "accuracy %", "GB", "GFLOPs", "tokens", "without an answer"]
    header += ["SLM passes", "LLM passes", "seconds"]
    return (
        "## All measured points\n\n<details><summary>per answer</summary>\n\n" + table(header, rows) + "\n\n</details>"
    )


def _routed(report: Report) -> dict[str, MethodReport]:
    return {name: method for name, method in report.methods.items() if name not in (SLM, LLM)}


def _table_shares(report: Report) -> list[float]:
    """The shares of the short tables, as far as the report has them."""
    first = next(iter(report.methods.values()), None)
    known = [at.llm_share for at in first.at_shares] if first else []
    return [share for share in TABLE_SHARES if share in known] or known


def _at(method: MethodReport, shares: Sequence[float]) -> list[ShareReport]:
    by_share = {at.llm_share: at for at in method.at_shares}
    return [by_share[share] for share in shares]


def _best_values(report: Report, shares: Sequence[float]) -> list[float]:
    """The best accuracy at each share, and the best area, of all routed methods but the oracle."""
    ranked = [method for name, method in _routed(report).items() if name != ORACLE]
    rows = [[*(at.accuracy for at in _at(method, shares)), method.area] for method in ranked]
    return [max(column) for column in zip(*rows, strict=True)] if rows else [2.0] * (len(shares) + 1)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _range(bounds: tuple[float, float]) -> str:
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def _relative(cost: CostReport, llm: float) -> str:
    return f"{100 * cost.value / llm:.1f} %" if llm else "-"


def _seconds(cost: CostReport | None, llm: float | None) -> str:
    return "" if cost is None or llm is None else f"{cost.value:.3g} ({_relative(cost, llm)})"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _share(value: float) -> str:
    return f"{100 * value:g} %"


def _value(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
