"""Routed decoding on vLLM against the LLM alone, on the same engines and cores, with a policy of a fixed LLM share.

One stream: how much of the ideal 1 / (share + r) is reached, r being the SLM's step over the LLM's, and what the loop
adds to the passes' own time. Several streams: as they are; a CPU's pass is bound by arithmetic beyond a few tokens, and
a visit computes every token that the SLM wrote, so routing cannot save much there. Read by `vllm.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import Comparison, Quotient, Result, Run
from benchmarks.vllm_engines import VLLMPair
from citer_ray.decoding import Request, Trace, decode_many
from citer_ray.engine import Sampling
from citer_ray.engines.build import freeze_startup_objects
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.policy import AlwaysLlm, Policy, Writer, random_policy

SHARE = 0.2
PROMPT = 32  # tokens
_FREE = Sampling(ignore_eos=True)
_FILLER = 7  # a token


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that one response writes, and how often passes are timed."""

    routed_tokens: int = 192
    llm_tokens: int = 40
    timed_passes: int = 40

    def of_several(self) -> Work:
        """Less, where several streams share it."""
        return replace(self, routed_tokens=self.routed_tokens // 3, llm_tokens=self.llm_tokens // 2)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one pass over one response: a step of either model, and a visit of the LLM."""

    slm_step: float
    llm_step: float
    visit: float


def measure_routing(pair: VLLMPair, work: Work, streams: Sequence[int], repeats: int, judged: bool) -> Iterator[Result]:
    """One line for each number of streams; for a single one, also the part of the ideal and the loop's overhead."""
    slm, llm = pair.start("slm"), pair.start("llm")
    prompts = _prompts(max(streams), pair.vocab_size)
    whole = work
    for number in streams:
        work = whole if number == 1 else whole.of_several()
        asyncio.run(_warm_up(slm, llm, prompts[:number]))
        freeze_startup_objects()  # as workers do
        turns = [asyncio.run(_turn(slm, llm, prompts[:number], work, seed)) for seed in range(repeats)]
        name = f"{pair.name}: routed, {number} stream{'s' if number > 1 else ''}"
        routed, alone = [turn[0] for turn in turns], [turn[1] for turn in turns]
        traces = [trace for turn in turns for trace in turn[2]]
        share = sum(trace.visits for trace in traces) / sum(len(trace.token_ids) for trace in traces)
        target = 2.5 if judged and number == 1 else None
        settings = {"share": round(share, 3)}
        agreement = (len(traces), len(traces))
        yield Comparison(name, target, tuple(routed), tuple(alone), agreement, settings, in_process=False)
        if number == 1:
            yield from _against_the_ideal(name, turns, share, judged)
        else:
            yield _held_back(slm, llm, prompts[:number], work, name, alone)


Turn = tuple[Run, Run, list[Trace], PassTimes]


def _against_the_ideal(name: str, turns: list[Turn], share: float, judged: bool) -> Iterator[Result]:
    gains, ideals, factors = [], [], []
    for routed, alone, traces, times in turns:
        gains.append(routed.rate / alone.rate)
        ideals.append(1 / (share + times.slm_step / times.llm_step))
        steps = sum(one.steps for trace in traces for one in trace.passes if one.writer is Writer.SLM)
        visits = sum(trace.visits for trace in traces)
        factors.append(routed.seconds / (steps * times.slm_step + visits * times.visit))
    measured = [turn[3] for turn in turns]
    settings = {
        f"{key}_ms": round(1000 * statistics.median(getattr(one, key) for one in measured), 2)
        for key in ("slm_step", "llm_step", "visit")
    }
    ideal = statistics.median(ideals)
    yield Quotient(
        f"{name}: part of the ideal",
        statistics.median(gains),
        ideal,
        "x LLM only",
        0.85 if judged else None,
        settings=settings,
    )
    yield Quotient(
        f"{name}: time over the passes' own",
        statistics.median(factors),
        1.0,
        "",
        1.15 if judged else None,
        at_most=True,
        settings=settings,
    )


async def _turn(slm: VLLMEngine, llm: VLLMEngine, prompts: list[list[int]], work: Work, seed: int) -> Turn:
    """Both ways once, and the passes' times beside them, since the machine's other load comes and goes."""
    alone, _ = await _timed(slm, llm, prompts, AlwaysLlm(), work.llm_tokens)
    routed, traces = await _timed(slm, llm, prompts, random_policy(SHARE, seed), work.routed_tokens)
    times = PassTimes(
        slm_step=await _step_seconds(slm, prompts[0], work.timed_passes),
        llm_step=await _step_seconds(llm, prompts[0], max(work.timed_passes // 2, 2)),
        visit=await _visit_seconds(llm, traces[0]),
    )
    return routed, alone, traces, times


def _held_back(
    slm: VLLMEngine, llm: VLLMEngine, prompts: list[list[int]], work: Work, name: str, alone: list[Run]
) -> Result:
    """The same with visits that wait for others."""
    llm.gate.hold = 1.0
    try:
        run, _ = asyncio.run(_timed(slm, llm, prompts, random_policy(SHARE, 0), work.routed_tokens))
    finally:
        llm.gate.hold = 0.0
    reference = statistics.median(one.rate for one in alone)
    return Quotient(f"{name}, visits held back", run.rate, reference, "tokens/s")


async def _timed(
    slm: VLLMEngine, llm: VLLMEngine, prompts: list[list[int]], policy: Policy, tokens: int
) -> tuple[Run, list[Trace]]:
    for engine in (slm, llm):
        await engine.reset_prefix_cache()
    requests = [Request(prompt, policy, tokens, _FREE) for prompt in prompts]
    cpu, wall = time.process_time(), time.perf_counter()
    traces = await decode_many(slm, llm, requests, in_flight=len(requests))
    seconds = time.perf_counter() - wall
    written = sum(len(trace.token_ids) for trace in traces)
    return Run(written, seconds, max(time.process_time() - cpu, 1e-9)), traces


async def _warm_up(slm: VLLMEngine, llm: VLLMEngine, prompts: list[list[int]]) -> None:
    await _timed(slm, llm, prompts, random_policy(SHARE, 99), 16)


async def _step_seconds(engine: VLLMEngine, prompt: list[int], count: int) -> float:
    """Seconds a token within one long turn of one session, with the random scorer as in routed decoding."""
    session = await engine.open(prompt, _FREE, scorer="random:0", threshold=0.0)
    first = (await session.turn([], 1)).token_ids
    began = time.perf_counter()
    await session.turn(first, count)
    seconds = time.perf_counter() - began
    await session.close()
    return seconds / count


async def _visit_seconds(engine: VLLMEngine, trace: Trace) -> float:
    """Mean seconds of the visits of a response, done once more without the SLM between them; 0 if it has none.

    Of the same lengths: on a CPU a pass over many tokens takes longer, so the mean visit takes longer than a visit of
    mean length.
    """
    if trace.visits == 0:
        return 0.0
    first, *others = [one.new_tokens for one in trace.passes if one.writer is Writer.LLM]
    session = await engine.open([_FILLER] * first, _FREE)
    began = time.perf_counter()
    await session.turn([], 1)
    for number in others:
        await session.turn([_FILLER] * number, 1)
    seconds = time.perf_counter() - began
    await session.close()
    return seconds / (1 + len(others))


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    ids: list[list[int]] = generator.integers(5, min(vocab_size, 1000) - 1, (count, PROMPT)).tolist()
    return ids
