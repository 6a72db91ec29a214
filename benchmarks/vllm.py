"""The vLLM engine: label scoring and rollouts against token loops, routed decoding against the LLM alone.

Parts, by the word that `--part` takes: `head` (what the router adds to the SLM's step), `paced` (scheduling without
arithmetic, `paced.py`), `scoring` and `rollouts` (as in `collect.py`, on vLLM), `routed` (`vllm_routing.py`) and
`speculation`. Needs vLLM and, for two engines, two cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.collect import Plan, measure_rollouts, measure_scoring
from benchmarks.harness import Options, Quotient, Result
from benchmarks.paced import PacedEngine, run_virtually
from benchmarks.paced_pair import SECONDS
from benchmarks.vllm_engines import VLLMPair, make_pair, vllm_pair
from benchmarks.vllm_routing import SHARE, Work, measure_routing
from citer_ray.config import RouterConfig
from citer_ray.decoding import Request, decode_many
from citer_ray.engines.vllm_settings import ModelSettings
from citer_ray.engines.vllm_speculative import SpeculationRow, measure_speculation
from citer_ray.policy import AlwaysLlm, Policy, random_policy
from citer_ray.router import Router

# About 256 both-wrong states: 3 a problem on the embedded pair, a tenth of 80 positions on the random one.
EMBEDDED = Plan(78, 4, 16, score_target=25, rollout_target=10)
RANDOM = Plan(32, 1, 8, score_target=8, rollout_target=5)
SHORT = Plan(3, 1, 2, score_target=None, rollout_target=None)
_SEEDS = (1, 2, 3)
_SLM_SECONDS, _LLM_SECONDS = SECONDS["slm"], SECONDS["llm"]


def run(options: Options) -> Iterator[Result]:
    """All parts that are asked for."""
    if options.wants("head"):
        yield measure_head(options)
    if options.wants("paced"):
        for streams in (1, 4, 32):
            yield from measure_paced(streams, options)
    if not any(options.wants(part) for part in ("scoring", "rollouts", "routed", "speculation")):
        return
    for name in options.pairs:
        plan = SHORT if options.short else {"embedded": EMBEDDED, "random": RANDOM}[name]
        with vllm_pair(make_pair(name, plan.examples, options.short), compiled=not options.short) as pair:
            yield from _pair_results(name, pair, plan, options)


def _pair_results(name: str, pair: VLLMPair, plan: Plan, options: Options) -> Iterator[Result]:
    if options.wants("scoring"):
        yield replace(measure_scoring(pair, plan, options.repeats), in_process=False)
    if options.wants("rollouts"):
        yield replace(measure_rollouts(pair, plan, options.repeats), in_process=False)
    pair.close(("slm", "decode"))
    if options.wants("routed") and name == "random":
        work = Work(16, 4, 4) if options.short else Work()
        streams = (1, 2) if options.short else (1, 4, 16)
        yield from measure_routing(pair, work, streams, options.repeats, judged=not options.short)
    pair.close()
    if options.wants("speculation") and name == "embedded":
        yield from speculation_results(pair, options)


def speculation_results(pair: VLLMPair, options: Options) -> Iterator[Result]:
    """vLLM's methods on the LLM, one stream, against the LLM alone."""
    examples = pair.examples[: 2 if options.short else 16]
    prompts = [pair.prompt.encode_prompt(example, pair.tokenizer) for example in examples]

    async def rows() -> list[SpeculationRow]:
        measured = measure_speculation(
            lambda speculation: pair.launch("llm", "decode", speculation),
            pair.weights("slm"),
            prompts,
            max_new_tokens=16 if options.short else 100,
        )
        return [row async for row in measured]

    alone, *others = asyncio.run(rows())
    for row in others:
        same = row.responses == alone.responses
        note = row.refused or f"{'same' if same else 'other'} responses, {row.accepted}/{row.drafted} drafts stood"
        name = f"{pair.name}: speculation, {row.method}"
        yield Quotient(name, row.tokens_per_second, alone.tokens_per_second, "tokens/s", note=note)


