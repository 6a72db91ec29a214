"""Scorers: what the SLM's engine knows at a position, turned into one number in [0, 1] per row.

A policy compares the number with its threshold (`policy.hands_off`). The router is one scorer; the others are the
baselines that need no training. All are functions of the SLM's state alone, so they run inside its engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class StepState:
    """The SLM's state at the next position of B responses.

    Attributes:
        hidden_BH: last layer's output after the final norm.
        logits_BV: float32 next-token logits over the shared vocabulary.
        positions: absolute position of the token to be written, for every row.
        keys: a number that identifies the response (a digest of its first context), for every row.
    """

    hidden_BH: torch.Tensor
    logits_BV: torch.Tensor
    positions: Sequence[int]
    keys: Sequence[int]


class Scorer(Protocol):
    """float32 [B] in [0, 1]; higher means that the SLM should write."""

    def __call__(self, state: StepState) -> torch.Tensor: ...


class ProbabilityModel(Protocol):
    """What `RouterScorer` needs of a router."""

    def p_slm(self, hidden_BH: torch.Tensor) -> torch.Tensor: ...


class RouterScorer:
    """`p_slm` of a router (CITER, section 3)."""

    def __init__(self, router: ProbabilityModel) -> None:
        self._router = router

    def __call__(self, state: StepState) -> torch.Tensor:
        return self._router.p_slm(state.hidden_BH)


def max_probability(state: StepState) -> torch.Tensor:
    """Probability of the SLM's greedy token: the plainest confidence router."""
    return torch.exp(state.logits_BV.amax(-1) - torch.logsumexp(state.logits_BV, -1))


def margin(state: StepState) -> torch.Tensor:
    """Gap between the two largest probabilities."""
    top2 = torch.softmax(state.logits_BV, -1).topk(2, -1).values
    return top2[:, 0] - top2[:, 1]


def certainty(state: StepState) -> torch.Tensor:
    """exp(-entropy) of the SLM's distribution: 1 when it is certain, 1/V when it is uniform."""
    logprobs = torch.log_softmax(state.logits_BV, -1)
    return torch.exp((logprobs.exp() * logprobs).sum(-1))


class RandomScorer:
    """Uniform in [0, 1) by a hash of (seed, response, position), so that repeated runs and batches agree."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed % 2**64)

    def __call__(self, state: StepState) -> torch.Tensor:
        with np.errstate(over="ignore"):  # wrapping is what a hash wants
            mixed = (
                np.asarray(state.keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                + np.asarray(state.positions, np.uint64) * np.uint64(0xD1B54A32D192ED03)
                + self._seed * np.uint64(0x8CB92BA72F3D8DD7)
            )
            # Finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
        # 24 bits: every value is a float32 below 1.
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24))


BUILT_IN: Mapping[str, Scorer] = {
    "max_probability": max_probability,
    "margin": margin,
    "certainty": certainty,
}


def find_scorer(name: str, own: Mapping[str, Scorer]) -> Scorer:
    """The scorer called `name`: one of `own`, a built-in, or `random:SEED`.

    Raises:
        ValueError: there is none; the known ones are named.
    """
    if name in own:
        return own[name]
    if name in BUILT_IN:
        return BUILT_IN[name]
    kind, _, seed = name.partition(":")
    if kind == "random" and seed.isdecimal():
        return RandomScorer(int(seed))
    known = ", ".join([*sorted(own), *sorted(BUILT_IN), "random:SEED"])
    raise ValueError(f"unknown scorer {name!r}; this engine has: {known}")
