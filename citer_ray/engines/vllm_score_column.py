"""How a score travels from the routed model to the logits processor and the caller: a column of the logits.

The routed model (`vllm_routed.py`) writes the score of a position into the column of the handoff token; the
logits processor (`vllm_handoff.py`) reads it before sampling, and the session (`vllm_session.py`) reads it
from the raw log-probabilities that vLLM returns for `SamplingParams.logprob_token_ids`.

The encoding is `-score * 2**120`. Multiplying by a power of two keeps all 24 bits of a float32, and
subtracting a log-sum-exp (a few hundred at most) from a number of that size changes nothing, so log-softmax
hands it through bit for bit. The column's own probability is exp(-2**40 or less) = 0: the log-probabilities
of all other tokens are exactly those of the model, and the handoff token cannot be sampled unless the
processor forces it.
"""

from __future__ import annotations

import torch

_SCALE = 2.0**120  # times 1 / vLLM's smallest temperature (0.01) this is still finite in float32
_FLOOR = 2.0**-80  # keeps the encoded number at or below -2**40, where adding a log-sum-exp rounds away


def encode_scores(scores_B: torch.Tensor) -> torch.Tensor:
    """float32 [B]; the column's values for scores in [0, 1] (below 2**-80 they become 2**-80)."""
    return scores_B.float().clamp(min=_FLOOR).mul(-_SCALE)


def decode_scores(column_B: torch.Tensor) -> torch.Tensor:
    """float32 [B]; inverse of `encode_scores`, exact."""
    return column_B.float().div(-_SCALE)


def decode_score(value: float) -> float:
    """The score in one number that vLLM returned."""
    return value / -_SCALE
