"""Other pairs behind the same server: a bigger one of random weights, and paced engines without any arithmetic.

Everything goes over HTTP, the LLM alone included: it is served by the same stack on the same cores. Read by `serving`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import GenerationConfig

from benchmarks.harness import Quotient
from benchmarks.paced_pair import SECONDS
from benchmarks.pairs import random_pair
from benchmarks.untrained_router import QUESTIONS
from citer_ray.config import ModelConfig
from citer_ray.pair.models import load_tokenizer

SAMPLED = 1.0  # temperature
PACED = "engine.factory=benchmarks.paced_pair:build"


def bigger_pair(folder: Path, *, short: bool) -> list[str]:
    """Write a pair of random weights with the embedded tokenizer; returns the settings that name it."""
    tokenizer = load_tokenizer(ModelConfig(path="embedded:slm"))
    width, layers = ((64, 128), (2, 4)) if short else ((256, 896), (4, 24))
    pair = random_pair(
        1,
        layers=layers,
        hidden_size=width,
        feed_forward=(4 * width[0], 4 * width[1]),
        vocab_size=len(tokenizer),
    )
    for role, model in (("slm", pair.slm), ("llm", pair.llm)):
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model.config.update(ends)
        model.generation_config = GenerationConfig(**ends)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return [f"pair.{role}.path={folder / role}" for role in ("slm", "llm")]


def threshold_for(address: str, share: float, tokens: int, temperature: float) -> float:
    """The threshold at which the first stream gives the LLM a share, by bisection among the scores of the SLM alone.

    A quantile of these would do for a trained pair; with random weights the LLM's tokens change the scores that follow.
    """
    with httpx.Client(base_url=address, timeout=600) as http:

        def ask(threshold: float) -> dict[str, Any]:
            body = _body("routed", 0, tokens, {"threshold": threshold}, temperature)
            response = http.post("/v1/chat/completions", json=body | {"citer": {"trace": True}})
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            return answer

        written = ask(0.0)["choices"][0]["citer"]["tokens"]
        scores = np.sort([token["p_slm"] for token in written])
        low, high, best = 0, len(scores) - 1, (2.0, 0.0)
        while low <= high:
            middle = (low + high) // 2
            found = float(ask(float(scores[middle]))["usage"]["citer"]["llm_share"])
            best = min(best, (abs(found - share), float(scores[middle])))
            low, high = (low, middle - 1) if found > share else (middle + 1, high)
        return best[1]


def against_llm_alone(
    name: str,
    address: str,
    threshold: float,
    streams: int,
    tokens: tuple[int, int],
    repeats: int,
    targets: tuple[float, float] | None,
    step_ratio: Callable[[float, float], tuple[float, float]] | None = None,
    temperature: float = 0.0,
) -> Iterator[Quotient]:
    """Routed streams over HTTP against the LLM alone, and the part of the ideal that is reached.

    Args:
        name: for the table.
        address: of the server.
        threshold: of routed requests.
        streams: at the same time.
        tokens: of one routed response, and of one of the LLM alone.
        repeats: turns.
        targets: of the ideal, and against the LLM alone; None is not judged.
        step_ratio: seconds of a step of either model from those that a token of the SLM and of the LLM alone took over
            HTTP; None takes these.
        temperature: of all requests.
    """
    rates: list[tuple[float, float, float]] = []
    shares: list[float] = []
    for _ in range(repeats):
        routed, share = asyncio.run(_rate(address, "routed", streams, tokens[0], threshold, temperature))
        alone, _ = asyncio.run(_rate(address, "llm", streams, tokens[1], threshold, temperature))
        slm, _ = asyncio.run(_rate(address, "slm", streams, tokens[0], threshold, temperature))
        rates.append((routed, alone, slm))
        shares.append(share)
    routed, alone, slm = (statistics.median(column) for column in zip(*rates, strict=True))
    share = statistics.mean(shares)
    # Seconds a token of one stream.
    slm_step, llm_step = streams / slm, streams / alone
    if step_ratio is not None:
        slm_step, llm_step = step_ratio(slm_step, llm_step)
    ideal = streams / (slm_step + share * llm_step)
    facts = {"share": round(share, 3), "slm_step_s": slm_step, "llm_step_s": llm_step, "rates": rates}
    of_ideal, over_llm = targets or (None, None)
    yield Quotient(f"{name}: of the ideal", routed, ideal, "tokens/s", of_ideal, settings=facts)
    yield Quotient(f"{name}: against LLM only", routed, alone, "tokens/s", over_llm, settings=facts)


def paced_steps(slm: float, llm: float) -> tuple[float, float]:
    """Seconds of a pass, which paced engines have by definition."""
    return SECONDS["slm"], SECONDS["llm"]


async def _rate(
    address: str, model: str, streams: int, tokens: int, threshold: float, temperature: float
) -> tuple[float, float]:
    """Tokens a second of all streams together, and their LLM share."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:

        async def one(index: int) -> float:
            routing = {"threshold": threshold} if model == "routed" else {}
            body = _body(model, index, tokens, routing, temperature)
            response = await http.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            return float(response.json()["usage"]["citer"]["llm_share"])

        work: list[Coroutine[Any, Any, float]] = [one(index) for index in range(streams)]
        began = time.perf_counter()
        shares = await asyncio.gather(*work)
        return streams * tokens / (time.perf_counter() - began), statistics.mean(shares)


def _body(model: str, index: int, tokens: int, routing: dict[str, float], temperature: float) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{QUESTIONS[index % len(QUESTIONS)]} {index}"}],
        "temperature": temperature,
        "seed": index,
        "ignore_eos": True,
        "max_tokens": tokens,
        **routing,
    }
