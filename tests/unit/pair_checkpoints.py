"""Tiny real checkpoints for the tests of the pair: a byte-level BPE tokenizer and Llama-like models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CORPUS = [
    "Tom has 12 apples and gives 5 to Ann, so he has 7 apples left.",
    "She buys three boxes of pens and returns one box on Monday.",
    "Therefore the answer is \\boxed{42}, which we wanted to show.",
]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>"]


def make_tokenizer(
    specials: list[str] | None = None, corpus: list[str] | None = None, vocab_size: int = 320, **more: Any
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; deterministic, so that two calls give the same vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS if specials is None else specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS if corpus is None else corpus, trainer)
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", **more}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    tokenizer.chat_template = more.get("chat_template", CHAT_TEMPLATE)
    return tokenizer


def make_model(kind: str = "llama", seed: int = 0, **more: Any) -> PreTrainedModel:
    """Build a model with seeded random weights, without touching torch's global state."""
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **more}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.eval()


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write a checkpoint as any training script would."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
