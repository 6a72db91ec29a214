"""The methods of an evaluation: their names, what each is, and how its knob is swept.

Every method is a policy of the one decoding loop. A `Sweep` says which policy shows a method's own scores on validation
examples, and which policy a threshold means; `Sweep.settings` turns quantiles of those scores into settings. Formulas
and sources are in docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from citer_ray.calibration import threshold_for_share
from citer_ray.config import EvaluateConfig
from citer_ray.decoding import Trace
from citer_ray.engines.scorers import PROMPT
from citer_ray.errors import ConfigError
from citer_ray.evaluation import Setting, end_settings, oracle_setting, random_settings
from citer_ray.frontier import CITER_S, CONFIDENCE, ORACLE, RANDOM, citer_rounds
from citer_ray.method_names import (
    ALL_METHODS,
    CASCADE_AVERAGE,
    CASCADE_QUANTILE,
    CASCADE_SUM,
    COLLM,
    ENTROPY,
    FASTER_CHOW,
    FASTER_DIFF,
    FASTER_OPT,
    FASTER_TOKEN_V3,
    MARGIN,
    R2R,
    ROUTELLM,
    SPECULATIVE,
    SPECULATIVE_LOSSY,
)
from citer_ray.policy import Cascade, Policy, Rule, Speculative, Threshold
from citer_ray.speculation import lenience

# Fitted by the evaluation, if it is asked for them (`on_ray/baselines.py`); routers of CITER come from its rounds.
TRAINED = (ROUTELLM, COLLM, R2R)

_SCORERS = {CONFIDENCE: "max_probability", ENTROPY: "certainty", MARGIN: "margin"}
_RULES: dict[str, Rule] = {
    FASTER_CHOW: "chow",
    FASTER_DIFF: "diff",
    FASTER_OPT: "opt",
    FASTER_TOKEN_V3: "token_v3",
    SPECULATIVE_LOSSY: "typical",
}


def chosen_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods that a configuration asks for, in the order of `ALL_METHODS`.

    Raises:
        ConfigError: an unknown name; the known ones are named.
    """
    if unknown := sorted({*names} - {*ALL_METHODS, "all"}):
        raise ConfigError(f"evaluate.methods has {', '.join(unknown)}; known are all, {', '.join(ALL_METHODS)}")
    return ALL_METHODS if "all" in names else tuple(name for name in ALL_METHODS if name in names)


# What compares the distributions of both models, draft by draft.
SPECULATING = (SPECULATIVE, *_RULES)


@dataclass(frozen=True, slots=True)
class Sweep:
    """How one method's knob is swept.

    Attributes:
        method: its name.
        probe: the policy that shows the method's scores without letting them decide anything.
        policy: the policy that a threshold means.
        aims: parts of the scores that shall fall below the threshold.
        knob: what is reported for a threshold.
    """

    method: str
    probe: Policy
    policy: Callable[[float], Policy]
    aims: tuple[float, ...]
    knob: Callable[[float], float] = float

    def settings(self, scores: npt.ArrayLike) -> list[Setting]:
        """One setting for each distinct threshold; none where the method has no scores (nothing to decide)."""
        if len(np.atleast_1d(scores)) == 0:
            return []
        thresholds = sorted({threshold_for_share(scores, aim) for aim in self.aims})
        return [Setting(self.method, self.knob(value), self.policy(value)) for value in thresholds]


def sweep_of(method: str, config: EvaluateConfig) -> Sweep | None:
    """The sweep of a method that has scores; None for the others."""
    if method in _RULES:
        return _speculative_sweep(method, _RULES[method], config)
    if method.startswith("cascade_"):
        return _cascade_sweep(method, config)
    if method == ROUTELLM:
        scorer = f"{PROMPT}router:{method}"
        return Sweep(
            method,
            Threshold(scorer, 0.0, config.max_new_tokens),
            lambda threshold: Threshold(scorer, threshold, config.max_new_tokens),
            config.quantiles,
        )
    if method in _SCORERS or method in (COLLM, R2R, CITER_S) or citer_rounds([method]):
        scorer = scorer_of(method)
        return Sweep(method, Threshold(scorer, 0.0), lambda threshold: Threshold(scorer, threshold), config.llm_shares)
    return None


def scorer_of(method: str) -> str:
    """The scorer behind a token router: a built-in one, or a router under the method's name."""
    return _SCORERS.get(method, f"router:{method}")


def _cascade_sweep(method: str, config: EvaluateConfig) -> Sweep:
    statistics = {CASCADE_SUM: "sum", CASCADE_AVERAGE: "average", CASCADE_QUANTILE: "quantile"}
    statistic = statistics[method]
    return Sweep(
        method,
        Cascade(statistic, 0.0),  # type: ignore[arg-type]  # one of the three
        lambda threshold: Cascade(statistic, threshold),  # type: ignore[arg-type]
        config.quantiles,
    )


def _speculative_sweep(method: str, rule: Rule, config: EvaluateConfig) -> Sweep:
    return Sweep(
        method,
        Speculative(rule, config.draft_length),
        lambda threshold: Speculative(rule, config.draft_length, threshold),
        config.quantiles,
        lambda threshold: lenience(rule, threshold),
    )


def fixed_settings(methods: Iterable[str], config: EvaluateConfig, seed: int) -> list[Setting]:
    """The settings of methods whose knob needs no scores; the two models alone are always among them."""
    methods = tuple(methods)
    settings = end_settings()
    if ORACLE in methods:
        settings.append(oracle_setting())
    if RANDOM in methods:
        settings += random_settings(config.llm_shares, seed)
    if SPECULATIVE in methods:
        settings += [
            Setting(SPECULATIVE, float(length), Speculative("exact", length)) for length in config.draft_lengths
        ]
    return settings


def knob_scores(trace: Trace, probe: Policy) -> list[float]:
    """The scores that a method's threshold is compared with, of one response decoded with its probe."""
    if isinstance(probe, Cascade):
        return [] if trace.answer_score is None else [trace.answer_score]
    scores = [score for score in trace.scores if score is not None]
    is_query = isinstance(probe, Threshold) and probe.scorer.startswith(PROMPT)
    return scores[:1] if is_query else scores
