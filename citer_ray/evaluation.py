"""Decoding and grading examples under many settings of many methods, and what it costs.

Every method is a policy of the one decoding loop (`methods.py` has them all). `on_ray/evaluate.py` spreads chunks of
examples over workers that call `Decoder` here; `points` turns the rows into what `frontier.py` compares.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from citer_ray.answers import grade
from citer_ray.calibration import threshold_for_share
from citer_ray.cost import PairCost, RouterCost
from citer_ray.decoding import Pass, Request, Trace, decode, decode_many
from citer_ray.engine import Engine
from citer_ray.engines.scorers import PROMPT
from citer_ray.examples import Example
from citer_ray.frontier import LLM, ORACLE, RANDOM, SLM, Point
from citer_ray.labelling import response_text
from citer_ray.pass_times import PassTimes
from citer_ray.policy import (
    LLM_ONLY_THRESHOLD,
    AlwaysLlm,
    AlwaysSlm,
    Oracle,
    Policy,
    Threshold,
    Writer,
    random_policy,
)
from citer_ray.prompts import PromptFormat

# Names of the settings that check the two ends of a router's knob.
THRESHOLD_ZERO = "threshold_zero"
THRESHOLD_ABOVE_ONE = "threshold_above_one"

ROW_SCHEMA = pa.schema(
    [
        ("setting", pa.int32()),
        ("example_id", pa.string()),
        ("correct", pa.bool_()),
        ("answered", pa.bool_()),
        ("tokens", pa.int32()),
        ("llm_tokens", pa.int32()),
        ("visits", pa.int32()),
        ("bytes", pa.float64()),
        ("flops", pa.float64()),
        ("response_crc", pa.int64()),
        # What a response's wall time is made of (`pass_times.py`).
        ("slm_passes", pa.int32()),
        ("llm_passes", pa.int32()),
        ("slm_read", pa.int32()),
        ("llm_read", pa.int32()),
        ("decisions", pa.int32()),
        ("drafted", pa.int32()),
        ("judged", pa.int32()),
        ("accepted", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of one method: its knob and the policy that it means."""

    method: str
    knob: float | None
    policy: Policy

    def key(self) -> list[object]:
        """What the measured values depend on, for naming stored results."""
        return [type(self.policy).__name__, sorted(asdict(self.policy).items())]


def end_settings() -> list[Setting]:
    """SLM only and LLM only."""
    return [Setting(SLM, None, AlwaysSlm()), Setting(LLM, None, AlwaysLlm())]


def oracle_setting() -> Setting:
    """The LLM wherever the greedy tokens differ."""
    return Setting(ORACLE, None, Oracle())


def random_settings(llm_shares: Sequence[float], seed: int) -> list[Setting]:
    """The random router at each share."""
    return [Setting(RANDOM, share, random_policy(share, seed)) for share in llm_shares]


def threshold_settings(method: str, scorer: str, thresholds: Iterable[float]) -> list[Setting]:
    """A scorer at each distinct threshold."""
    return [Setting(method, value, Threshold(scorer, value)) for value in sorted(set(thresholds))]


def end_check_settings(scorer: str) -> list[Setting]:
    """A router at threshold 0 and above 1, whose responses must be the SLM's and the LLM's."""
    return [
        Setting(THRESHOLD_ZERO, 0.0, Threshold(scorer, 0.0)),
        Setting(THRESHOLD_ABOVE_ONE, LLM_ONLY_THRESHOLD, Threshold(scorer, LLM_ONLY_THRESHOLD)),
    ]


