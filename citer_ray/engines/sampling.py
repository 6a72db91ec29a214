"""Picking a token from logits: greedy, or sampled as a function of (seed, position).

Noise comes from a counter-based generator keyed by (seed, position), never from a stream. So a session that was
rebuilt elsewhere, or that runs in another batch, draws the same tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from citer_ray.engine import Sampling


def gumbel_noise(seed: int, position: int, size: int) -> npt.NDArray[np.float64]:
    """float64 [size]; standard Gumbel noise for one position."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, position], np.uint64)))
    return generator.gumbel(size=size)


def keep_candidates(logits_V: npt.NDArray[np.float64], top_k: int, top_p: float) -> npt.NDArray[np.float64]:
    """`logits_V` with everything outside top-k, then outside the nucleus of mass `top_p`, set to -inf."""
    kept = logits_V.copy()
    if 0 < top_k < kept.size:
        cutoff = np.partition(kept, -top_k)[-top_k]
        kept[kept < cutoff] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-kept, kind="stable")
        weights = np.exp(kept[order] - kept[order[0]])
        mass_before = np.cumsum(weights) - weights
        kept[order[mass_before >= top_p * weights.sum()]] = -np.inf
    return kept


def sample(logits_V: npt.NDArray[np.float64], sampling: Sampling, position: int) -> int:
    """The token at `position` by the Gumbel-max trick, which draws exactly from softmax(logits / temperature)."""
    scaled = keep_candidates(logits_V / sampling.temperature, sampling.top_k, sampling.top_p)
    return int(np.argmax(scaled + gumbel_noise(sampling.seed, position, scaled.size)))
