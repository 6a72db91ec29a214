"""Engines from the configuration: the one place that knows which class runs a model.

Label collection, evaluation and serving build their engines here, so they all score and decode alike.
"""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from citer_ray.config import CiterConfig, ModelConfig, Replicas, VllmConfig
from citer_ray.engine import Engine
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.remote import RemoteEngine
from citer_ray.engines.remote_client import RemoteClient
from citer_ray.engines.vllm_placement import (
    Placement,
    claim_cores,
    place_on_gpus,
    split_evenly,
    usable_cores,
    visible_gpus,
)
from citer_ray.errors import ConfigError, PairError
from citer_ray.model_shape import DecoderShape
from citer_ray.pair.models import load_hf_config, load_model, resolve_device, resolve_path
from citer_ray.router_artifact import load_router

if TYPE_CHECKING:
    from citer_ray.engines.vllm_engine import VLLMEngine
    from citer_ray.engines.vllm_launch import Speculation, VLLMOptions

Role = Literal["slm", "llm"]
Purpose = Literal["decode", "score"]

# Visits of many responses trickle in; two passes of the SLM gather twice as many (measured: 1.2x throughput).
_LLM_DELAY = 2
_CPU_KV_CACHE_GIB = 2.0
_SLM_CORES = 0.25  # part of a worker's cores: the LLM has more to compute


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


def check_engines(spec: EngineSpec) -> None:
    """Refuse what vLLM could not run, before any process starts or any weights load. Other engines need no check, and
    nor does an LLM that another server runs.

    Raises:
        ConfigError: vLLM or its plugin is missing, or a setting does not fit a model.
        PairError: no handoff token, a vocabulary that a model does not cover, or an SLM without a routed version.
    """
    if spec.config.engine.factory is not None:
        _factory(spec.config.engine.factory)
        return
    if spec.config.engine.kind != "vllm":
        return
    from citer_ray.engines.vllm_launch import check, routed_names
    from citer_ray.engines.vllm_settings import ModelSettings

    if spec.handoff_token_id is None:
        raise PairError(
            "the pair has no handoff token, which routing in vLLM needs; set pair.handoff_token to a token that no "
            "prompt or response contains"
        )
    settings = ModelSettings(spec.shared_vocab_size, tuple(_masked(spec)), spec.handoff_token_id)
    roles: tuple[Role, ...] = ("slm", "llm") if engine_kind("llm", spec.config) == "vllm" else ("slm",)
    for role in roles:
        architecture = check(resolve_path(spec.model(role)), settings, _vllm_options(role, spec, Placement()), None)
        if role == "slm" and architecture is None:
            raise PairError(
                f"{spec.model(role).path} has no routed version, so it cannot be the SLM in vLLM; take one of "
                f"{routed_names()}, add a line to citer_ray/engines/vllm_architectures.py, or set engine.kind: "
                "transformers"
            )


def engine_kind(role: Role, config: CiterConfig) -> Literal["remote", "factory", "vllm", "transformers"]:
    """What runs a model: another server wins over a factory, and that over `engine.kind`."""
    if role == "llm" and config.engine.remote.url is not None:
        return "remote"
    return "factory" if config.engine.factory is not None else config.engine.kind


def build_engine(
    role: Role,
    spec: EngineSpec,
    *,
    router: Path | None = None,
    purpose: Purpose = "decode",
    executor: Executor | None = None,
    worker: Replicas | None = None,
) -> Engine:
    """Load one model of the pair behind the configured engine.

    Args:
        role: which model.
        spec: the pair.
        router: folder of the router that the SLM shall score with, under the name `router`.
        purpose: `score` may leave out what decoding needs.
        executor: where forward passes of the transformers engine run; see there.
        worker: CPUs and GPUs of the process that builds it, where other workers run beside it. A vLLM engine binds
            itself to its part of them.

    Raises:
        PairError: the model cannot be loaded, or the router belongs to another one.
        ConfigError: the engine's kind is not available.
    """
    kind = engine_kind(role, spec.config)
    if kind == "remote":
        return RemoteEngine(
            RemoteClient(spec.config.engine.remote),
            shared_vocab_size=spec.shared_vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_model_len=spec.max_model_len,
            masked_ids=_masked(spec),
        )
    if spec.config.engine.factory is not None:
        return _factory(spec.config.engine.factory)(role, spec)
    if kind == "vllm":
        placements = _placements([role], spec, worker)
        return _vllm_engine(role, spec, router, purpose, placements[0])
    engine = TransformersEngine(
        load_model(spec.model(role)),
        shared_vocab_size=spec.shared_vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=spec.max_model_len,
        masked_ids=_masked(spec),
        max_rows=spec.config.engine.max_rows,
        max_pass_tokens=spec.config.engine.max_pass_tokens,
        executor=executor,
        delay=_LLM_DELAY if role == "llm" else 0,
    )
    if router is not None:
        loaded, _ = load_router(router, slm_fingerprint=spec.slm_fingerprint)
        engine.set_scorer("router", engine.router_scorer(loaded))
    return engine


