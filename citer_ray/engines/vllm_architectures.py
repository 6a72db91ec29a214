"""The decoder classes that have a routed version: one line each.

A class can be listed if it is a vLLM text decoder whose `compute_logits(hidden_states)` gets the last layer's
output after the final norm, which holds for vLLM's plain decoders. This module imports nothing of vLLM, so
that the engine can check a checkpoint before anything is loaded.
"""

from __future__ import annotations

# architecture in config.json -> module under vllm.model_executor.models
ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

ROUTED = "CiterRouted"  # decodes, with the router's score in the handoff column
SCORED = "CiterScored"  # returns hidden states and scores of given responses


def stock_name(name: str, prefix: str) -> str | None:
    """The architecture behind `prefix + architecture`; None if `name` is not of that form."""
    stock = name.removeprefix(prefix)
    return stock if stock != name and stock in ARCHITECTURES else None
