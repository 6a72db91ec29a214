"""A transformers causal language model, opened up where the engine needs it: hidden states, then logits.

`TransformersEngine` asks for the last layer's output after the final norm, and for the logits of chosen positions only:
with a real vocabulary the output layer over all positions would cost more than the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_GROUPED_SDPA = "citer_grouped_sdpa"


def _grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa`, except that query heads share keys and values without a copy for each of them.

    transformers makes that copy in every layer of a pass with a mask. In batched decoding it took most of the time: 55
    of 58 ms a layer with 62 rows of 240 positions and three query heads a group.

    Returns:
        [B, T, query heads, head size] and None, as attention functions of transformers do.
    """
    num_rows, num_heads, num_queries, head_size = query.shape
    num_groups = key.shape[1]
    on_cpu = query.device.type == "cpu"
    if (
        attention_mask is None
        or num_heads == num_groups
        or kwargs.get("position_bias") is not None
        or (num_queries > 1 and not on_cpu)  # CUDA's fused kernels take groups without a mask only
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if num_queries == 1:
        # The heads of a group become queries of one head: they have the same position, and so the same mask.
        query = query.reshape(num_rows, num_groups, num_heads // num_groups, head_size)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=num_queries > 1
    )
    if num_queries == 1:
        output = output.reshape(num_rows, num_heads, 1, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_GROUPED_SDPA, _grouped_sdpa)
AttentionMaskInterface.register(_GROUPED_SDPA, sdpa_mask)


class HiddenStateModel:
    """Decoder and output layer of one model.

    Args:
        model: a causal language model in eval mode.
        shared_vocab_size: ids at or above it (padding of the vocabulary) are never considered.
        masked_ids: ids that must never be written, such as the handoff token.
    """

    def __init__(self, model: PreTrainedModel, shared_vocab_size: int, masked_ids: Sequence[int] = ()) -> None:
        if model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
            model.set_attn_implementation(_GROUPED_SDPA)
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._text_config = model.config.get_text_config(decoder=True)
        self._vocab_size = shared_vocab_size
        self._masked_ids = list(masked_ids)
        self._layer_types = sorted(set(getattr(self._text_config, "layer_types", None) or ()))
        self.device = model.device
        self.num_layers = int(self._text_config.num_hidden_layers)

    @property
    def embedding_VH(self) -> torch.Tensor:
        """The input embedding."""
        return cast(torch.Tensor, self._decoder.get_input_embeddings().weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of the output layer's weights."""
        return cast(torch.dtype, self._head.weight.dtype)

    @torch.inference_mode()
    def score_hidden(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, H] of right-padded rows without a cache. Causality keeps the padding out of every real position."""
        return cast(torch.Tensor, self._decoder(input_ids=ids_BT, use_cache=False).last_hidden_state)

    @torch.inference_mode()
    def step_hidden(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, kv_length: int, cache: Cache
    ) -> torch.Tensor:
        """[B, T, H] of new tokens at `positions_BT`, attending to `cache` rows up to each token's own position."""
        keys = torch.arange(kv_length, device=ids_BT.device)
        causal = (keys <= positions_BT[:, :, None])[:, None]  # [B, 1, T, kv_length]
        output = self._decoder(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=self._masks(causal, keys, positions_BT),
            past_key_values=cache,
            use_cache=True,
        )
        return cast(torch.Tensor, output.last_hidden_state)

    def _masks(self, causal: torch.Tensor, keys: torch.Tensor, positions_BT: torch.Tensor) -> Any:
        """One mask, or one for each layer type where the model mixes them (sliding windows)."""
        if self._layer_types in ([], ["full_attention"]):
            return causal
        masks = {"full_attention": causal}
        if "sliding_attention" in self._layer_types:
            near = keys > positions_BT[:, :, None] - int(self._text_config.sliding_window)
            masks["sliding_attention"] = causal & near[:, None]
        return masks

    @torch.inference_mode()
    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32 [N, shared vocabulary] of N hidden states, scaled and capped as the model's own forward does."""
        logits: torch.Tensor = self._head(hidden_NH)[:, : self._vocab_size].float()
        scale = getattr(self._text_config, "logits_scaling", None)  # Granite divides
        if scale:
            logits = logits / scale
        if getattr(self._text_config, "logit_scale", None):  # Cohere multiplies
            logits = logits * self._text_config.logit_scale
        cap = getattr(self._text_config, "final_logit_softcapping", None)  # Gemma
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if self._masked_ids:
            logits[:, self._masked_ids] = -torch.inf
        return logits
