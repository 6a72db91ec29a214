"""Comparing what two engines wrote: token for token and decision for decision, near-ties named and counted.

Two float32 engines add up in different orders, so their scores and logits differ in the last bits. Where a score lies
within 1e-5 of its threshold, or the two best logits within 1e-3 of each other, they may decide differently. There, and
only there, a comparison ends early and counts a near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from citer_ray.decoding import Request, Trace
from citer_ray.policy import Threshold, Writer

SCORE_TIE, LOGIT_TIE = 1e-5, 1e-3


def assert_same(
    requests: Sequence[Request],
    ours: Sequence[Trace],
    theirs: Sequence[Trace],
    models: dict[Writer, PreTrainedModel],
) -> int:
    """Compare the traces of both engines.

    Args:
        requests: what was decoded.
        ours: the engine under test.
        theirs: the reference.
        models: for the logits at a difference.

    Returns:
        The number of responses that end in a near-tie.
    """
    near_ties = 0
    for request, mine, other in zip(requests, ours, theirs, strict=True):
        both = zip(mine.writers, mine.token_ids, other.writers, other.token_ids, strict=False)
        first = next((i for i, (w, t, v, u) in enumerate(both) if (w, t) != (v, u)), None)
        same = len(other.token_ids) if first is None else first
        if first is None:
            assert (len(mine.token_ids), mine.finish) == (len(other.token_ids), other.finish)
            assert (mine.visits, mine.passes) == (other.visits, other.passes)
        else:
            assert is_near_tie(request, mine, other, first, models), f"position {first} differs, and is no near-tie"
            near_ties += 1
        asked = [(a, b) for a, b in zip(mine.scores[:same], other.scores[:same], strict=True) if b is not None]
        assert all(a is not None for a, _ in asked)
        np.testing.assert_allclose([a for a, _ in asked], [b for _, b in asked], atol=1e-4)
        np.testing.assert_allclose(mine.logprobs[:same], other.logprobs[:same], atol=5e-4)
    return near_ties


def is_near_tie(
    request: Request, mine: Trace, other: Trace, position: int, models: dict[Writer, PreTrainedModel]
) -> bool:
    """Whether two engines that agreed before `position` may rightly differ there."""
    if mine.writers[position] != other.writers[position]:
        assert isinstance(request.policy, Threshold)
        score = other.scores[position]
        return score is not None and abs(score - request.policy.threshold) < SCORE_TIE
    context = torch.tensor([[*request.prompt_ids, *other.token_ids[:position]]])
    with torch.inference_mode():
        logits_V = models[other.writers[position]](context).logits[0, -1]
    gap = logits_V[other.token_ids[position]] - logits_V[mine.token_ids[position]]
    return abs(float(gap)) < LOGIT_TIE
