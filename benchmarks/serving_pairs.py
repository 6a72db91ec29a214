"""Other pairs behind the same server: a bigger one of random weights, and paced engines without any arithmetic.

Everything goes over HTTP, the LLM alone included: it is served by the same stack on the same cores. Read by `serving`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


def bigger_against_llm_alone(
    address: str, threshold: float, tokens: tuple[int, int], repeats: int, targets: tuple[float, float] | None
) -> Iterator[Quotient]:
    """One routed stream of the bigger pair against the LLM alone, and the part of the ideal that is reached.

    Args:
        address: of the server.
        threshold: of routed requests.
        tokens: of one routed response, and of one of the LLM alone.
        repeats: turns.
        targets: of the ideal, and against the LLM alone; None is not judged.
    """
    rates: list[tuple[float, ...]] = []
    shares: list[float] = []
    for _ in range(repeats):
        routed, alone, slm = (
            asyncio.run(_one_response(address, model, length, threshold))
            for model, length in (("routed", tokens[0]), ("llm", tokens[1]), ("slm", tokens[0]))
        )
        rates.append((routed.rate, alone.rate, slm.rate))
        shares.append(routed.share)
    alone_rate, slm_rate = (statistics.median(column) for column in list(zip(*rates, strict=True))[1:])
    seconds = Steps(1 / slm_rate, 1 / alone_rate)
    yield from _quotients("bigger: 1 stream over HTTP", 1, rates, statistics.mean(shares), seconds, targets)


def paced_against_llm_alone(
    address: str, streams: int, share: float, seconds: float, repeats: int, targets: tuple[float, float] | None
) -> Iterator[Quotient]:
    """The same for streams on paced engines, whose steps are known; streams follow each other, and a window counts.

    Args:
        address: of the server.
        streams: at the same time.
        share: of the LLM.
        seconds: of the window.
        repeats: turns.
        targets: of the ideal, and against the LLM alone; None is not judged.
    """
    rates: list[tuple[float, ...]] = []
    shares: list[float] = []
    for _ in range(repeats):
        routed, alone = (
            asyncio.run(_window(address, model, streams, length, share, seconds))
            for model, length in (("routed", 250), ("llm", 100))
        )
        rates.append((routed.rate, alone.rate))
        shares.append(routed.share)
    known = Steps(SECONDS["slm"], SECONDS["llm"])
    name = f"paced: {streams} streams over HTTP"
    yield from _quotients(name, streams, rates, statistics.mean(shares), known, targets)


class Steps(NamedTuple):
    """Seconds of a pass of either model."""

    slm: float
    llm: float


class _Rate(NamedTuple):
    """Tokens a second of all streams together, and their LLM share."""

    rate: float
    share: float


def _quotients(
    name: str,
    streams: int,
    rates: list[tuple[float, ...]],
    share: float,
    seconds: Steps,
    targets: tuple[float, float] | None,
) -> Iterator[Quotient]:
    routed, alone = (statistics.median(column) for column in list(zip(*rates, strict=True))[:2])
    ideal = streams / (seconds.slm + share * seconds.llm)
    facts = {"share": round(share, 3), "slm_step_s": seconds.slm, "llm_step_s": seconds.llm, "rates": rates}
    of_ideal, over_llm = targets or (None, None)
    yield Quotient(f"{name}: of the ideal", routed, ideal, "tokens/s", of_ideal, settings=facts)
    yield Quotient(f"{name}: against LLM only", routed, alone, "tokens/s", over_llm, settings=facts)


async def _one_response(address: str, model: str, tokens: int, threshold: float) -> _Rate:
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        began = time.perf_counter()
        share = await _ask(http, model, 0, tokens, threshold, SAMPLED)
        return _Rate(tokens / (time.perf_counter() - began), share)


async def _window(address: str, model: str, streams: int, tokens: int, share: float, seconds: float) -> _Rate:
    """Responses one after the other in each stream, counted in a window after they have fallen out of step.

    A response that reaches beyond the window counts in part. Without a window the last responses would be decoded by
    ever fewer streams.
    """
    spans: list[tuple[float, float, float]] = []
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        clock = time.perf_counter
        first = clock() + seconds / 3
        last = first + seconds

        async def one(index: int) -> None:
            while (began := clock()) < last:
                found = await _ask(http, model, index, tokens, share, 0.0)
                spans.append((began, clock(), found))

        await asyncio.gather(*(one(index) for index in range(streams)))
    counted = [tokens * max(0.0, min(end, last) - max(began, first)) / (end - began) for began, end, _ in spans]
    by_llm = sum(number * found for number, (_, _, found) in zip(counted, spans, strict=True))
    return _Rate(sum(counted) / seconds, by_llm / sum(counted))


async def _ask(
    http: httpx.AsyncClient, model: str, index: int, tokens: int, threshold: float, temperature: float
) -> float:
    """A response of a stream, which is not kept; returns its LLM share."""
    routing = {"threshold": threshold} if model == "routed" else {}
    response = await http.post("/v1/chat/completions", json=_body(model, index, tokens, routing, temperature))
    response.raise_for_status()
    return float(response.json()["usage"]["citer"]["llm_share"])


def _body(model: str, index: int, tokens: int, routing: dict[str, float], temperature: float) -> dict[str, Any]:
    content = f"{QUESTIONS[index % len(QUESTIONS)]} {index}"
    return chat_body(model, content, tokens, temperature=temperature, seed=index, **routing)


def chat_body(model: str, content: str, tokens: int, **fields: object) -> dict[str, Any]:
    """A request for exactly so many tokens."""
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "ignore_eos": True, "max_tokens": tokens, **fields}
