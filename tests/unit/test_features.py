"""What a router reads: the same at a step as from stored hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from citer_ray.config import RouterConfig
from citer_ray.decoding import Request, decode
from citer_ray.engine import TokenSequence
from citer_ray.engines.scorers import StepState
from citer_ray.features import FeatureReader
from citer_ray.policy import Threshold
from citer_ray.router import Router
from tests.conformance import prompts
from tests.unit.test_hf import make_engine


def test_features_in_the_configured_order() -> None:
    embedding = torch.arange(12.0).reshape(4, 3)
    hidden, logits = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.1, 3.0, -torch.inf, 2.0]])
    config = RouterConfig(features=("token_embedding", "top_logits", "hidden"), top_logits=2)
    read = FeatureReader(config, embedding)(hidden, logits)
    torch.testing.assert_close(read, torch.tensor([[3.0, 4.0, 5.0, 3.0, 2.0, 1.0, 2.0]]))


@pytest.mark.parametrize("features", [("hidden",), ("hidden", "top_logits", "token_embedding")])
async def test_a_step_reads_what_a_stored_state_gives(tiny_slm: LlamaForCausalLM, features: tuple[str, ...]) -> None:
    engine = make_engine(tiny_slm)
    config = RouterConfig(features=features, top_logits=5, widths=(1.0,))  # type: ignore[arg-type]
    prompt, response = prompts(2, 3)
    (scores,) = await engine.score([TokenSequence(prompt, response)], hidden=True)
    assert scores.hidden is not None
    stored_TF = engine.features(scores.hidden, config)
    router = Router(stored_TF.shape[1], config, generator=torch.Generator().manual_seed(0)).eval()
    engine.set_scorer("router:x", engine.router_scorer(router))
    trace = await decode(engine, None, Request(prompt, Threshold("router:x", 0.0), 1))
    expected = router.p_slm(torch.from_numpy(stored_TF))
    np.testing.assert_allclose(trace.scores, expected[:1].numpy(), atol=1e-4)


def test_a_state_can_be_cut_to_some_responses() -> None:
    state = StepState(torch.arange(6.0).reshape(3, 2), torch.arange(9.0).reshape(3, 3), [5, 6, 7], [1, 2, 3], [5, 1, 7])
    part = state.select([2, 0])
    assert (part.positions, part.keys, part.starts) == ([7, 5], [3, 1], [7, 5])
    assert part.hidden_BH.tolist() == [[4, 5], [0, 1]]
