"""Scorers: what the SLM's engine knows at a position, turned into one number in [0, 1] per row.

A policy compares the number with its threshold (`policy.hands_off`). The router is one scorer; the others are the
baselines that need no training. All are functions of the SLM's state alone, so they run inside its engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from citer_ray.features import FeatureReader

PROMPT = "prompt:"  # before a scorer's name: `PromptScorer` of it


@dataclass(frozen=True, slots=True)
class StepState:
    """The SLM's state at the next position of B responses.

    Attributes:
        hidden_BH: last layer's output after the final norm.
        logits_BV: float32 next-token logits over the shared vocabulary.
        positions: absolute position of the token to be written, for every row.
        keys: a number that identifies the response (a digest of its first context), for every row.
        starts: length of the response's first context, for every row; empty where it is not known.
    """

    hidden_BH: torch.Tensor
    logits_BV: torch.Tensor
    positions: Sequence[int]
    keys: Sequence[int]
    starts: Sequence[int] = ()

    def select(self, rows: Sequence[int]) -> StepState:
        """The state of some of the responses."""
        lists = ([values[row] for row in rows] if values else [] for values in (self.positions, self.keys, self.starts))
        return StepState(self.hidden_BH[rows], self.logits_BV[rows], *lists)


class Scorer(Protocol):
    """float32 [B] in [0, 1]; higher means that the SLM should write."""

    def __call__(self, state: StepState) -> torch.Tensor: ...


class ProbabilityModel(Protocol):
    """What `RouterScorer` needs of a router."""

    def p_slm(self, hidden_BH: torch.Tensor) -> torch.Tensor: ...


class RouterScorer:
    """`p_slm` of a router (CITER, section 3), on the hidden state or on the features that `reader` makes."""

    def __init__(self, router: ProbabilityModel, reader: FeatureReader | None = None) -> None:
        self._router, self._reader = router, reader

    def __call__(self, state: StepState) -> torch.Tensor:
        read = state.hidden_BH if self._reader is None else self._reader(state.hidden_BH, state.logits_BV)
        return self._router.p_slm(read)


def max_probability(state: StepState) -> torch.Tensor:
    """Probability of the SLM's greedy token: the plainest confidence router."""
    return torch.exp(state.logits_BV.amax(-1) - torch.logsumexp(state.logits_BV, -1))


def margin(state: StepState) -> torch.Tensor:
    """Gap between the two largest probabilities."""
    top2 = torch.softmax(state.logits_BV, -1).topk(2, -1).values
    return top2[:, 0] - top2[:, 1]


def certainty(state: StepState) -> torch.Tensor:
    """exp(-entropy) of the SLM's distribution: 1 when it is certain, 1/V when it is uniform."""
    # `entr` is 0 at 0: ids that must not be written have logit -inf.
    return torch.exp(-torch.special.entr(torch.softmax(state.logits_BV, -1)).sum(-1))


def random_scores(seeds: int | Sequence[int], keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float32]:
    """Uniform in [0, 1) by a hash of (seed, response, position), so that repeated runs, batches and engines agree.

    Args:
        seeds: one for all rows, or one a row; below 2**64.
        keys: a number that identifies the response (`response_key`), for every row.
        positions: absolute position of the token to be written, for every row.
    """
    with np.errstate(over="ignore"):  # wrapping is what a hash wants
        mixed = (
            np.asarray(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            + np.asarray(positions, np.uint64) * np.uint64(0xD1B54A32D192ED03)
            + np.asarray(seeds, np.uint64) * np.uint64(0x8CB92BA72F3D8DD7)
        )
        # Finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    # 24 bits: every value is a float32 below 1.
    scores: npt.NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    return scores


def response_key(prompt_ids: Sequence[int]) -> int:
    """The number that identifies a response: a digest of its first context."""
    return zlib.crc32(np.asarray(prompt_ids, np.int64).tobytes())


def random_seed(name: str) -> int | None:
    """The seed in `random:SEED`, or None if it is not such a name."""
    kind, _, seed = name.partition(":")
    return int(seed) % 2**64 if kind == "random" and seed.isdecimal() else None


class RandomScorer:
    """`random_scores` of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64

    def __call__(self, state: StepState) -> torch.Tensor:
        return torch.from_numpy(random_scores(self._seed, state.keys, state.positions))


class PromptScorer:
    """Another scorer's value at the end of the prompt, and 1 at every later position: who answers the whole query."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def __call__(self, state: StepState) -> torch.Tensor:
        scores = torch.ones(len(state.positions))
        first = [row for row, (at, start) in enumerate(zip(state.positions, state.starts, strict=True)) if at == start]
        if first:
            scores[first] = self._scorer(state.select(first)).float().cpu()
        return scores


BUILT_IN: Mapping[str, Scorer] = {
    "max_probability": max_probability,
    "margin": margin,
    "certainty": certainty,
}


def find_scorer(name: str, own: Mapping[str, Scorer]) -> Scorer:
    """The scorer called `name`: one of `own`, a built-in, `random:SEED`, or `prompt:` and one of these.

    Raises:
        ValueError: there is none; the known ones are named.
    """
    if name in own:
        return own[name]
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(PROMPT):
        return PromptScorer(find_scorer(name.removeprefix(PROMPT), own))
    seed = random_seed(name)
    if seed is not None:
        return RandomScorer(seed)
    known = ", ".join([*sorted(own), *sorted(BUILT_IN), "random:SEED"])
    raise ValueError(f"unknown scorer {name!r}; this engine has: {known}")
