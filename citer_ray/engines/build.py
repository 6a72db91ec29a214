"""Engines from the configuration: the one place that knows which class runs a model.

Label collection, evaluation and serving build their engines here, so they all score and decode alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

import torch

from citer_ray.config import CiterConfig, ModelConfig, Replicas
from citer_ray.engine import Engine
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import Scorer
from citer_ray.errors import ConfigError
from citer_ray.pair.models import load_model

Role = Literal["slm", "llm"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that a worker needs to build the pair's engines; small, and travels between processes.

    Attributes:
        config: the run's configuration.
        shared_vocab_size: ids that both models know.
        eos_token_ids: ids that end a response.
        max_model_len: tokens that both models can hold.
        handoff_token_id: never written; None if the pair reserves none.
    """

    config: CiterConfig
    shared_vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    handoff_token_id: int | None

    def model(self, role: Role) -> ModelConfig:
        """The configuration of one model."""
        return self.config.pair.slm if role == "slm" else self.config.pair.llm


def build_engine(
    role: Role,
    spec: EngineSpec,
    *,
    scorers: Mapping[str, Scorer] | None = None,
    executor: Executor | None = None,
) -> Engine:
    """Load one model of the pair behind the configured engine.

    Args:
        role: which model.
        spec: the pair.
        scorers: scorers by name, for the SLM.
        executor: where forward passes run; see `TransformersEngine`.

    Raises:
        PairError: the model cannot be loaded.
        ConfigError: the engine's kind is not available.
    """
    settings = spec.config.engine
    if settings.kind != "transformers":
        raise ConfigError(f"engine.kind {settings.kind!r} does not run here yet; set engine.kind to transformers")
    return TransformersEngine(
        load_model(spec.model(role)),
        shared_vocab_size=spec.shared_vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=spec.max_model_len,
        scorers=scorers,
        masked_ids=[] if spec.handoff_token_id is None else [spec.handoff_token_id],
        max_rows=settings.max_rows,
        max_pass_tokens=settings.max_pass_tokens,
        executor=executor,
        # Visits of many responses trickle in; two passes of the SLM gather twice as many (measured: 1.2x throughput).
        delay=2 if role == "llm" else 0,
    )


def limit_threads(config: CiterConfig, replicas: Replicas) -> None:
    """Bind torch to a worker's share of the processor: idle threads of many workers would fight for it."""
    torch.set_num_threads(config.engine.torch_threads or max(1, math.floor(replicas.num_cpus)))