def _factory(path: str) -> Callable[[Role, EngineSpec], Engine]:
    """The function behind `engine.factory`."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine.factory {path!r} cannot be imported: {error}; use package.module:function") from None
    return cast("Callable[[Role, EngineSpec], Engine]", found)


def build_pair(
    spec: EngineSpec, *, router: Path | None = None, executor: Executor | None = None, worker: Replicas | None = None
) -> tuple[Engine, Engine]:
    """Both models in one process, each on its own part of the process's cores or GPUs; see `build_engine`."""
    if engine_kind("llm", spec.config) == "vllm":
        slm, llm = _placements(["slm", "llm"], spec, worker)
        return _vllm_engine("slm", spec, router, "decode", slm), _vllm_engine("llm", spec, None, "decode", llm)
    slm_engine = build_engine("slm", spec, router=router, executor=executor, worker=worker)
    return slm_engine, build_engine("llm", spec, executor=executor)


def build_evaluated_pair(spec: EngineSpec, *, worker: Replicas | None = None) -> tuple[TransformersEngine, Engine]:
    """Both models for an evaluation: the SLM on the transformers engine, which has every scorer and takes several
    routers at once, and the LLM on the configured one; on GPUs the SLM gets the worker's first.

    Raises:
        PairError, ConfigError: see `build_engine`.
    """
    plain = spec.config.engine.model_copy(update={"kind": "transformers", "factory": None})
    slm = build_engine("slm", replace(spec, config=spec.config.model_copy(update={"engine": plain})))
    assert isinstance(slm, TransformersEngine)
    if engine_kind("llm", spec.config) == "vllm":
        _, placement = _placements(["slm", "llm"], spec, worker)
        return slm, _vllm_engine("llm", spec, None, "decode", placement)
    return slm, build_engine("llm", spec, worker=worker)


def build_speculating_llm(
    spec: EngineSpec, speculation: Speculation | None, worker: Replicas | None = None
) -> VLLMEngine:
    """The LLM on vLLM with speculative decoding (None: without), whatever engine is configured.

    `vllm_speculative.measure_speculation` compares what comes out.

    Raises:
        ConfigError: vLLM is not installed, or refuses the method on this machine.
    """
    (placement,) = _placements(["llm"], spec, worker)
    return _vllm_engine("llm", spec, None, "decode", placement, speculation)


def _placements(roles: list[Role], spec: EngineSpec, worker: Replicas | None) -> list[Placement]:
    """Where the vLLM engines of one worker run, in the order of `roles`."""
    if all(resolve_device(spec.model(role)).type == "cpu" for role in roles):
        if worker is None and len(roles) == 1:
            return [Placement()]
        cores = claim_cores(max(len(roles), math.floor(worker.num_cpus) if worker else len(usable_cores())))
        if len(roles) == 1 or len(cores) < 2:
            return [Placement(cores=cores) for _ in roles]
        return [Placement(cores=part) for part in split_evenly(cores, _SLM_CORES)]
    sizes = [_vllm_settings(role, spec).tensor_parallel_size for role in roles]
    weights = [_weight_bytes(spec.model(role)) for role in roles]
    gpus = visible_gpus(torch.cuda.device_count())
    return place_on_gpus(gpus, sizes, weights, worker.num_gpus if worker else 0.0)


def _weight_bytes(model: ModelConfig) -> float:
    shape = DecoderShape.from_config(load_hf_config(model))
    return shape.total_params * (4.0 if model.dtype == "float32" else 2.0)


def _vllm_settings(role: Role, spec: EngineSpec) -> VllmConfig:
    return spec.config.engine.slm if role == "slm" else spec.config.engine.llm


def _vllm_engine(
    role: Role,
    spec: EngineSpec,
    router: Path | None,
    purpose: Purpose,
    placement: Placement,
    speculation: Speculation | None = None,
) -> VLLMEngine:
    from citer_ray.engines.vllm_engine import VLLMEngine  # vLLM is an extra, and slow to import

    return VLLMEngine(
        resolve_path(spec.model(role)),
        shared_vocab_size=spec.shared_vocab_size,
        eos_token_ids=spec.eos_token_ids,
        handoff_token_id=spec.handoff_token_id,
        router=router,
        slm_fingerprint=spec.slm_fingerprint,
        masked_ids=_masked(spec),
        purpose=purpose,
        needs_hidden_states=role == "slm",
        options=replace(_vllm_options(role, spec, placement), speculation=speculation),
    )


def _vllm_options(role: Role, spec: EngineSpec, placement: Placement) -> VLLMOptions:
    from citer_ray.engines.vllm_launch import VLLMOptions

    model, settings = spec.model(role), _vllm_settings(role, spec)
    on_cpu = resolve_device(model).type == "cpu"
    return VLLMOptions(
        dtype="float32" if model.dtype == "auto" and on_cpu else model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=spec.config.engine.max_rows,
        kv_cache_gib=settings.kv_cache_gib or (_CPU_KV_CACHE_GIB if on_cpu else None),
        tensor_parallel_size=settings.tensor_parallel_size,
        enforce_eager=settings.enforce_eager,
        visit_hold=settings.visit_hold,
        cores=placement.cores,
        devices=placement.devices,
        gpu_memory=placement.gpu_memory,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


def _masked(spec: EngineSpec) -> list[int]:
    return [] if spec.handoff_token_id is None else [spec.handoff_token_id]


def limit_threads(config: CiterConfig, replicas: Replicas) -> None:
    """Bind torch to a worker's share of the processor: idle threads of many workers would fight for it."""
    torch.set_num_threads(config.engine.torch_threads or max(1, math.floor(replicas.num_cpus)))


def freeze_startup_objects() -> None:
    """Keep what a worker has loaded out of later garbage collections, as Serve does in its replicas.

    With torch and vLLM imported a full collection takes about half a second, at any moment.
    """
    gc.collect()
    gc.freeze()
