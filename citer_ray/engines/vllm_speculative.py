"""vLLM's own speculative decoding of the LLM, measured for comparison with routing.

Speculation writes what the LLM alone would write, so a row of it is about speed: tokens a second, and how many drafted
tokens stood. A method that vLLM refuses on this machine is a row with the reason. Called by evaluation and by
`benchmarks/vllm.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from citer_ray.decoding import Request, decode_many
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.engines.vllm_launch import Speculation
from citer_ray.errors import ConfigError, PairError
from citer_ray.policy import AlwaysLlm

Method = Literal["none", "ngram", "draft_model"]
METHODS: tuple[Method, ...] = ("none", "ngram", "draft_model")


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """One method.

    Attributes:
        method: `none` is the LLM alone.
        responses: token ids, in the order of the prompts; None if vLLM refused the method.
        seconds: wall-clock time of all responses.
        drafted: tokens proposed.
        accepted: tokens of these that stood.
        refused: why there is no result.
    """

    method: Method
    responses: tuple[tuple[int, ...], ...] | None = None
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    refused: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None if vLLM refused the method."""
        if self.responses is None:
            return None
        return sum(map(len, self.responses)) / self.seconds


Start = Callable[[Speculation | None], VLLMEngine]  # starts the LLM's engine with a speculation, or without one


async def measure_speculation(
    start: Start,
    draft_model: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    in_flight: int = 1,
    num_tokens: int = 4,
    methods: Sequence[Method] = METHODS,
) -> AsyncIterator[SpeculationRow]:
    """Decode the prompts with each method, one engine after the other.

    Args:
        start: starts the LLM's engine; called once a method, and the engine is closed before the next.
        draft_model: folder or hub name of the SLM.
        prompts: token ids.
        max_new_tokens: limit of a response.
        in_flight: responses decoded at once.
        num_tokens: tokens drafted a step.
        methods: in the order of the rows.
    """
    requests = [Request(prompt, AlwaysLlm(), max_new_tokens) for prompt in prompts]
    for method in methods:
        try:
            engine = await asyncio.to_thread(start, speculation_of(method, draft_model, num_tokens))
        except (ConfigError, PairError) as error:
            yield SpeculationRow(method, refused=str(error))
            continue
        try:
            await decode_many(None, engine, requests[:1], in_flight=1)  # first uses are slow
            drafted, accepted = engine.watch.num_drafted, engine.watch.num_accepted
            began = time.perf_counter()
            traces = await decode_many(None, engine, requests, in_flight=in_flight)
            yield SpeculationRow(
                method,
                tuple(tuple(trace.token_ids) for trace in traces),
                time.perf_counter() - began,
                engine.watch.num_drafted - drafted,
                engine.watch.num_accepted - accepted,
            )
        finally:
            await engine.close()


def speculation_of(method: Method, draft_model: str, num_tokens: int) -> Speculation | None:
    """The engine's option for a method."""
    if method == "none":
        return None
    return Speculation(method, draft_model if method == "draft_model" else None, num_tokens)