def measure_paced(streams: int, options: Options) -> Iterator[Result]:
    """Routed decoding on paced engines: against the ideal, against the LLM alone, and with visits held back."""
    seconds = 5.0 if options.short else 15.0

    def rate(policy: Policy, hold: float = 0.0, max_tokens: int | None = None) -> tuple[float, float]:
        """Tokens a second in the steady state, and the LLM's share."""
        slm = PacedEngine(_SLM_SECONDS)
        llm = PacedEngine(_LLM_SECONDS, hold=hold, max_tokens=max_tokens)
        work = _window(slm, llm, policy, streams, seconds)
        return run_virtually(work)[0] if options.short else asyncio.run(work)

    # One seed's share of a window is off by a few percent, and so is its rate.
    routed, share = np.mean([rate(random_policy(SHARE, seed)) for seed in _SEEDS], axis=0).tolist()
    alone, _ = rate(AlwaysLlm())
    ideal = streams / (_SLM_SECONDS + share * _LLM_SECONDS)
    name = f"paced, {streams} stream{'s' if streams > 1 else ''}"
    settings = {"share": round(share, 3), "slm_pass_s": _SLM_SECONDS, "llm_pass_s": _LLM_SECONDS}
    judged = not options.short
    yield Quotient(f"{name}: of the ideal", routed, ideal, "tokens/s", 0.7 if judged else None, settings=settings)
    yield Quotient(f"{name}: against LLM only", routed, alone, "tokens/s", 2.3 if judged else None, settings=settings)
    if streams > 1:
        held = float(np.mean([rate(random_policy(SHARE, seed), hold=1.0)[0] for seed in _SEEDS]))
        yield Quotient(f"{name}: visits held back, of the ideal", held, ideal, "tokens/s", settings=settings)
        narrow, _ = rate(random_policy(SHARE, 1), max_tokens=64)
        narrow_alone, _ = rate(AlwaysLlm(), max_tokens=64)
        yield Quotient(f"{name}: LLM passes of 64 tokens, against LLM only", narrow, narrow_alone, "tokens/s")


async def _window(
    slm: PacedEngine, llm: PacedEngine, policy: Policy, streams: int, seconds: float
) -> tuple[float, float]:
    """Responses without end, counted for a while after they have fallen out of step."""
    prompts = np.random.default_rng(5).integers(5, 1000, (streams, 32)).tolist()
    endless = [Request(prompt, policy, 1 << 18) for prompt in prompts]
    task = asyncio.create_task(decode_many(slm, llm, endless, in_flight=streams))
    await asyncio.sleep(seconds / 5)
    clock = asyncio.get_running_loop().time
    before, began = (slm.num_written, llm.num_written), clock()
    await asyncio.sleep(seconds)
    by_slm, by_llm = slm.num_written - before[0], llm.num_written - before[1]
    elapsed = clock() - began
    task.cancel()
    await asyncio.wait([task])
    return (by_slm + by_llm) / elapsed, by_llm / (by_slm + by_llm)


def measure_head(options: Options) -> Result:
    """The router's part of a step of a model like Qwen2-1.5B with 32 responses, float32, without attention's reads."""
    from citer_ray.engines.vllm_routed import RouterHead

    width, rows, layers = (64, 4, 2) if options.short else (1536, 32, 28)
    vocab_size = 512 if options.short else 151936
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width * 35 // 6,
        num_hidden_layers=2,
        num_attention_heads=12 if width == 1536 else 2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    head = RouterHead(ModelSettings(vocab_size - 1, (vocab_size - 1,), vocab_size - 1, None))
    head.use(Router(width, RouterConfig(), generator=torch.Generator().manual_seed(0)).eval())
    ids_B1, hidden_BH = torch.full((rows, 1), 7), torch.randn(rows, width)
    logits_BV = torch.randn(rows, vocab_size)
    with torch.inference_mode():
        decoder = _median_seconds(lambda: model.model(ids_B1, use_cache=False))
        logits = _median_seconds(lambda: model.lm_head(hidden_BH))
        router = _median_seconds(lambda: head.logits(hidden_BH, logits_BV))
    step = decoder / config.num_hidden_layers * layers + logits
    return Quotient(
        f"router head, hidden size {width}, {rows} responses",
        1000 * router,
        1000 * step,
        "ms",
        None if options.short else 0.03,
        at_most=True,
        settings={"layers": layers, "vocab_size": vocab_size, "dtype": "float32"},
    )


def _median_seconds(work: object, repeats: int = 5) -> float:
    assert callable(work)
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))