def aim_thresholds(scores: npt.ArrayLike, llm_shares: Sequence[float]) -> list[float]:
    """Thresholds that aim at LLM shares: quantiles of the scores on the SLM's own responses."""
    return [threshold_for_share(scores, share) for share in llm_shares]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Both engines with all that decoding and grading of examples need.

    Attributes:
        slm: the SLM's engine, with the routers of the settings as scorers.
        llm: the LLM's engine.
        tokenizer: the pair's tokenizer.
        prompt: how examples become prompts.
        eos_token_ids: ids that end a response.
        cost: the pair's cost model, with the router that is priced where `router_costs` has none.
        max_new_tokens: limit of a response.
        in_flight: responses decoded at once.
        router_costs: prices of routers by scorer.
    """

    slm: Engine
    llm: Engine
    tokenizer: Any
    prompt: PromptFormat
    eos_token_ids: frozenset[int]
    cost: PairCost
    max_new_tokens: int
    in_flight: int
    router_costs: Mapping[str, RouterCost] = field(default_factory=dict)

    async def measure(self, settings: Sequence[Setting], examples: Sequence[Example]) -> pa.Table:
        """Decode every example under every setting; one row each, in `ROW_SCHEMA`, settings outermost."""
        prompts = [self.prompt.encode_prompt(example, self.tokenizer) for example in examples]
        requests = [Request(prompt, setting.policy, self.max_new_tokens) for setting in settings for prompt in prompts]
        traces = await decode_many(self.slm, self.llm, requests, in_flight=self.in_flight)
        rows = [
            self._row(
                index // len(examples),
                settings[index // len(examples)],
                examples[index % len(examples)],
                trace,
            )
            for index, trace in enumerate(traces)
        ]
        return pa.Table.from_pylist(rows, ROW_SCHEMA)

    async def traces(self, policies: Sequence[Policy], examples: Sequence[Example]) -> list[list[Trace]]:
        """For every policy, the traces of all examples."""
        prompts = [self.prompt.encode_prompt(example, self.tokenizer) for example in examples]
        requests = [Request(prompt, policy, self.max_new_tokens) for policy in policies for prompt in prompts]
        traces = await decode_many(self.slm, self.llm, requests, in_flight=self.in_flight)
        return [traces[start : start + len(prompts)] for start in range(0, len(traces), max(1, len(prompts)))]

    async def timed(self, setting: Setting, example: Example) -> dict[str, Any]:
        """One response decoded alone: its row, and its wall time as `seconds`."""
        request = Request(self.prompt.encode_prompt(example, self.tokenizer), setting.policy, self.max_new_tokens)
        started = time.perf_counter()
        trace = await decode(self.slm, self.llm, request)
        seconds = time.perf_counter() - started
        return {**self._row(0, setting, example, trace), "seconds": seconds}

    def _row(self, index: int, setting: Setting, example: Example, trace: Trace) -> dict[str, object]:
        text = response_text(trace.token_ids, self.tokenizer, self.eos_token_ids)
        verdict = grade(text, example)
        slm, llm = (single_passes(trace.passes, writer) for writer in (Writer.SLM, Writer.LLM))
        scorer, decisions = routed_decisions(setting.policy, trace)
        cost = replace(self.cost, router=self.router_costs.get(scorer, self.cost.router)).response(
            slm, llm, decisions=decisions
        )
        return {
            "setting": index,
            "example_id": example.id,
            "correct": verdict.correct,
            "answered": verdict.answered,
            "tokens": len(trace.token_ids),
            "llm_tokens": trace.num_llm_tokens,
            "visits": trace.visits,
            "bytes": cost.num_bytes,
            "flops": cost.flops,
            "response_crc": zlib.crc32(np.asarray(trace.token_ids, np.int64).tobytes()),
            "slm_passes": len(slm),
            "llm_passes": len(llm),
            "slm_read": sum(new for new, _ in slm),
            "llm_read": sum(new for new, _ in llm),
            "decisions": decisions,
            "drafted": trace.drafted,
            "judged": trace.judged,
            "accepted": trace.accepted,
        }


def routed_decisions(policy: Policy, trace: Trace) -> tuple[str, int]:
    """The scorer of a policy that asks a router, and how often the router was asked; else an empty name and 0."""
    scorer = policy.scorer if isinstance(policy, Threshold) else ""
    is_query = scorer.startswith(PROMPT)
    if not scorer.removeprefix(PROMPT).startswith("router"):
        return "", 0
    return scorer.removeprefix(PROMPT), 1 if is_query else sum(score is not None for score in trace.scores)


def single_passes(passes: Sequence[Pass], writer: Writer) -> list[tuple[int, int]]:
    """(new tokens, cached tokens) of every forward pass of one model."""
    singles = []
    for one in passes:
        if one.writer is writer:
            held = one.cached_tokens + one.new_tokens
            singles += [
                (one.new_tokens, one.cached_tokens),
                *((1, held + step) for step in range(one.steps - 1)),
            ]
    return singles


def points(
    rows: pa.Table, settings: Sequence[Setting], example_ids: Sequence[str], times: PassTimes | None = None
) -> dict[str, list[Point]]:
    """The measured points of every method, all over the same examples in the same order.

    Args:
        rows: of `Decoder.measure`.
        settings: what `rows` number.
        example_ids: the order.
        times: what a pass takes; without it points have no wall times.
    """
    order = {example_id: position for position, example_id in enumerate(example_ids)}
    frame = rows.to_pandas()
    frame["order"] = frame["example_id"].map(order)
    found: dict[str, list[Point]] = {}
    for index, group in frame.sort_values("order").groupby("setting"):
        setting = settings[int(index)]
        assert len(group) == len(example_ids), f"setting {index} has {len(group)} of {len(example_ids)} rows"
        point = Point(
            knob=setting.knob,
            correct=group["correct"].to_numpy(),
            llm_tokens=group["llm_tokens"].to_numpy(),
            total_tokens=group["tokens"].to_numpy(),
            bytes_moved=group["bytes"].to_numpy(),
            flops_used=group["flops"].to_numpy(),
            answered=group["answered"].to_numpy(),
            seconds=None if times is None else times.seconds(group),
            passes=(float(group["slm_passes"].mean()), float(group["llm_passes"].mean())),
        )
        found.setdefault(setting.method, []).append(point)
    return found


def same_responses(rows: pa.Table, settings: Sequence[Setting], first: str, second: str) -> tuple[int, int]:
    """(equal, all): on how many examples the settings of a method gave the same token ids as the one of another."""
    (index,) = [i for i, setting in enumerate(settings) if setting.method == second]
    expected = _response_digests(rows, index)
    equal = [_response_digests(rows, i) == expected for i, setting in enumerate(settings) if setting.method == first]
    return int(sum(one.sum() for one in equal)), sum(len(one) for one in equal)


def _response_digests(rows: pa.Table, setting: int) -> npt.NDArray[np.int64]:
    kept = rows.filter(pa.compute.equal(rows["setting"], setting)).sort_by("example_id")
    digests: npt.NDArray[np.int64] = kept["response_crc"].to_numpy()
    return digests
