"""AdamW agrees with torch's class, and its state saves and loads."""

from __future__ import annotations

import torch
from torch import nn

from citer_ray.adamw import AdamW


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,))]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_it_takes_the_steps_of_torchs_class() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.0, weight_decay=0.1)
    for step, rate in enumerate((1e-2, 3e-2, 0.0, 1e-3)):
        reference.param_groups[0]["lr"] = rate
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(rate)
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_loaded_state_goes_on() -> None:
    ours = parameters()
    optimizer = AdamW(ours, weight_decay=0.1)
    set_gradients(ours, 0)
    optimizer.step(1e-2)
    other = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    resumed = AdamW(other, weight_decay=0.1)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in optimizer.state_dict().items()})
    for params, stepper in ((ours, optimizer), (other, resumed)):
        set_gradients(params, 1)
        stepper.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_gradients_are_forgotten() -> None:
    ours = parameters()
    optimizer = AdamW(ours, weight_decay=0.0)
    set_gradients(ours, 0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours)
