"""A router for an SLM without training: seeded weights, and thresholds measured on its own responses."""

from __future__ import annotations

from pathlib import Path

import torch

from citer_ray.calibration import CalibrationPoint, CalibrationTable, threshold_for_share
from citer_ray.config import CiterConfig, RouterConfig
from citer_ray.decoding import Request, decode_many
from citer_ray.engines.build import build_engine
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import RouterScorer
from citer_ray.pair.models import load_hf_config
from citer_ray.policy import Threshold
from citer_ray.preparation import engine_spec, prepare
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, save_router

QUESTIONS = (
    "Ana has 3 apples and buys 4 more. How many apples does she have?",
    "What is 12 + 30?",
    "Tom runs 5 km a day.",
)


async def write_router(config: CiterConfig, folder: Path, seed: int = 0) -> None:
    """Save a router whose `p_slm` spreads, with a calibration table by the quantile rule."""
    prepared = prepare(config)
    spec = engine_spec(prepared)
    slm = build_engine("slm", spec)
    assert isinstance(slm, TransformersEngine)
    architecture = RouterConfig(batch_norm=False)
    hidden_size = load_hf_config(config.pair.slm).hidden_size
    router = Router(hidden_size, architecture, generator=torch.Generator().manual_seed(seed)).eval()
    with torch.no_grad():
        router.output.weight.mul_(20)
    slm.set_scorer("router", RouterScorer(router))
    prompts = [config.prompt.encode_text(question + "\n", prepared.tokenizer, chat=False) for question in QUESTIONS]
    requests = [Request(prompt, Threshold("router", 0.0), 60) for prompt in prompts]
    traces = await decode_many(slm, None, requests, in_flight=len(requests))
    scores = [score for trace in traces for score in trace.scores if score is not None]
    shares = (0.1, 0.2, 0.4, 0.6)
    points = {threshold_for_share(scores, share): share for share in shares}
    table = CalibrationTable(
        points=tuple(CalibrationPoint(llm_share=share, threshold=value) for value, share in sorted(points.items()))
    )
    metadata = RouterMetadata(
        architecture=architecture,
        hidden_size=hidden_size,
        fingerprint=prepared.fingerprint,
        round=1,
        threshold=table.threshold_for(0.2),
        calibration=table,
        handoff_token_id=prepared.info.handoff_token_id,
    )
    save_router(router, metadata, folder)
