"""Picking a token from logits: greedy, or sampled as a function of (seed, position).

Noise comes from a counter-based generator keyed by (seed, position), never from a stream. So a session that was
rebuilt elsewhere, or that runs in another batch, draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def penalised(
    logits_V: npt.NDArray[np.float64], sampling: Sampling, response_ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Logits less OpenAI's presence and frequency penalties for the ids that the response has so far."""
    if not sampling.has_penalties or not response_ids:
        return logits_V
    ids, counts = np.unique(np.asarray(response_ids), return_counts=True)
    changed = logits_V.copy()
    changed[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return changed


def sample(
    logits_V: npt.NDArray[np.float64], sampling: Sampling, position: int, response_ids: Sequence[int] = ()
) -> int:
    """The token at `position` by the Gumbel-max trick, which draws exactly from softmax(logits / temperature).

    A temperature of 0 takes the largest logit. `response_ids`, the response so far, matter for penalties alone.
    """
    changed = penalised(logits_V, sampling, response_ids)
    if sampling.temperature == 0:
        return int(np.argmax(changed))
    scaled = keep_candidates(changed / sampling.temperature, sampling.top_k, sampling.top_p)
    return int(np.argmax(scaled + gumbel_noise(sampling.seed, position, scaled.size)))
