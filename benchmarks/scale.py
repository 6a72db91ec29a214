"""How a collection scales: the simulation against runs on this machine, its predictions for GPUs, and memory.

Parts: `workers` (simulated and measured, with one and two workers for rollouts), `gpus` (8 to 512, Qwen2-1.5B and 72B
on GSM8K), `memory` (15,000 and 50,000 examples). docs/scale.md explains the numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness import Options, Quotient
from benchmarks.scale_prediction import SIZES, Pair, Prediction, Site, token_by_token_hours
from benchmarks.scale_times import GPUS, Batching
from benchmarks.scale_work import GSM8K

LLM_SHARE = 0.3  # of the rollouts in a later round
AUTHORS_EXAMPLES = 1869  # that they label
ERROR = 1.2  # of the simulation, at most


def run(options: Options) -> Iterator[Quotient]:
    """The parts that are asked for."""
    if options.wants("workers"):
        yield from _workers(options)
    if options.wants("gpus"):
        yield from _gpus(options)
    if options.wants("memory"):
        yield from _memory(options)


# -- measured ------------------------------------------------------------------------------------------------------


def _workers(options: Options) -> Iterator[Quotient]:
    from benchmarks.scale_measured import collect, config_of, measure_times

    examples, calibrated = (16, 1) if options.short else (1280, 8)
    with tempfile.TemporaryDirectory(prefix="citer-scale-") as name:
        folder = Path(name)
        config = config_of(folder / "times", examples, 1)
        measured = measure_times(config, calibrated)
        chunks = -(-examples // config.collect.examples_per_chunk)
        batching = Batching(config.engine.max_pass_tokens, config.collect.rollouts_in_flight)
        for workers in (1,) if options.short else (1, 2):
            found = collect(config_of(folder / f"workers-{workers}", examples, workers))
            predicted = measured.predict(chunks, workers, found.cores, batching)
            settings = {
                "simulated_s": predicted.seconds,
                "measured_s": found.seconds,
                "cores_left": found.cores,
                "cpu_s": found.cpu,
                "bottleneck": predicted.bottleneck,
                "load_s": measured.load_s,
                "handling_s": measured.handling_s,
                "grading_s": measured.grading_s,
                "parts_s": predicted.parts,
                "step": asdict(measured.step),
            }
            high, low = max(predicted.seconds, found.seconds), min(predicted.seconds, found.seconds)
            yield Quotient(
                f"workers: {workers}, simulated against measured",
                high,
                low,
                "s",
                target=None if options.short else ERROR,
                at_most=True,
                note=f"simulated {predicted.seconds:.0f} s",
                settings=settings,
            )


# -- predicted -----------------------------------------------------------------------------------------------------


def _gpus(options: Options) -> Iterator[Quotient]:
    """Hours of round 1; the reference is the same labels token by token on as many GPUs."""
    workload = replace(GSM8K, examples=300) if options.short else GSM8K
    pair = Pair.qwen2(Site(GPUS["h100"]), workload)
    loop = token_by_token_hours(pair, 8)
    for gpus in SIZES[:2] if options.short else SIZES:
        found = pair.first_round(gpus)
        yield _prediction(f"gpus: {gpus} H100, round 1", found, loop * 8 / gpus)
        yield _prediction(f"gpus: {gpus} H100, routed round", pair.later_round(gpus, LLM_SHARE, 32), None)
    authors = Pair.qwen2(pair.site, replace(workload, examples=min(AUTHORS_EXAMPLES, workload.examples)))
    for overhead_s in (0.003, 0.02):
        yield Quotient(
            f"gpus: 8 H100, {authors.workload.examples} examples, a pass {1000 * overhead_s:g} ms at least",
            authors.first_round(8).hours,
            token_by_token_hours(authors, 8, pass_overhead_s=overhead_s),
            "h",
            note="reference: token by token",
        )


def _prediction(name: str, found: Prediction, reference: float | None) -> Quotient:
    return Quotient(
        name,
        found.hours,
        reference,
        "h",
        note=found.outcome.bottleneck,
        settings={
            "pools": found.pools,
            "examples_per_chunk": found.chunk,
            "gpu_hours": found.gpu_hours,
            "dollars": found.dollars,
            "parts_s": found.outcome.parts,
        },
    )


# -- memory --------------------------------------------------------------------------------------------------------


def _memory(options: Options) -> Iterator[Quotient]:
    from benchmarks.scale_memory import measure

    sizes = (100, 400) if options.short else (15_000, 50_000)
    with tempfile.TemporaryDirectory(prefix="citer-memory-") as name:
        few, many = (measure(size, Path(name) / str(size)) for size in sizes)
    settings = {"few": asdict(few), "many": asdict(many)}
    for part, target in (("driver", 1.2), ("store", 1.5), ("worker", 1.2)):
        yield Quotient(
            f"memory: {part}, {many.examples:,} examples against {few.examples:,}",
            getattr(many, part),
            getattr(few, part),
            "MiB",
            target=None if options.short else target,
            at_most=True,
            note=f"hidden states {many.hidden:,.0f} MiB",
            settings=settings,
        )
