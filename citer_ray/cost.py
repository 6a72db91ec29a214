"""The cost model: bytes moved and floating-point operations of every pass, from a model's config alone.

What it needs is the config of each model, and from a decoding trace the passes of each model, as pairs
`(new_tokens, cached_tokens)`. Evaluation turns them into the gigabytes and FLOPs of the frontier, serving
into its counters. Everything is at batch 1: the bytes that a response would move if it ran alone. That makes
methods comparable; it is not what a batched server moves.

A routed response is charged as in CITER (arXiv 2502.01976): the SLM runs at every position, since the router
reads its hidden state, and a visit of the LLM is one pass over all tokens that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from citer_ray.model_shape import DecoderShape, HasToDict

_Numbers = npt.NDArray[np.float64]
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "int8": 1.0}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one model reads and computes.

    Attributes:
        shape: the model's counts.
        dtype_bytes: bytes of a weight; 0.5 for 4-bit weights.
        kv_bytes: bytes of a number in the KV cache.
    """

    shape: DecoderShape
    dtype_bytes: float
    kv_bytes: float

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | HasToDict,
        dtype_bytes: float | None = None,
        kv_bytes: float | None = None,
    ) -> ModelCost:
        """Read a model's cost from its config.

        Args:
            config: `config.json` as a mapping, or a `transformers` config.
            dtype_bytes: bytes of a weight; None takes the config's dtype, else 2.
            kv_bytes: bytes of a number in the KV cache; None takes `dtype_bytes`, but at least 2.

        Raises:
            PairError: the architecture does not follow the formulas (latent or linear attention, encoders).
        """
        shape = DecoderShape.from_config(config)
        weight = _DTYPE_BYTES.get(shape.dtype, 2.0) if dtype_bytes is None else dtype_bytes
        return cls(shape=shape, dtype_bytes=weight, kv_bytes=max(weight, 2.0) if kv_bytes is None else kv_bytes)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a pass over one token reads (W)."""
        return self.shape.active_params * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one token adds to the KV cache (K): a key and a value per KV head and layer."""
        return self.shape.num_layers * self._kv_bytes_per_layer

    @property
    def _kv_bytes_per_layer(self) -> float:
        return 2.0 * self.shape.num_kv_heads * self.shape.head_dim * self.kv_bytes

    def pass_bytes(self, new_tokens: int, cached_tokens: int) -> float:
        """Bytes that one pass moves: weights read, KV cache read for cached tokens and written for new ones.

        For a dense model with full attention this is `W + K * (cached_tokens + new_tokens)`.
        """
        return self.total_bytes([(new_tokens, cached_tokens)])

    def pass_flops(self, new_tokens: int, cached_tokens: int) -> float:
        """Floating-point operations of one pass: two per active parameter and new token, and the attention.

        For full attention: `2 * P * n + 4 * layers * heads * head_dim * n * (c + n / 2)`. The LM head is
        charged for every new token, which overstates a long chunk slightly, since only its last token needs
        logits.
        """
        return self.total_flops([(new_tokens, cached_tokens)])

    def total_bytes(self, passes: Iterable[tuple[int, int]]) -> float:
        """Sum of `pass_bytes` over passes `(new_tokens, cached_tokens)`."""
        shape = self.shape
        new, cached = _columns(passes)
        experts = np.zeros_like(new)
        if shape.num_experts:
            # Distinct experts among `new` tokens that pick k of E evenly; exactly k for one token. Real
            # routers pick less evenly, so a long chunk may read fewer.
            experts = shape.num_experts * (1.0 - (1.0 - shape.experts_per_token / shape.num_experts) ** new)
        weights = (shape.dense_params + experts * shape.expert_params) * self.dtype_bytes
        in_window = np.minimum(cached, shape.window)
        kv_tokens = shape.full_layers * (cached + new) + shape.window_layers * (in_window + new)
        return float(np.sum(weights + self._kv_bytes_per_layer * kv_tokens))

    def total_flops(self, passes: Iterable[tuple[int, int]]) -> float:
        """Sum of `pass_flops` over passes `(new_tokens, cached_tokens)`."""
        shape = self.shape
        new, cached = _columns(passes)
        # A new token attends to the cached ones and, on average, to half of the new ones.
        context = cached + new / 2.0
        attended = shape.full_layers * context + shape.window_layers * np.minimum(context, shape.window)
        attention = 4.0 * shape.num_heads * shape.head_dim * new * attended
        return float(np.sum(2.0 * shape.active_params * new + attention))


