"""The decoder classes that have a routed version: one line each.

A class can be listed if it is a vLLM text decoder whose `compute_logits(hidden_states)` gets the last layer's output
after the final norm, which holds for all of vLLM's plain decoders. This module imports nothing of vLLM, so that the
engine can check a checkpoint before anything is loaded.
"""

from __future__ import annotations

# architecture in config.json -> module under vllm.model_executor.models
ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

_PREFIX = "CiterRouted"


def routed_name(architecture: str) -> str:
    """Name under which the routed version of an architecture is registered."""
    return _PREFIX + architecture


def stock_name(routed: str) -> str | None:
    """Inverse of `routed_name`; None if it is no such name."""
    stock = routed.removeprefix(_PREFIX)
    return stock if stock != routed and stock in ARCHITECTURES else None
