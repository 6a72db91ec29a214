"""Sampling inside vLLM as a function of (seed, position), the same draw as every other engine's.

vLLM's own seed starts one random stream per request, so what a token draws depends on how many were drawn
before it in this request: a session that is rebuilt elsewhere would go on differently. This processor draws
with `engines/sampling.py` instead and leaves the drawn token as the only choice; the engine sends such
requests as greedy. It works row by row on the host: fine for rollouts and tests; greedy requests pay nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from citer_ray.engine import Sampling
from citer_ray.engines.sampling import sample
from citer_ray.engines.vllm_settings import SAMPLING_KEY, ModelSettings, SeededSampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

# How, position of the turn's first token, the response before the turn, the turn's tokens so far.
_RowState = tuple[Sampling, int, tuple[int, ...], list[int]]


class SeededSamplingProcessor(LogitsProcessor):
    """See the module; per-request settings in `SamplingParams.extra_args["citer_sampling"]`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        settings = ModelSettings.from_config(vllm_config.model_config.hf_config)
        self._vocab_size = None if settings is None else settings.shared_vocab_size
        self._rows: dict[int, _RowState] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave only the drawn token, in place, in every row that samples."""
        for row, (sampling, start, before, written) in self._rows.items():
            logits_V = logits[row, : self._vocab_size].double().cpu().numpy()
            if logits_V.max() == -torch.inf:  # handed off: the only token left lies outside the shared range
                continue
            response_ids = (*before, *written) if sampling.has_penalties else ()
            token = sample(logits_V, sampling, start + len(written), response_ids)
            logits[row] = -torch.inf
            logits[row, token] = 0.0
        return logits


def _row_state(params: SamplingParams, prompt_ids: list[int] | None, written: list[int]) -> _RowState | None:
    values = (params.extra_args or {}).get(SAMPLING_KEY)
    if values is None:
        return None
    seeded = SeededSampling(**values)
    sampling = Sampling(
        seeded.temperature,
        seeded.top_p,
        seeded.top_k,
        seeded.seed,
        presence_penalty=seeded.presence_penalty,
        frequency_penalty=seeded.frequency_penalty,
    )
    return sampling, seeded.position, tuple(seeded.response_ids), written
