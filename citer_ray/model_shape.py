"""The shape of a decoder, read from its config: parameters, attention layers, heads.

`cost.py` prices passes with it. Exact to the last parameter for the families listed here (a test compares
each with the real class); any other family is taken to be like Llama, with a warning. Pure: a config is a
mapping, or anything with `to_dict()`, so that neither torch nor transformers is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from citer_ray.errors import PairError

_log = logging.getLogger(__name__)

# Keys of decoders whose cache does not grow by `kv_heads * head_dim` per token and layer (latent, linear,
# state space).
_UNCOVERED_KEYS = ("kv_lora_rank", "ssm_cfg", "mamba_d_state", "linear_num_key_heads")
_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


class HasToDict(Protocol):
    """A `transformers.PretrainedConfig`, as far as this module is concerned."""

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data."""
        ...


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """What a family's layer has beyond its matrices; None leaves it to the config's `attention_bias`."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    norms: int = 2


_FAMILIES = {
    "llama": _LayerParts(),
    "mistral": _LayerParts(qkv_bias=False, o_bias=False),
    "mixtral": _LayerParts(qkv_bias=False, o_bias=False),
    "qwen2": _LayerParts(qkv_bias=True, o_bias=False),
    "qwen2_moe": _LayerParts(qkv_bias=True, o_bias=False),
    "qwen3": _LayerParts(qk_norm=True),
    "qwen3_moe": _LayerParts(qk_norm=True),
    "gemma": _LayerParts(),
    "gemma2": _LayerParts(norms=4),
    "gemma3_text": _LayerParts(norms=4, qk_norm=True),
    "phi3": _LayerParts(qkv_bias=False, o_bias=False),
    "granite": _LayerParts(),
    "smollm3": _LayerParts(),
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Counts of one decoder.

    Attributes:
        dense_params: parameters that every pass reads once: all layers without routed experts, the final
            norm, and the LM head (tied or not). Rows of the input embedding are negligible and left out.
        expert_params: parameters of one routed expert, over all layers that have experts (0 for a dense
            model).
        num_experts: experts in a layer, 0 for a dense model.
        experts_per_token: experts that one token uses.
        total_params: all parameters, input embedding included.
        full_layers: layers whose attention reads the whole context.
        window_layers: layers whose attention reads the last `window` tokens at most.
        window: length of the sliding window in tokens, 0 without one.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: the checkpoint's dtype, as its config names it.
    """

    dense_params: int
    expert_params: int
    num_experts: int
    experts_per_token: int
    total_params: int
    full_layers: int
    window_layers: int
    window: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | HasToDict) -> DecoderShape:
        """Read the counts from `config.json` as a mapping, or from a `transformers` config.

        Raises:
            PairError: the architecture does not follow the formulas (latent or linear attention, encoders).
        """
        keys = _decoder_keys(config)
        layers_and_norm, expert = _layer_params(keys)
        head = keys["vocab_size"] * keys["hidden_size"]
        num_experts, experts_per_token = _experts(keys)
        full_layers, window_layers, window = _attention_layers(keys)
        dense = layers_and_norm + head
        return cls(
            dense_params=dense,
            expert_params=expert,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            total_params=dense + num_experts * expert + (0 if keys.get("tie_word_embeddings") else head),
            full_layers=full_layers,
            window_layers=window_layers,
            window=window,
            num_heads=int(keys["num_attention_heads"]),
            num_kv_heads=_kv_heads(keys),
            head_dim=_head_dim(keys),
            dtype=str(keys.get("dtype") or keys.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return self.full_layers + self.window_layers

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, LM head included."""
        return self.dense_params + self.experts_per_token * self.expert_params


def _decoder_keys(config: Mapping[str, Any] | HasToDict) -> Mapping[str, Any]:
    """Take the decoder's part of a config, and refuse what the formulas do not cover."""
    full = config if isinstance(config, Mapping) else config.to_dict()
    text = full.get("text_config")
    keys = {**full, **text} if isinstance(text, Mapping) else full
    kind = keys.get("model_type", "unknown")
    missing = [key for key in _REQUIRED_KEYS if keys.get(key) is None]
    uncovered = [key for key in _UNCOVERED_KEYS if keys.get(key)]
    problem = ""
    if missing:
        problem = f"its config lacks {', '.join(missing)}"
    elif uncovered:
        problem = f"its cache is not one of keys and values per head ({', '.join(uncovered)})"
    elif keys.get("is_encoder_decoder"):
        problem = "it has an encoder"
    if problem:
        raise PairError(f"the cost model covers decoders with grouped-query attention; {kind!r} is none: {problem}")
    if kind not in _FAMILIES:
        _log.warning("model type %r is priced like Llama; its biases, norms and MLP may count otherwise", kind)
    return keys


def _head_dim(keys: Mapping[str, Any]) -> int:
    """Read the head size; Qwen3-0.6B and Gemma state one that is not `hidden_size / heads`."""
    return int(keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"])


def _kv_heads(keys: Mapping[str, Any]) -> int:
    return int(keys.get("num_key_value_heads") or keys["num_attention_heads"])


def _experts(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Return experts in a layer and experts per token; zeros for a dense model."""
    experts = int(keys.get("num_local_experts") or keys.get("num_experts") or 0)
    return (experts, int(keys["num_experts_per_tok"])) if experts else (0, 0)


def _expert_layers(keys: Mapping[str, Any]) -> int:
    """Count the layers with routed experts (Qwen-MoE can keep some dense)."""
    if not _experts(keys)[0]:
        return 0
    step = int(keys.get("decoder_sparse_step") or 1)
    dense = set(keys.get("mlp_only_layers") or ())
    return sum(i not in dense and (i + 1) % step == 0 for i in range(keys["num_hidden_layers"]))


def _layer_params(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Return the parameters of layers and final norm without experts, and of one expert in all layers."""
    hidden, layers, sparse = keys["hidden_size"], keys["num_hidden_layers"], _expert_layers(keys)
    expert_width = keys.get("moe_intermediate_size") or keys["intermediate_size"]
    shared_width = keys.get("shared_expert_intermediate_size") or 0
    # The shared expert, the row that weighs it, and the matrix that picks experts.
    sparse_mlp = hidden * (3 * shared_width + bool(shared_width) + _experts(keys)[0])
    dense_mlp = (layers - sparse) * _mlp_params(keys)
    params = layers * _attention_params(keys) + dense_mlp + sparse * sparse_mlp + hidden
    return int(params), int(sparse * 3 * hidden * expert_width)


def _attention_params(keys: Mapping[str, Any]) -> int:
    """Return the parameters of one layer's attention and norms."""
    parts = _FAMILIES.get(keys.get("model_type", ""), _LayerParts())
    hidden, head_dim = keys["hidden_size"], _head_dim(keys)
    q_width, kv_width = keys["num_attention_heads"] * head_dim, _kv_heads(keys) * head_dim
    flag = bool(keys.get("attention_bias", False))
    params = 2 * hidden * (q_width + kv_width) + parts.norms * hidden
    params += (q_width + 2 * kv_width) * (flag if parts.qkv_bias is None else parts.qkv_bias)
    params += hidden * (flag if parts.o_bias is None else parts.o_bias)
    return int(params + 2 * head_dim * parts.qk_norm)


def _mlp_params(keys: Mapping[str, Any]) -> int:
    """Return the parameters of one layer's gated MLP."""
    hidden, width = keys["hidden_size"], keys["intermediate_size"]
    return int(3 * hidden * width + (2 * width + hidden if keys.get("mlp_bias") else 0))


def _attention_layers(keys: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the layers with full attention, those with a sliding window, and its length in tokens."""
    layers = int(keys["num_hidden_layers"])
    window = int(keys.get("sliding_window") or 0)
    kinds = keys.get("layer_types")
    if kinds:
        other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if other:
            raise PairError(f"the cost model covers full and sliding attention; this model has {', '.join(other)}")
        sliding = sum(kind == "sliding_attention" for kind in kinds)
    else:
        # Without a list, Mistral's window holds for all layers; Qwen2 states one that it does not use.
        sliding = layers if keys.get("use_sliding_window", True) else 0
    return (layers - sliding, sliding, window) if window else (layers, 0, 0)
