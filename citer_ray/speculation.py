"""Rules of speculative decoding: which of the SLM's drafted tokens the LLM lets stand, at temperature 0.

A drafted token that equals the LLM's greedy one always stands. Another one stands iff its rule's score reaches a
threshold; each rule is written as such a score, so that one sweep serves all. `decoding.py` acts on `verify`.

Sources: exact, Leviathan et al. (2211.17192); `typical`, Cai et al. (Medusa, 2401.10774, section 2.3.1); `chow`,
`diff`, `opt`, `token_v3`, Narasimhan et al. (Faster Cascades, 2405.19261, equations 2, 5, 10 and 15), whose lenience
alpha is `lenience(rule, threshold)`. q is the SLM's distribution, p the LLM's; the rules use them at temperature 1.

Array legend: D drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from citer_ray.policy import Rule, Speculative

FloatArray = npt.NDArray[np.float64]
_Score = Callable[[FloatArray, FloatArray, int], float]


def _exact(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Nothing but the LLM's own token stands: see `verify`."""
    return -np.inf


def _chow(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Keep iff max q >= 1 - alpha."""
    return float(q_V.max())


def _diff(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Keep iff max q >= max p - alpha."""
    return float(q_V.max() - p_V.max())


def _opt(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Keep iff max q >= max p - alpha TV(q, p)."""
    gap = float(q_V.max() - p_V.max())
    variation = float(np.maximum(0.0, q_V - p_V).sum())
    return gap / variation if variation > 0 else 0.0


def _token_v3(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Keep iff p(token) >= (1 - alpha) max p."""
    return float(p_V[token] / p_V.max())


def _typical(q_V: FloatArray, p_V: FloatArray, token: int) -> float:
    """Keep iff p(token) >= min(epsilon, sqrt(epsilon) exp(-H(p))), which is epsilon <= max(p, (p exp(H))^2)."""
    positive = p_V[p_V > 0]
    entropy = float(-(positive * np.log(positive)).sum())
    probability = float(p_V[token])
    return max(probability, (probability * float(np.exp(entropy))) ** 2)


_SCORES: dict[Rule, _Score] = {
    "exact": _exact,
    "typical": _typical,
    "chow": _chow,
    "diff": _diff,
    "opt": _opt,
    "token_v3": _token_v3,
}


def lenience(rule: Rule, threshold: float) -> float:
    """The rule's own knob for a threshold: alpha, or epsilon for `typical`."""
    match rule:
        case "chow" | "token_v3":
            return 1.0 - threshold
        case "diff" | "opt":
            return -threshold
        case _:
            return threshold


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the LLM's pass over a draft decided.

    Attributes:
        kept: leading tokens of the draft that stand.
        next_token: the LLM's greedy token after them; it replaces the first rejected one or follows the draft.
        next_logprob: its natural-log probability.
        scores: one entry for each of the kept tokens and one for a rejected one: the rule's score, None where both
            models' greedy tokens agree.
    """

    kept: int
    next_token: int
    next_logprob: float
    scores: list[float | None]


def verify(
    policy: Speculative,
    draft: Sequence[int],
    slm_DV: npt.NDArray[np.float32],
    llm_DV: npt.NDArray[np.float32],
) -> Verdict:
    """Judge a draft of D tokens.

    Args:
        policy: rule and threshold.
        draft: the SLM's greedy tokens.
        slm_DV: the SLM's log-probabilities that they were picked from.
        llm_DV: the LLM's log-probabilities, one row more: what follows the draft.
    """
    score_of = _SCORES[policy.rule]
    scores: list[float | None] = []
    kept = 0
    for token, q_V, p_V in zip(draft, slm_DV, llm_DV, strict=False):
        if token == int(p_V.argmax()):
            scores.append(None)
        else:
            q, p = np.exp(q_V.astype(np.float64)), np.exp(p_V.astype(np.float64))
            score = score_of(q, p, token)
            scores.append(score)
            if score < policy.threshold:
                break
        kept += 1
    row_V = llm_DV[kept]
    next_token = int(row_V.argmax())
    return Verdict(kept, next_token, float(row_V[next_token]), scores)
