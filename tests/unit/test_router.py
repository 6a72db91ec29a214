"""The router: sizes, dtypes, dropout, saturation."""

from __future__ import annotations

import pytest
import torch

from citer_ray.config import RouterConfig
from citer_ray.policy import LLM_ONLY_THRESHOLD, hands_off
from citer_ray.router import Router

H = 8


def make_router(seed: int = 0, **config: object) -> Router:
    return Router(H, RouterConfig(**config), generator=torch.Generator().manual_seed(seed))


def hidden(rows: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(seed))


def test_the_default_is_the_papers_shape() -> None:
    router = make_router()
    shapes = {name: tuple(parameter.shape) for name, parameter in router.named_parameters()}
    assert shapes == {
        "hidden_layers.0.weight": (2 * H, H),
        "hidden_layers.0.bias": (2 * H,),
        "hidden_layers.1.weight": (H, 2 * H),
        "hidden_layers.1.bias": (H,),
        "norm.weight": (2 * H,),
        "norm.bias": (2 * H,),
        "output.weight": (1, H),
        "output.bias": (1,),
    }


@pytest.mark.parametrize(
    "config",
    [{"widths": (), "batch_norm": True}, {"widths": (0.01,)}, {"widths": (1.5, 1.0, 0.5), "batch_norm": False}],
)
def test_other_shapes(config: dict[str, object]) -> None:
    router = make_router(**config)
    assert len(router.hidden_layers) == len(router.config.widths)
    assert router(hidden()).shape == (16,)


def test_it_is_the_written_out_formula() -> None:
    router = make_router().eval()
    x = hidden()
    first, second = router.hidden_layers
    assert router.norm is not None
    expected = torch.relu(router.norm(first(x)))
    expected = router.output(torch.relu(second(expected))).squeeze(-1)
    torch.testing.assert_close(router(x), expected)
    torch.testing.assert_close(router.p_slm(x), torch.sigmoid(expected))


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, same, other = make_router(3), make_router(3), make_router(4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.output.weight, other.output.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_p_slm_computes_in_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    router = make_router().eval()
    x = hidden().to(dtype)
    p = router.p_slm(x)
    assert (p.dtype, p.shape) == (torch.float32, (16,))
    torch.testing.assert_close(p, router.p_slm(x.float()))


def test_p_slm_is_in_eval_mode_and_gives_the_mode_back() -> None:
    router = make_router(dropout=0.5).train()
    statistics = router.norm.running_mean.clone()  # type: ignore[union-attr]
    first, second = router.p_slm(hidden()), router.p_slm(hidden())
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert router.training
    assert torch.equal(statistics, router.norm.running_mean)  # type: ignore[union-attr]


def test_a_row_does_not_depend_on_its_batch() -> None:
    router = make_router().eval()
    x = hidden(5)
    alone = torch.cat([router.p_slm(row[None]) for row in x])
    torch.testing.assert_close(router.p_slm(x), alone)


def test_the_sigmoid_saturates_and_the_llm_only_threshold_still_holds() -> None:
    router = make_router()
    with torch.no_grad():
        router.output.weight.zero_()
        router.output.bias.fill_(40.0)
    p = router.p_slm(hidden(1)).item()
    assert p == 1.0
    assert not hands_off(p, 1.0)
    assert hands_off(p, LLM_ONLY_THRESHOLD)


def test_dropout_masks_are_applied_in_training_only() -> None:
    router = make_router(dropout=0.5, batch_norm=False)
    x = hidden()
    masks = router.draw_dropout(16, torch.Generator().manual_seed(0))
    assert masks is not None
    assert [tuple(mask.shape) for mask in masks] == [(16, 2 * H), (16, H)]
    assert set(masks[0].unique().tolist()) == {0.0, 2.0}
    router.train()
    assert torch.equal(router(x, masks), router(x, masks))
    zeros = [torch.zeros_like(mask) for mask in masks]
    torch.testing.assert_close(router(x, zeros), router.output.bias.expand(16))
    router.eval()
    assert torch.equal(router(x, zeros), router(x))


def test_no_dropout_needs_no_masks() -> None:
    assert make_router(dropout=0).draw_dropout(4, torch.Generator()) is None
