"""Shared fixtures: tiny seeded Llama models, built in code, with different hidden sizes and one vocabulary."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 96
EOS_ID = 2


def make_tiny_llama(seed: int, hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """A random Llama with head size 32, grouped-query attention, and logits wide enough that ties do not matter."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_slm() -> LlamaForCausalLM:
    return make_tiny_llama(seed=1, hidden_size=64, num_layers=2)


@pytest.fixture(scope="session")
def tiny_llm() -> LlamaForCausalLM:
    return make_tiny_llama(seed=2, hidden_size=128, num_layers=3)
