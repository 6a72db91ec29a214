"""vLLM engines of a benchmark's pair: weights on disk, engines started when they are first needed, closed at the end.

Each engine has a core of its own where the machine has two, and one thread, like the loops that it is compared with.
Read by `vllm.py` and `vllm_routing.py`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.pairs import BenchmarkPair, embedded_pair, random_pair
from citer_ray.engine import Engine
from citer_ray.engines.build import Purpose, Role
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_launch import Speculation, VLLMOptions

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class VLLMPair(BenchmarkPair):
    """A pair whose engines are vLLM's; made by `vllm_pair`.

    Attributes:
        folder: where the weights are written.
        compiled: vLLM compiles the models, which is its default; without, engines start sooner.
        started: the engines so far.
    """

    folder: Path = Path()
    compiled: bool = True
    started: dict[tuple[Role, Purpose], VLLMEngine] = field(default_factory=dict)

    async def engine(self, model: PreTrainedModel, purpose: Purpose = "decode") -> Engine:
        """The pair's one engine of a kind, without the prefixes of earlier runs."""
        engine = self.start("slm" if model is self.slm else "llm", purpose)
        await engine.reset_prefix_cache()
        return engine

    def start(self, role: Role, purpose: Purpose = "decode") -> VLLMEngine:
        """The engine of a role, started if it is not there."""
        if (role, purpose) not in self.started:
            self.started[role, purpose] = self.launch(role, purpose, None)
        return self.started[role, purpose]

    def weights(self, role: Role) -> str:
        """The folder of a model's weights."""
        folder = self.folder / role
        if not folder.exists():
            (self.slm if role == "slm" else self.llm).save_pretrained(folder)
        return str(folder)

    def launch(self, role: Role, purpose: Purpose, speculation: Speculation | None) -> VLLMEngine:
        """A new engine, which the caller closes."""
        return VLLMEngine(
            self.weights(role),
            shared_vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            # Random weights know no reserved token; the last id will do.
            handoff_token_id=self.masked_ids[0] if self.masked_ids else self.vocab_size - 1,
            masked_ids=self.masked_ids,
            purpose=purpose,
            options=VLLMOptions(
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=256,
                kv_cache_gib=1.0,
                enforce_eager=not self.compiled,
                cores=core_of(role),
                speculation=speculation,
                extra={"max_num_batched_tokens": 4096},
            ),
        )

    def close(self, *keep: tuple[Role, Purpose]) -> None:
        """Stop the engines, but for those to keep."""
        for key in [key for key in self.started if key not in keep]:
            asyncio.run(self.started.pop(key).close())


def core_of(role: Role) -> tuple[int, ...]:
    """The first core for the SLM, the second for the LLM."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0],) if role == "slm" else (cores[1 % len(cores)],)


@contextmanager
def vllm_pair(pair: BenchmarkPair, *, compiled: bool) -> Iterator[VLLMPair]:
    """The pair with vLLM engines, which are stopped at the end."""
    with tempfile.TemporaryDirectory() as folder:
        values = {one.name: getattr(pair, one.name) for one in fields(pair)}
        made = VLLMPair(**{**values, "name": f"vLLM, {pair.name}"}, folder=Path(folder), compiled=compiled)
        try:
            yield made
        finally:
            made.close()


def make_pair(name: str, examples: int, short: bool) -> BenchmarkPair:
    """The embedded pair, or one of random weights whose LLM is really bigger."""
    if name == "embedded":
        return embedded_pair(examples)
    if short:
        return random_pair(
            examples,
            layers=(1, 2),
            hidden_size=(64, 128),
            feed_forward=(128, 256),
            vocab_size=512,
            max_new_tokens=8,
        )
    return random_pair(examples, layers=(4, 24), hidden_size=(256, 896), feed_forward=(1024, 4864), vocab_size=32000)
