"""How many replicas and GPUs a load needs, from the cost model: a first guess before a load test, not a measurement.

Fed by the shapes of a pair, a kind of GPU and a load; read by `infra/sizing.py` and docs/operations.md. A pass over
b rows takes t(b) = max(A + B b, C b): A reads the weights, B a row's KV cache, C computes a row (and all tokens that a
visit has to read). Passes in progress follow Little's law, b = rate * t(b), hence b = rate * A / (1 - rate * B). A
replica can take the load while rate * B and rate * C stay below 1, and is planned for less. Nothing is counted for the
network, for scheduling (docs/performance.md: a visit waits for the end of a pass), or for the router.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from citer_ray.cost import ModelCost
from citer_ray.errors import ConfigError

MAX_REPLICAS = 100_000


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its data sheet.

    Attributes:
        gigabytes: of memory.
        gigabytes_per_s: to and from it.
        teraflops: dense, in the weights' dtype.
        price: of an hour, in any currency.
        efficiency: part of the data sheet's speed that is reached.
    """

    gigabytes: float = 80.0
    gigabytes_per_s: float = 3350.0
    teraflops: float = 989.0
    price: float = 0.0
    efficiency: float = 0.5


@dataclass(frozen=True)
class Load:
    """What is asked of a service.

    Attributes:
        requests_per_s: at the peak.
        prompt_tokens: of a request, on average.
        new_tokens: of a response, on average.
        llm_share: part of the new tokens that the LLM writes.
    """

    requests_per_s: float
    prompt_tokens: int
    new_tokens: int
    llm_share: float

    def __post_init__(self) -> None:
        if self.requests_per_s <= 0 or self.prompt_tokens < 1 or self.new_tokens < 1 or not 0 <= self.llm_share <= 1:
            raise ConfigError(
                "a load needs more than 0 requests a second, at least 1 token of prompt and response, and an LLM share "
                "in [0, 1]"
            )


@dataclass(frozen=True)
class ModelPlan:
    """Replicas of one model.

    Attributes:
        replicas: how many.
        gpus: of all replicas.
        batch: rows in a pass, on average.
        pass_ms: of a pass, in milliseconds.
        sessions: that hold a KV cache in one replica.
        limit: what sets the number of replicas: `bandwidth`, `arithmetic`, `memory`, `rows`, or `one` is enough.
    """

    replicas: int
    gpus: int
    batch: float
    pass_ms: float
    sessions: float
    limit: str


@dataclass(frozen=True)
class Plan:
    """Both models; None where a load does not need one."""

    slm: ModelPlan | None
    llm: ModelPlan | None
    load: Load
    gpu: Gpu

    @property
    def gpus(self) -> int:
        """GPUs of both models."""
        return sum(plan.gpus for plan in (self.slm, self.llm) if plan)

    @property
    def token_ms(self) -> float:
        """Milliseconds between tokens, on average: a pass of the SLM, and of the LLM at its share of the tokens."""
        return (self.slm.pass_ms if self.slm else 0.0) + (self.load.llm_share * self.llm.pass_ms if self.llm else 0.0)

    @property
    def price_per_million_tokens(self) -> float:
        """Of written tokens, at the planned load."""
        return self.gpus * self.gpu.price / 3600.0 / (self.load.requests_per_s * self.load.new_tokens) * 1e6


@dataclass(frozen=True)
class _Speed:
    """Seconds of a pass, on the GPUs of one replica: A (`weights`), B (`cache`) and C (`arithmetic`)."""

    weights: float
    cache: float
    arithmetic: float

    def busy(self, rate: float) -> float:
        return rate * max(self.cache, self.arithmetic)

    def batch(self, rate: float) -> float:
        return rate * self.weights / (1.0 - rate * self.cache)

    def seconds(self, batch: float) -> float:
        return max(self.weights + self.cache * batch, self.arithmetic * batch)


