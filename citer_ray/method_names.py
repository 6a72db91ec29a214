"""Names of all methods of an evaluation, and how they are shown to people; `methods.py` says what they do."""

from __future__ import annotations

from citer_ray.frontier import CITER_S, CONFIDENCE, LLM, ORACLE, RANDOM, SLM, citer_rounds

ENTROPY, MARGIN = "entropy", "margin"
ROUTELLM, COLLM, R2R = "routellm", "collm", "r2r"
CASCADE_SUM, CASCADE_AVERAGE, CASCADE_QUANTILE = "cascade_sum", "cascade_average", "cascade_quantile"
FASTER_CHOW, FASTER_DIFF, FASTER_OPT, FASTER_TOKEN_V3 = "faster_chow", "faster_diff", "faster_opt", "faster_token_v3"
SPECULATIVE, SPECULATIVE_LOSSY = "speculative", "speculative_lossy"
CITER = "citer"  # in a list of methods: every round

LABELS = {
    SLM: "SLM only",
    LLM: "LLM only",
    RANDOM: "random",
    CONFIDENCE: "confidence",
    ENTROPY: "confidence (entropy)",
    MARGIN: "confidence (margin)",
    ROUTELLM: "RouteLLM-style",
    CASCADE_SUM: "cascade (Chow-Sum)",
    CASCADE_AVERAGE: "cascade (Chow-Average)",
    CASCADE_QUANTILE: "cascade (Chow-Quantile)",
    FASTER_CHOW: "faster cascade (Chow)",
    FASTER_DIFF: "faster cascade (Diff)",
    FASTER_OPT: "faster cascade (OPT)",
    FASTER_TOKEN_V3: "faster cascade (TokenV3)",
    COLLM: "Co-LLM",
    R2R: "R2R-style",
    SPECULATIVE: "speculative decoding",
    SPECULATIVE_LOSSY: "speculative (typical)",
    CITER_S: "CITER-S",
    ORACLE: "oracle",
}
ALL_METHODS = (*LABELS, CITER)


def method_label(name: str) -> str:
    """A method's name as it is shown to people."""
    rounds = citer_rounds([name])
    return f"CITER round {rounds[0]}" if rounds else LABELS.get(name, name)
