"""The handoff inside vLLM: a logits processor that ends a turn where the score is below the threshold.

It reads the score that the routed model wrote into the handoff column (`vllm_score_column.py`), or draws it where
the request asks for the random baseline. Below the request's threshold it leaves the handoff token as the only
choice; the engine passes that token as a stop token, so vLLM ends the turn there, with no Python between
tokens. Everywhere else it masks the column, and the ids that are never written. This is the one place beside
`policy.hands_off` that makes the comparison.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from citer_ray.engines.scorers import random_scores
from citer_ray.engines.vllm_score_column import decode_scores
from citer_ray.engines.vllm_settings import RANDOM_KEY, THRESHOLD_KEY, ModelSettings, RandomRouting, unwritable_ids

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

_RandomRow = tuple[RandomRouting, list[int]]  # where the draws begin, and the turn's tokens so far


class HandoffLogitsProcessor(LogitsProcessor):
    """See the module. One threshold a request, from `SamplingParams.extra_args["citer_threshold"]`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a threshold that is not a number in [0, inf), before the request enters the engine."""
        threshold = _threshold(sampling_params)
        if threshold is None:
            return
        if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 <= threshold < math.inf:
            raise VLLMValidationError(
                f"{THRESHOLD_KEY} must be a number in [0, inf), got {threshold!r}", parameter=THRESHOLD_KEY
            )
        if sampling_params.allowed_token_ids is not None:
            raise VLLMValidationError(
                f"{THRESHOLD_KEY} and allowed_token_ids cannot be combined: the handoff token is not allowed",
                parameter="allowed_token_ids",
            )
        if sampling_params.min_tokens > 0:
            raise VLLMValidationError(
                f"{THRESHOLD_KEY} and min_tokens cannot be combined: vLLM would forbid the handoff, a stop token",
                parameter="min_tokens",
            )

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._settings = ModelSettings.from_config(vllm_config.model_config.hf_config)
        self._masked = [] if self._settings is None else list(unwritable_ids(self._settings))
        self._device = device
        self._thresholds: dict[int, float] = {}  # batch row -> threshold
        self._thresholds_B = torch.empty(0, device=device)  # float64, rebuilt when the batch changes
        self._random: dict[int, _RandomRow] = {}  # batch row -> its draws

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._thresholds, batch_update, lambda params, *_: _threshold_state(params)):
            self._thresholds_B = torch.empty(0, device=self._device)
        process_dict_updates(self._random, batch_update, _random_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Handoff and masks, in place, on [B, V] float32 logits."""
        settings = self._settings
        if settings is None:
            return logits
        handoff = settings.handoff_token_id
        hands_off_B = None
        if handoff is not None and self._thresholds:
            # float64, as in `policy.hands_off`: a threshold such as 0.9 is no float32.
            scores_B = decode_scores(logits[:, handoff])
            if self._random:
                self._draw(scores_B)
            hands_off_B = scores_B.double() < self._thresholds_for(logits.shape[0])
        logits[:, settings.shared_vocab_size :] = -torch.inf
        if self._masked:
            logits[:, self._masked] = -torch.inf
        if handoff is not None and hands_off_B is not None:
            logits.masked_fill_(hands_off_B[:, None], -torch.inf)
            logits[:, handoff] = torch.where(hands_off_B, 0.0, -torch.inf)
        return logits

    def _draw(self, scores_B: torch.Tensor) -> None:
        """Put the random rows' scores in place of what the column says."""
        rows, routings = list(self._random), [routing for routing, _ in self._random.values()]
        drawn = random_scores(
            [routing.seed for routing in routings],
            [routing.key for routing in routings],
            [routing.position + len(written) for routing, written in self._random.values()],
        )
        scores_B[torch.tensor(rows, device=self._device)] = torch.from_numpy(drawn).to(self._device)

    def _thresholds_for(self, num_rows: int) -> torch.Tensor:
        """float64 [B]; -1, which no score is below, for rows without a threshold."""
        if self._thresholds_B.shape[0] != num_rows:
            values = [self._thresholds.get(row, -1.0) for row in range(num_rows)]
            self._thresholds_B = torch.tensor(values, dtype=torch.float64).to(self._device, non_blocking=True)
        return self._thresholds_B


def _threshold(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get(THRESHOLD_KEY)


def _threshold_state(params: SamplingParams) -> float | None:
    threshold = _threshold(params)
    return None if threshold is None else float(threshold)


def _random_state(params: SamplingParams, prompt_ids: list[int] | None, written: list[int]) -> _RandomRow | None:
    values = (params.extra_args or {}).get(RANDOM_KEY)
    return None if values is None else (RandomRouting(**values), written)
