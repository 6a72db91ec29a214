"""AdamW over torch's functional form, with state that saves as plain tensors.

Not `torch.optim.AdamW`: making any `torch.optim.Optimizer` imports the compiler (torch._dynamo, sympy, triton), 4 to 6
seconds of CPU in every process that fits or resumes, which is more than fitting a small router takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) with the usual betas."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self._parameters = list(parameters)
        self._first = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._steps = [torch.zeros(()) for _ in self._parameters]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update; every parameter must have a gradient."""
        gradients = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad)
        adamw(
            list[Tensor](self._parameters),
            gradients,
            self._first,
            self._second,
            [],
            self._steps,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=_EPSILON,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts by `<index of the parameter>.<name>`; not copies."""
        state: dict[str, Tensor] = {}
        for index, (first, second, step) in enumerate(zip(self._first, self._second, self._steps, strict=True)):
            state |= {f"{index}.first": first, f"{index}.second": second, f"{index}.step": step}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave, for the same parameters."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
