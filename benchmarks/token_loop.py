"""What is measured against: labels token by token and rollouts one at a time, with `transformers` and its KV cache.

This is how research code collects labels: a call of `generate` for every position and model, each with the KV cache
of the position before, and a call of `generate` for every rollout. Read by `collect.py`, which also checks that both
ways give the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from citer_ray.engine import TokenSequence


@dataclass(frozen=True, slots=True)
class LoopScores:
    """Both models' greedy tokens, int [T], and the SLM's hidden states, float [T, H], of one sequence."""

    slm_ids: list[int]
    llm_ids: list[int]
    hidden: npt.NDArray[np.float32]


def score_token_by_token(slm: PreTrainedModel, llm: PreTrainedModel, sequence: TokenSequence) -> LoopScores:
    """Ask both models for one token at every position of the response, given the response before it."""
    ids_1T = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    slm_cache, llm_cache = DynamicCache(config=slm.config), DynamicCache(config=llm.config)
    slm_ids, llm_ids, hidden = [], [], []
    for end in range(len(sequence.prompt_ids), ids_1T.shape[1]):
        state_1T = ids_1T[:, :end]
        ours = _generate(slm, state_1T, 1, past_key_values=slm_cache, output_hidden_states=True)
        theirs = _generate(llm, state_1T, 1, past_key_values=llm_cache)
        slm_ids.append(int(ours.sequences[0, -1]))
        llm_ids.append(int(theirs.sequences[0, -1]))
        hidden.append(ours.hidden_states[0][-1][0, -1].numpy())
    return LoopScores(slm_ids, llm_ids, np.stack(hidden))


def roll_out_alone(slm: PreTrainedModel, context: Sequence[int], max_new_tokens: int, eos: Sequence[int]) -> list[int]:
    """The SLM's greedy continuation of one state, EOS included."""
    output = _generate(slm, torch.tensor([list(context)]), max_new_tokens, eos_token_id=list(eos))
    return [int(token) for token in output.sequences[0, len(context) :]]


def _generate(model: PreTrainedModel, ids_1T: torch.Tensor, max_new_tokens: int, **options: Any) -> Any:
    """Greedy `generate` of one row."""
    return model.generate(  # type: ignore[operator]
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )
