"""The pairs that benchmarks measure: the embedded one, and one of random weights in the shape of a small real pair.

Both come with examples and everything else that labelling needs, so that a benchmark runs the library's own path from
an `Example` to labels. Read by `collect.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from citer_ray.config import CollectConfig, ModelConfig
from citer_ray.engine import Engine
from citer_ray.engines.build import Purpose
from citer_ray.engines.hf import TransformersEngine
from citer_ray.examples import Example, load_examples
from citer_ray.labelling import Labeller
from citer_ray.pair.handoff import HANDOFF_TOKEN
from citer_ray.pair.models import context_length, eos_token_ids, load_model, load_tokenizer
from citer_ray.policy import AlwaysSlm
from citer_ray.prompts import PromptFormat

EOS_ID = 2  # of the random pair; its models never write it in practice
SEED = 0


@dataclass(frozen=True)
class BenchmarkPair:
    """A pair, its examples and its labelling.

    Attributes:
        name: for the table.
        slm: the small model.
        llm: the large model.
        tokenizer: of both.
        prompt: how examples become prompts.
        collect: the labelling: both-wrong states are decided by one rollout each.
        examples: what is labelled; one call labels all, as a worker does with a chunk.
        vocab_size: ids that both models know.
        eos_token_id: ends a reference.
        eos_token_ids: end a response.
        masked_ids: never written.
        both_wrong_share: part of all positions that is taken as both wrong; None leaves the models' own cases.
    """

    name: str
    slm: PreTrainedModel
    llm: PreTrainedModel
    tokenizer: Any
    prompt: PromptFormat
    collect: CollectConfig
    examples: tuple[Example, ...]
    vocab_size: int
    eos_token_id: int
    eos_token_ids: frozenset[int]
    masked_ids: tuple[int, ...] = ()
    both_wrong_share: float | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens that both models can hold."""
        return min(context_length(model.config) for model in (self.slm, self.llm))

    async def engine(self, model: PreTrainedModel, purpose: Purpose = "decode") -> Engine:
        """An engine with the defaults of the configuration. It knows no prefix from an earlier run."""
        return TransformersEngine(
            model,
            shared_vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            masked_ids=self.masked_ids,
        )

    def labeller(self) -> Labeller:
        """The labelling of the first round."""
        return Labeller(
            self.tokenizer,
            self.prompt,
            self.collect,
            seed=SEED,
            eos_token_id=self.eos_token_id,
            eos_token_ids=self.eos_token_ids,
            round=1,
            policy=AlwaysSlm(),
        )


def embedded_pair(examples: int) -> BenchmarkPair:
    """The embedded pair on its own problems, as `configs/embedded.yaml` has it."""
    slm, llm = ModelConfig(path="embedded:slm"), ModelConfig(path="embedded:llm")
    tokenizer = load_tokenizer(slm)
    assert isinstance(tokenizer.eos_token_id, int)
    return BenchmarkPair(
        name="embedded",
        slm=load_model(slm),
        llm=load_model(llm),
        tokenizer=tokenizer,
        prompt=PromptFormat(math="{question}\n", bos="always"),
        collect=CollectConfig(max_new_tokens=150),
        examples=load_examples("embedded:collect", limit=examples).examples,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        eos_token_ids=eos_token_ids(slm) | eos_token_ids(llm),
        masked_ids=(tokenizer.get_vocab()[HANDOFF_TOKEN],),
    )


def random_pair(
    examples: int,
    *,
    layers: tuple[int, int] = (24, 30),
    hidden_size: int | tuple[int, int] = 576,
    feed_forward: int | tuple[int, int] = 1536,
    vocab_size: int = 49152,
    max_new_tokens: int = 48,
    both_wrong_share: float = 0.1,
) -> BenchmarkPair:
    """Random weights in the shape of SmolLM2-135M and of a prune of it, with examples as long as GSM8K's.

    Args:
        examples: how many.
        layers: of the SLM and the LLM.
        hidden_size: a multiple of 64, of both or of each.
        feed_forward: likewise.
        vocab_size: of both.
        max_new_tokens: length of every rollout, since random weights do not stop; about half a reference.
        both_wrong_share: random models are wrong nearly everywhere; this many positions are taken as both wrong.
    """
    widths, forwards = (value if isinstance(value, tuple) else (value, value) for value in (hidden_size, feed_forward))
    slm, llm = (
        _random_llama(SEED + index, layers[index], widths[index], forwards[index], vocab_size) for index in (0, 1)
    )
    return BenchmarkPair(
        name=f"random {layers[1]}x{widths[1]}",
        slm=slm,
        llm=llm,
        tokenizer=NumberTokenizer(),
        prompt=PromptFormat(math="{question}", bos="never"),
        collect=CollectConfig(max_new_tokens=max_new_tokens),
        examples=_random_examples(examples, vocab_size),
        vocab_size=vocab_size,
        eos_token_id=EOS_ID,
        eos_token_ids=frozenset([EOS_ID]),
        both_wrong_share=both_wrong_share,
    )


class NumberTokenizer:
    """Ids written as numbers with spaces between: a random model needs a vocabulary, and no words."""

    bos_token_id: int | None = None
    chat_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The numbers in the text."""
        return [int(number) for number in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The ids as numbers."""
        return " ".join(map(str, ids))


def _random_llama(seed: int, layers: int, hidden_size: int, feed_forward: int, vocab_size: int) -> PreTrainedModel:
    """Head size 64 and three query heads for each pair of key and value heads, where that divides, as SmolLM2 has."""
    heads = hidden_size // 64
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval().requires_grad_(False)
    return model


def _random_examples(count: int, vocab_size: int) -> tuple[Example, ...]:
    """Prompts of 100 to 150 ids and references of 60 to 100, about as long as those of GSM8K."""
    generator = np.random.default_rng(SEED)

    def numbers(low: int, high: int) -> str:
        length = int(generator.integers(low, high, endpoint=True))
        return " ".join(map(str, generator.integers(3, vocab_size, length).tolist()))

    return tuple(
        Example(id=str(index), prompt=numbers(100, 150), reference=numbers(60, 100), answer="0", task="math")
        for index in range(count)
    )