def plan(
    slm: ModelCost, llm: ModelCost, load: Load, gpu: Gpu, *, slm_gpus: int, llm_gpus: int, rows: int, busy: float = 0.7
) -> Plan:
    """Replicas for a load.

    Args:
        slm: cost of the SLM, which runs at every position.
        llm: cost of the LLM, which reads all tokens and writes its share.
        load: the peak.
        gpu: kind of GPU.
        slm_gpus: GPUs of one replica of the SLM (tensor parallel).
        llm_gpus: the same of the LLM.
        rows: sessions that a replica holds (`engine.max_rows`).
        busy: part of a replica's capacity that is planned for.

    Raises:
        ConfigError: a model's weights do not fit its GPUs.
    """
    share, tokens = load.llm_share, load.prompt_tokens + load.new_tokens
    slm_plan = llm_plan = None
    speeds: list[tuple[str, ModelCost, _Speed, int, float]] = []
    if share < 1:  # with the LLM alone there is no SLM
        speeds.append(("slm", slm, _speed(slm, load, gpu, slm_gpus, tokens / load.new_tokens), slm_gpus, 1.0))
    if share > 0:
        new_a_pass = tokens / (share * load.new_tokens)
        speeds.append(("llm", llm, _speed(llm, load, gpu, llm_gpus, new_a_pass), llm_gpus, share))
    # Batches set how long a response takes, and that sets how many sessions are open; one more replica lowers both.
    counts = {name: _enough(speed, load, part, busy) for name, _, speed, _, part in speeds}
    limits = {name: _reason(speed, counts[name]) for name, _, speed, _, _ in speeds}
    while True:
        batches = {name: speed.batch(_rate(load, part, counts[name])) for name, _, speed, _, part in speeds}
        seconds = load.new_tokens * sum(part * speed.seconds(batches[name]) for name, _, speed, _, part in speeds)
        full = []
        for name, cost, _, gpus, _ in speeds:
            held = load.requests_per_s * seconds / counts[name]
            fitting = _sessions_in_memory(cost, gpu, gpus, tokens, name)
            if held > min(rows, fitting):
                full.append((name, "rows" if rows < fitting else "memory"))
        if not full:
            break
        for name, limit in full:
            counts[name], limits[name] = counts[name] + 1, limit
            if counts[name] > MAX_REPLICAS:
                raise ConfigError(
                    f"more than {MAX_REPLICAS} replicas of the {name}: lower the load or take larger GPUs"
                )
    for name, _, speed, gpus, _ in speeds:
        held = load.requests_per_s * seconds / counts[name]
        milliseconds = 1000 * speed.seconds(batches[name])
        made = ModelPlan(counts[name], counts[name] * gpus, batches[name], milliseconds, held, limits[name])
        slm_plan, llm_plan = (made, llm_plan) if name == "slm" else (slm_plan, made)
    return Plan(slm_plan, llm_plan, load, gpu)


def _speed(cost: ModelCost, load: Load, gpu: Gpu, gpus: int, new_tokens_a_pass: float) -> _Speed:
    context = load.prompt_tokens + load.new_tokens / 2
    bandwidth = gpu.gigabytes_per_s * 1e9 * gpu.efficiency * gpus
    flops = cost.pass_flops(1, round(context)) * new_tokens_a_pass
    return _Speed(
        weights=cost.weight_bytes / bandwidth,
        cache=cost.kv_bytes_per_token * context / bandwidth,
        arithmetic=flops / (gpu.teraflops * 1e12 * gpu.efficiency * gpus),
    )


def _rate(load: Load, part: float, replicas: int) -> float:
    """Passes a second, counted by rows, of one replica."""
    return load.requests_per_s * load.new_tokens * part / replicas


def _enough(speed: _Speed, load: Load, part: float, busy: float) -> int:
    return max(1, math.ceil(speed.busy(_rate(load, part, 1)) / busy))


def _reason(speed: _Speed, replicas: int) -> str:
    if replicas == 1:
        return "one"
    return "arithmetic" if speed.arithmetic > speed.cache else "bandwidth"


def _sessions_in_memory(cost: ModelCost, gpu: Gpu, gpus: int, tokens: int, name: str) -> int:
    """Sessions whose whole KV cache fits beside the weights, with a tenth of the memory left for the rest."""
    weights = cost.shape.total_params * cost.dtype_bytes
    free = 0.9 * gpu.gigabytes * 1e9 * gpus - weights
    sessions = math.floor(free / (cost.kv_bytes_per_token * tokens))
    if sessions < 1:
        raise ConfigError(
            f"the {name} has {weights / 1e9:.0f} GB of weights and does not fit {gpus} GPU(s) of {gpu.gigabytes:g} GB "
            "with a KV cache; give a replica more GPUs"
        )
    return sessions
