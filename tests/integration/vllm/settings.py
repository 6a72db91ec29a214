"""How the engines of this folder's tests run, and the router that they run with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from citer_ray.config import RouterConfig
from citer_ray.engines.vllm_launch import VLLMOptions
from citer_ray.engines.vllm_placement import usable_cores
from citer_ray.fingerprint import PairFingerprint
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, save_router

OPTIONS = VLLMOptions(
    dtype="float32",
    kv_cache_gib=0.125,
    block_size=32,
    enforce_eager=True,
    max_num_seqs=40,
    cores=tuple(usable_cores()[:1]),
)
LLM_OPTIONS = replace(OPTIONS, cores=tuple(usable_cores()[-1:]))
MAX_MODEL_LEN = 511  # of the embedded pair, less vLLM's one
PADDING = (32, 96)  # further rows of the SLM's and the LLM's vocabulary


def make_router(folder: Path, hidden_size: int, handoff_id: int, slm_fingerprint: str = "slm") -> Path:
    """A router with random weights whose scores spread over (0, 1)."""
    config = RouterConfig()
    router = Router(hidden_size, config, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        router.output.weight.mul_(30)
    metadata = RouterMetadata(
        architecture=config,
        hidden_size=hidden_size,
        fingerprint=PairFingerprint(slm=slm_fingerprint, llm="llm", tokenizer="tokenizer"),
        round=1,
        handoff_token_id=handoff_id,
    )
    save_router(router.eval(), metadata, folder)
    return folder