@dataclass(frozen=True, slots=True)
class RouterCost:
    """What one decision of the router reads and computes.

    Attributes:
        params: parameters of the MLP, batch norm's scale, shift and running statistics included.
        dtype_bytes: bytes of a parameter.
    """

    params: int
    dtype_bytes: float = 4.0

    @classmethod
    def from_widths(
        cls, hidden_size: int, widths: Sequence[float], *, batch_norm: bool = True, dtype_bytes: float = 4.0
    ) -> RouterCost:
        """Count the parameters of an MLP whose hidden layers are `widths` multiples of `hidden_size` wide."""
        sizes = [hidden_size, *(round(width * hidden_size) for width in widths), 1]
        params = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))
        return cls(params=params + (4 * sizes[1] if batch_norm else 0), dtype_bytes=dtype_bytes)

    @property
    def decision_bytes(self) -> float:
        """Bytes read for one decision."""
        return self.params * self.dtype_bytes

    @property
    def decision_flops(self) -> float:
        """Floating-point operations of one decision."""
        return 2.0 * self.params


@dataclass(frozen=True, slots=True)
class ResponseCost:
    """What one response cost, or the sum of several (they add with `+`)."""

    num_bytes: float = 0.0
    flops: float = 0.0
    slm_passes: int = 0
    llm_passes: int = 0
    decisions: int = 0

    @property
    def gigabytes(self) -> float:
        """Bytes moved, in units of 1e9."""
        return self.num_bytes / 1e9

    @property
    def passes(self) -> int:
        """Passes of both models."""
        return self.slm_passes + self.llm_passes

    def __add__(self, other: ResponseCost) -> ResponseCost:
        """Add two costs; start `sum()` with `ResponseCost()`."""
        return ResponseCost(
            num_bytes=self.num_bytes + other.num_bytes,
            flops=self.flops + other.flops,
            slm_passes=self.slm_passes + other.slm_passes,
            llm_passes=self.llm_passes + other.llm_passes,
            decisions=self.decisions + other.decisions,
        )


@dataclass(frozen=True, slots=True)
class PairCost:
    """The cost model of a pair and its router; `router` is None where no policy asks one."""

    slm: ModelCost
    llm: ModelCost
    router: RouterCost | None = None

    def response(
        self,
        slm_passes: Sequence[tuple[int, int]] = (),
        llm_passes: Sequence[tuple[int, int]] = (),
        decisions: int = 0,
    ) -> ResponseCost:
        """Price one response from its trace.

        Args:
            slm_passes: `(new_tokens, cached_tokens)` of every pass of the SLM; the first one holds the
                prompt.
            llm_passes: the same for the LLM; a visit is one pass over all that it has not seen.
            decisions: how often the router was asked.

        Raises:
            ValueError: decisions without a router, or a pass over no tokens.
        """
        if decisions and self.router is None:
            raise ValueError(f"{decisions} decisions, but this cost model has no router; give it a RouterCost")
        router_bytes = self.router.decision_bytes if self.router else 0.0
        router_flops = self.router.decision_flops if self.router else 0.0
        models_bytes = self.slm.total_bytes(slm_passes) + self.llm.total_bytes(llm_passes)
        models_flops = self.slm.total_flops(slm_passes) + self.llm.total_flops(llm_passes)
        return ResponseCost(
            num_bytes=models_bytes + decisions * router_bytes,
            flops=models_flops + decisions * router_flops,
            slm_passes=len(slm_passes),
            llm_passes=len(llm_passes),
            decisions=decisions,
        )


def autoregressive_passes(prompt_tokens: int, new_tokens: int) -> list[tuple[int, int]]:
    """Return the passes of a model that writes `new_tokens` tokens alone: the prompt, then a token each."""
    if new_tokens < 1:
        return []
    return [(prompt_tokens, 0), *((1, prompt_tokens + i) for i in range(new_tokens - 1))]


def _columns(passes: Iterable[tuple[int, int]]) -> tuple[_Numbers, _Numbers]:
    """Split passes into `(new, cached)`, float64 [passes] each."""
    table = np.array(list(passes), dtype=np.float64).reshape(-1, 2)
    new, cached = table[:, 0], table[:, 1]
    if np.any(new < 1) or np.any(cached < 0):
        raise ValueError("a pass computes at least one new token, on no fewer than 0 cached ones")
    return new, cached
