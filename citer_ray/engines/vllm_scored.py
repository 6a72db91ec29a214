"""Hidden states and scores of given responses from vLLM: a decoder class whose pooler returns them.

vLLM's pooling runner prefills many sequences in one pass and hands the last layer's output after the final
norm to the model's pooler. Ours keeps the states of the response's positions and adds the greedy token and
the log-probability of the response's own token, from the same states. One prefill a sequence gives everything
that a label needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.layers.pooler.common import PoolingParamsUpdate

from citer_ray.engines.vllm_architectures import ARCHITECTURES, SCORED, stock_name
from citer_ray.engines.vllm_routed import RoutedMixin
from citer_ray.engines.vllm_settings import PROMPT_LENGTH_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.pool.metadata import PoolingMetadata

_LOGIT_ROWS = 256  # rows of logits at once: a real vocabulary times a long batch would not fit

Logits = Callable[[torch.Tensor], torch.Tensor | None]


class ScoringPooler(Pooler):
    """Turns hidden states into float32 [T, H + 2] a sequence: hidden state, greedy token, log-probability.

    Args:
        logits: from hidden states; returns None on ranks that gather none, whose output is not used.
    """

    def __init__(self, logits: Logits) -> None:
        super().__init__()
        self._logits = logits

    def get_supported_tasks(self) -> Set[Any]:
        return {"token_embed"}

    def get_pooling_updates(self, task: Any) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> list[torch.Tensor | None]:
        """One entry a sequence; None where a part of the prompt is still to come."""
        cursor = pooling_metadata.get_pooling_cursor()
        chunks = hidden_states.split(cursor.num_scheduled_tokens_cpu.tolist())
        ids_by_row = pooling_metadata.get_prompt_token_ids_cpu()  # vLLM keeps them on the host
        outputs: list[torch.Tensor | None] = []
        for row, (chunk, finished) in enumerate(zip(chunks, cursor.get_finished_mask(), strict=True)):
            state = pooling_metadata.pooling_states[row]
            state.hidden_states_cache.append(chunk)
            if not finished:
                outputs.append(None)
                continue
            hidden_TH = torch.cat(state.hidden_states_cache) if len(state.hidden_states_cache) > 1 else chunk
            state.clean()
            start = (pooling_metadata.pooling_params[row].extra_kwargs or {}).get(PROMPT_LENGTH_KEY, 1)
            # The state of response position i ends at token start + i - 1.
            outputs.append(self._scores(hidden_TH[start - 1 : -1], ids_by_row[row][start:]))
        return outputs

    def _scores(self, hidden_TH: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        columns = []
        for hidden_CH, targets_C in zip(
            hidden_TH.split(_LOGIT_ROWS), targets_T.to(hidden_TH.device, torch.long).split(_LOGIT_ROWS), strict=True
        ):
            logits_CV = self._logits(hidden_CH)
            if logits_CV is None:
                columns.append(hidden_CH.new_zeros((len(hidden_CH), 2), dtype=torch.float32))
                continue
            chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
            logprob_C = chosen_C - torch.logsumexp(logits_CV, -1)
            # float32 holds every id below 2**24.
            columns.append(torch.stack([logits_CV.argmax(-1).float(), logprob_C], 1))
        return torch.cat([hidden_TH.float(), torch.cat(columns)], 1)


class ScoredMixin(RoutedMixin):
    """A decoder class for vLLM's pooling runner; put it before that class."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = ScoringPooler(self.compute_logits)


def __getattr__(name: str) -> Any:
    """Make `CiterScored<Architecture>` on first use."""
    stock = stock_name(name, SCORED)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"vllm.model_executor.models.{ARCHITECTURES[stock]}")
    scored = type(name, (ScoredMixin, getattr(module, stock)), {"__module__": __name__})
    globals()[name] = scored
    return scored
