"""Sections of `report.md` on what routing is weighed against: speculation, wall times, and what could not run."""

from __future__ import annotations

from citer_ray.method_names import method_label
from citer_ray.report_schema import Report, SpeculationReport
from citer_ray.report_table import table


def speculation_section(report: Report) -> str:
    """Why not just speculate."""
    found = report.speculation
    if found is None:
        return ""
    rows = [
        [
            str(draft.draft_length),
            f"{100 * draft.acceptance:.1f}",
            f"{draft.tokens_per_llm_pass:.2f}",
            f"{draft.gigabytes:.4g} ({100 * draft.of_llm_only:.1f} %)",
            f"{100 * draft.modelled_break_even:.1f}",
        ]
        for draft in found.drafts
    ]
    header = ["draft length", "acceptance %", "tokens per LLM pass", "GB per answer (of LLM only)", "break-even %"]
    return (
        "## Why not just speculate?\n\nExact speculative decoding gives the LLM's answers. Routing pays only where it "
        f"moves less.\n\n{table(header, rows)}\n\nBreak-even share: below it, routing with evenly spread visits moves "
        f"fewer bytes, by the closed forms in docs/evaluation.md.{_break_even(found)}\n\n"
        "![Break-even share against acceptance](speculation.png)"
    )


def _break_even(found: SpeculationReport) -> str:
    if found.method is None or found.break_even_share is None or found.accuracy_there is None:
        return ""
    return (
        f" Measured, {method_label(found.method)} moves fewer bytes than speculation with drafts of {found.cheapest} "
        f"below an LLM share of {100 * found.break_even_share:.1f} %; there it answers "
        f"{100 * found.accuracy_there:.1f} % right, the LLM {100 * found.llm_accuracy:.1f} %."
    )


def timed_section(report: Report) -> str:
    """Responses that were decoded alone."""
    if not report.timed:
        return ""
    llm = next((one.seconds for one in report.timed if one.method == "llm"), None)
    rows = [
        [
            method_label(one.method),
            "" if one.knob is None else f"{one.knob:.4g}",
            f"{one.seconds:.3g}",
            f"{one.predicted:.3g}",
            f"{one.tokens_per_second:.0f}",
            "" if not llm else f"{llm / one.seconds:.2f}",
        ]
        for one in report.timed
    ]
    header = ["method", "knob", "seconds measured", "seconds from its passes", "tokens/s", "speed (LLM only is 1)"]
    times = report.pass_times
    parts = (
        ""
        if times is None
        else f" Fitted to all of them: {1e3 * times.slm_pass:.2f} ms a pass of the SLM, {1e3 * times.llm_pass:.2f} ms "
        f"a pass of the LLM, {1e3 * times.slm_token:.3f} and {1e3 * times.llm_token:.3f} ms for each further token "
        f"that a pass reads, {1e3 * times.decision:.3f} ms a decision of a router."
    )
    count = report.timed[0].responses
    return (
        f"## Wall time\n\nOne response at a time, {count} responses of one setting of each method, on the machine that "
        f"measured.{parts} All other wall times of this report come from these pass times.\n\n" + table(header, rows)
    )


def not_run_section(report: Report) -> str:
    """Methods that could not run, and why."""
    if not report.not_run:
        return ""
    rows = [[method_label(name), reason] for name, reason in report.not_run.items()]
    return "## Not run\n\n" + table(["method", "why"], rows)
