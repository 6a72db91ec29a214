"""Engines from the configuration: the one place that knows which class runs a model.

Label collection, evaluation and serving build their engines here, so they all score and decode alike.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from citer_ray.config import CiterConfig, ModelConfig, Replicas
from citer_ray.engine import Engine
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import RouterScorer, Scorer
from citer_ray.pair.models import load_model, resolve_device, resolve_path
from citer_ray.router_artifact import load_router

Role = Literal["slm", "llm"]
Purpose = Literal["decode", "score"]

# Visits of many responses trickle in; two passes of the SLM gather twice as many (measured: 1.2x throughput).
_LLM_DELAY = 2
_CPU_KV_CACHE_GIB = 2.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that a worker needs to build the pair's engines; small, and travels between processes.

    Attributes:
        config: the run's configuration.
        shared_vocab_size: ids that both models know.
        eos_token_ids: ids that end a response.
        max_model_len: tokens that both models can hold.
        handoff_token_id: never written; None if the pair reserves none.
        slm_fingerprint: what a router must belong to.
    """

    config: CiterConfig
    shared_vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    handoff_token_id: int | None
    slm_fingerprint: str

    def model(self, role: Role) -> ModelConfig:
        """The configuration of one model."""
        return self.config.pair.slm if role == "slm" else self.config.pair.llm


def build_engine(
    role: Role,
    spec: EngineSpec,
    *,
    router: Path | None = None,
    purpose: Purpose = "decode",
    executor: Executor | None = None,
) -> Engine:
    """Load one model of the pair behind the configured engine.

    Args:
        role: which model.
        spec: the pair.
        router: folder of the router that the SLM shall score with, under the name `router`.
        purpose: `score` may leave out what decoding needs.
        executor: where forward passes of the transformers engine run; see there.

    Raises:
        PairError: the model cannot be loaded, or the router belongs to another one.
        ConfigError: the engine's kind is not available.
    """
    if spec.config.engine.kind == "vllm":
        return _vllm_engine(role, spec, router, purpose)
    scorers: dict[str, Scorer] = {}
    if router is not None:
        loaded, _ = load_router(router, slm_fingerprint=spec.slm_fingerprint)
        scorers["router"] = RouterScorer(loaded)
    return TransformersEngine(
        load_model(spec.model(role)),
        shared_vocab_size=spec.shared_vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=spec.max_model_len,
        scorers=scorers,
        masked_ids=_masked(spec),
        max_rows=spec.config.engine.max_rows,
        max_pass_tokens=spec.config.engine.max_pass_tokens,
        executor=executor,
        delay=_LLM_DELAY if role == "llm" else 0,
    )


def _vllm_engine(role: Role, spec: EngineSpec, router: Path | None, purpose: Purpose) -> Engine:
    from citer_ray.engines.vllm_engine import VLLMEngine  # vLLM is an extra, and slow to import
    from citer_ray.engines.vllm_launch import VLLMOptions

    model, settings = spec.model(role), spec.config.engine.slm if role == "slm" else spec.config.engine.llm
    on_cpu = resolve_device(model).type == "cpu"
    options = VLLMOptions(
        dtype="float32" if model.dtype == "auto" and on_cpu else model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=spec.config.engine.max_rows,
        kv_cache_gib=settings.kv_cache_gib or (_CPU_KV_CACHE_GIB if on_cpu else None),
        tensor_parallel_size=settings.tensor_parallel_size,
        enforce_eager=settings.enforce_eager,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    return VLLMEngine(
        resolve_path(model),
        shared_vocab_size=spec.shared_vocab_size,
        eos_token_ids=spec.eos_token_ids,
        handoff_token_id=spec.handoff_token_id if router is not None else None,
        router=router,
        slm_fingerprint=spec.slm_fingerprint,
        masked_ids=_masked(spec),
        purpose=purpose,
        options=options,
    )


def _masked(spec: EngineSpec) -> list[int]:
    return [] if spec.handoff_token_id is None else [spec.handoff_token_id]


def limit_threads(config: CiterConfig, replicas: Replicas) -> None:
    """Bind torch to a worker's share of the processor: idle threads of many workers would fight for it."""
    torch.set_num_threads(config.engine.torch_threads or max(1, math.floor(replicas.num_cpus)))
