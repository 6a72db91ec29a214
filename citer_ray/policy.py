"""Who writes the next token: routing policies as data, and the one comparison that they share.

A policy names a *scorer* (a function of the SLM's state, evaluated inside the SLM's engine, see `engines/scorers.py`)
and a threshold. The direction is fixed once, here: the LLM writes iff `score < threshold`. `decoding.py` acts on it;
label rollouts, evaluation and serving differ only in the policy that they pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# The largest threshold at which the SLM can still write: scores are probabilities or mapped into [0, 1].
LLM_ONLY_THRESHOLD = 1.0 + 1e-6


class Writer(StrEnum):
    """The model that wrote a token."""

    SLM = "slm"
    LLM = "llm"


def hands_off(score: float, threshold: float) -> bool:
    """True iff the LLM should write: `score < threshold` (0 = SLM only, above 1 = LLM only)."""
    return score < threshold


@dataclass(frozen=True, slots=True)
class AlwaysSlm:
    """The SLM writes everything; policy 0."""

    name: str = "slm"


@dataclass(frozen=True, slots=True)
class AlwaysLlm:
    """The LLM writes everything; the SLM is not run."""

    name: str = "llm"


@dataclass(frozen=True, slots=True)
class Threshold:
    """The SLM writes where its scorer's value is at least `threshold`, else the LLM does.

    Attributes:
        scorer: name of a scorer of the SLM's engine: `router` (or `router:<name>` where several are loaded),
            `max_probability`, `random:<seed>`, ...
        threshold: in [0, inf); the price put on the LLM.
        llm_tokens_per_visit: tokens that the LLM writes in one visit.
    """

    scorer: str
    threshold: float
    llm_tokens_per_visit: int = 1

    def __post_init__(self) -> None:
        if not self.threshold >= 0:  # also refuses NaN
            raise ValueError(f"threshold must be a number >= 0, got {self.threshold}")
        if self.llm_tokens_per_visit < 1:
            raise ValueError(f"llm_tokens_per_visit must be at least 1, got {self.llm_tokens_per_visit}")


def random_policy(llm_share: float, seed: int) -> Threshold:
    """Each token is the LLM's with probability `llm_share`, by a hash of (seed, context), so that runs compare."""
    if not 0 <= llm_share <= 1:
        raise ValueError(f"llm_share must be in [0, 1], got {llm_share}")
    # A share of 1 must hand off a score that rounds to 1.0, too.
    return Threshold(f"random:{seed}", LLM_ONLY_THRESHOLD if llm_share == 1 else llm_share)


@dataclass(frozen=True, slots=True)
class Oracle:
    """The LLM writes exactly where the two greedy tokens differ; both models run at every step."""

    name: str = "oracle"


@dataclass(frozen=True, slots=True)
class Cascade:
    """The SLM answers; where its whole answer is too uncertain, the LLM answers anew (Gupta et al., 2404.10136).

    The score of an answer is a probability made of its tokens' log-probabilities: exp of their sum (`sum`, Chow-Sum),
    of their mean (`average`, Chow-Average) or of their quantile (`quantile`, Chow-Quantile; 0 is the minimum).
    """

    statistic: Literal["sum", "average", "quantile"]
    threshold: float
    quantile: float = 0.0

    def __post_init__(self) -> None:
        if not self.threshold >= 0 or not 0 <= self.quantile <= 1:
            raise ValueError(f"threshold must be >= 0 and quantile in [0, 1], got {self}")


Rule = Literal["exact", "typical", "chow", "diff", "opt", "token_v3"]


@dataclass(frozen=True, slots=True)
class Speculative:
    """The SLM drafts, the LLM verifies a whole draft in one pass and keeps what a rule accepts (`speculation.py`).

    Attributes:
        rule: what is accepted beside the LLM's own greedy token; `exact` accepts nothing else.
        draft_length: tokens of a draft.
        threshold: a drafted token that differs from the LLM's is kept iff the rule's score is at least this.
    """

    rule: Rule
    draft_length: int
    threshold: float = math.inf

    def __post_init__(self) -> None:
        if self.draft_length < 1 or math.isnan(self.threshold):
            raise ValueError(f"draft_length must be at least 1 and threshold a number, got {self}")


Policy = AlwaysSlm | AlwaysLlm | Threshold | Oracle | Cascade | Speculative
