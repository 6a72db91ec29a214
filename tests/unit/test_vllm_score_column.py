"""The handoff column: what goes in comes out of log-softmax unchanged, and changes nothing else."""

from __future__ import annotations

import pytest
import torch

from citer_ray.engines.vllm_score_column import decode_score, decode_scores, encode_scores


def scores() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0.5, 1.0, 1 - 2**-24, 2.0**-40, 0.1, torch.finfo(torch.float32).eps])
    return torch.cat([torch.rand(1000, generator=generator), edges])


def test_scores_survive_exactly() -> None:
    assert torch.equal(decode_scores(encode_scores(scores())), scores())


def test_log_softmax_passes_the_column_and_ignores_it() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = 40 * torch.randn(len(scores()), 50, generator=generator)
    with_column = torch.cat([logits_BV, encode_scores(scores())[:, None]], 1).log_softmax(-1)
    assert [decode_score(value) for value in with_column[:, -1].tolist()] == scores().tolist()
    assert torch.equal(with_column[:, :-1], logits_BV.log_softmax(-1))
    assert torch.all(with_column[:, -1].exp() == 0)


def test_zero_stays_below_every_threshold_that_a_router_can_need() -> None:
    smallest = decode_scores(encode_scores(torch.zeros(1)))
    assert 0 < smallest.item() < 1e-20


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_the_column_cannot_be_sampled_at_any_temperature(temperature: float) -> None:
    column = encode_scores(torch.tensor([1.0, 0.0])) / temperature
    logits_BV = torch.stack([torch.tensor([-90.0, -80.0]) / temperature, column])
    assert not torch.isnan(logits_BV.T.softmax(-1)).any()
    assert torch.all(logits_BV.T.softmax(-1)[:, 1] == 0)
